"""
A driver on a cluster: one pipeline into two sinks, whose attempts leave a note once they prepared.

    python cluster_driver.py <folder> <master> <hold> <writer>

`hold` says which attempts wait, and until when: see `HOLDS`. `writer` is "tasks" or "engine", for
files, or the url of a PostgreSQL server with the tables of `TABLES`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pyspark import TaskContext
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from epochal.sinks.files import Files
from epochal.sinks.postgres import Postgres
from epochal.spark.pipeline import Pipeline
from epochal.terms import Limits

EPOCHS, FILES, ROWS = 5, 2, 20
"""Each epoch has two files, and each file is a partition."""
SINKS = ("all", "odd")
WAIT_MAX_S = 300.0
STARTS_MAX = 5
_CONF = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.executor.memory": "512m",
    "spark.locality.wait": "0",
    # Of two attempts both are to prepare: the one that comes late may take its time.
    "spark.python.task.killTimeout": "60s",
    "spark.speculation.interval": "100ms",
    "spark.speculation.quantile": "0.1",
    "spark.speculation.multiplier": "1.1",
    "spark.eventLog.enabled": "true",
    "spark.eventLog.compress": "false",
    "spark.eventLog.rolling.enabled": "false",
}


def make_source(root: Path) -> None:
    """Numbers: file n has those from n * ROWS on."""
    for folder in ("in", "notes", "events"):
        (root / folder).mkdir(parents=True)
    for at in range(EPOCHS * FILES):
        file = root / "in" / f"{at:02d}.json"
        file.write_text("\n".join(f'{{"id": {n}}}' for n in range(at * ROWS, (at + 1) * ROWS)))
        os.utime(file, (1_700_000_000 + at, 1_700_000_000 + at))


def numbers(epoch: int) -> list[int]:
    return list(range(epoch * FILES * ROWS, (epoch + 1) * FILES * ROWS))


def folder(root: Path, sink: str) -> Path:
    return root / "out" / sink


@dataclass(frozen=True, kw_only=True)
class Note:
    """What an attempt said of itself when its rows were prepared."""

    epoch: int
    partition: int
    attempt: int
    """Spark's task attempt id, which is in the handle too."""
    number: int
    """0 is the first attempt of its task."""
    pid: int
    handle: str = ""


def notes(root: Path, sink: str) -> list[Note]:
    files = sorted((root / "notes").glob(f"{sink}-*.json"))
    return [Note(**json.loads(file.read_text())) for file in files]


class Noting:
    """A sink whose attempts leave notes; those that `hold` names wait when their rows are there."""

    def writer(self: Any, task: Any) -> Any:
        writer = super().writer(task)  # type: ignore[misc]
        attempt = Attempt(self.root, self.hold, self.name, task.handle.epoch, str(task.handle))
        prepare = writer.prepare

        def prepare_and_tell() -> Any:
            attempt.wait_before()
            receipt = prepare()
            attempt.tell_and_wait()
            return receipt

        writer.prepare = prepare_and_tell
        return writer


@dataclass(frozen=True)
class NotingFiles(Noting, Files):
    root: str = ""
    hold: str = ""


@dataclass(frozen=True, kw_only=True)
class NotingPostgres(Noting, Postgres):
    root: str = ""
    hold: str = ""


TABLES = {
    "all": "CREATE TABLE everything (id bigint PRIMARY KEY)",
    "odd": "CREATE TABLE odd (id bigint PRIMARY KEY)",
}


def noting(root: Path, hold: str, sink: str) -> Callable[[Any], Any]:
    """
    The rows of a sink that Spark's own writer takes: attempts leave a note, and wait, when all
    their rows are at the writer and are not committed.
    """
    schema = "id bigint"

    def pass_on(batches: Any) -> Any:
        attempt = None
        for batch in batches:
            if batch.num_rows and attempt is None:
                epoch = batch.column(0)[0].as_py() // (FILES * ROWS)
                attempt = Attempt(str(root), hold, sink, epoch)
            yield batch
        if attempt is not None:
            attempt.wait_before()
            attempt.tell_and_wait()

    return lambda frame: frame.mapInArrow(pass_on, schema)


class Attempt:
    """One attempt of one task, which leaves a note and waits where `hold` names it."""

    def __init__(self, root: str, hold: str, sink: str, epoch: int, handle: str = "") -> None:
        context = TaskContext.get()
        self._root = Path(root)
        self._sink = sink
        self._note = Note(
            epoch=epoch,
            partition=context.partitionId(),
            attempt=context.taskAttemptId(),
            number=context.attemptNumber(),
            pid=os.getpid(),
            handle=handle,
        )
        self._wait = HOLDS[hold].get(epoch) if hold and self._is_first() else None

    def wait_before(self) -> None:
        if self._wait == "before":
            _wait_for(self._is_noted)
            time.sleep(0.5)

    def tell_and_wait(self) -> None:
        note = self._note
        file = self._root / "notes" / f"{self._sink}-{note.epoch}-{note.attempt}.json"
        scratch = file.with_suffix(".part")
        scratch.write_text(json.dumps(asdict(note)))
        scratch.rename(file)
        if self._wait == "after":
            _wait_for(lambda: False)

    def _is_first(self) -> bool:
        """A first attempt, and not again when a later start repeats the epoch."""
        return (self._note.partition, self._note.number) == (0, 0) and not self._is_noted()

    def _is_noted(self) -> bool:
        """Another attempt has prepared the same rows."""
        return any(
            (note.epoch, note.partition) == (self._note.epoch, self._note.partition)
            for note in notes(self._root, self._sink)
        )


def _wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_MAX_S
    while time.monotonic() < deadline and not what():
        time.sleep(0.05)


HOLDS = {
    # Until somebody kills them.
    "killed": {1: "after", 3: "after"},
    # Until Spark gives up on them; and, before they prepare, until a copy has prepared the same.
    "speculated": {1: "after", 3: "before"},
}
"""What the first attempt on partition 0 of the sink `all` does, by epoch."""


def connect(root: Path, master: str, *, speculation: bool) -> SparkSession:
    builder = SparkSession.builder.master(master).appName("cluster")
    for name, value in _CONF.items():
        builder = builder.config(name, value)
    builder = builder.config("spark.speculation", str(speculation).lower())
    spark = builder.config("spark.eventLog.dir", f"file://{root}/events").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def sinks(root: Path, hold: str, writer: str) -> list[Any]:
    condition = "id % 2 = 1"
    if writer.startswith("postgresql:"):
        noted = {"root": str(root), "name": "all", "hold": hold}
        return [
            NotingPostgres(writer, table="everything", strategy="prepared", tasks_max=2, **noted),
            Postgres(writer, table="odd", name="odd", strategy="prepared", where=condition),
        ]
    everything, odd = (str(folder(root, sink)) for sink in SINKS)
    if writer == "engine":
        select = noting(root, hold, "all")
        return [
            Files(everything, name="all", select=select),
            Files(odd, name="odd", where=condition),
        ]
    return [
        NotingFiles(everything, name="all", root=str(root), hold=hold, max_file_bytes=1 << 28),
        NotingFiles(odd, name="odd", root=str(root), format="jsonl", where=condition),
    ]


def main(root: Path, master: str, hold: str, writer: str) -> None:
    spark = connect(root, master, speculation=hold == "speculated")
    reader = spark.readStream.schema("id bigint").option("maxFilesPerTrigger", FILES)
    df = reader.json(str(root / "in"))
    # The sinks take note of each task.
    limits = Limits(driver_rows_max=0)
    pipeline = Pipeline("cluster", sinks(root, hold, writer), limits=limits)
    errors: list[str] = []
    while not _is_at_the_end(pipeline, df, root / "checkpoint", errors):
        if len(errors) == STARTS_MAX:
            sys.exit("\n\n".join(errors))
    # A clean start after a clean stop; the source has nothing more.
    _is_at_the_end(pipeline, df, root / "checkpoint", errors)
    (root / "errors.json").write_text(json.dumps(errors))
    spark.stop()


def _is_at_the_end(pipeline: Pipeline, df: Any, checkpoint: Path, errors: list[str]) -> bool:
    try:
        pipeline.start(df, checkpoint, availableNow=True).awaitTermination()
    except StreamingQueryException as error:
        errors.append(str(pipeline.error or error))
        return False
    finally:
        if pipeline._run is not None:
            pipeline._run.end()
    return True


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
