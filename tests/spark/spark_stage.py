"""Shared by the tests on Spark: a source whose epochs are known, and a way to crash a driver."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyspark
from pyspark import cloudpickle

from epochal.coordinator import Coordinator
from epochal.errors import RowRejected
from epochal.sinks.memory import Memory
from epochal.spark.pipeline import Pipeline
from epochal.telemetry.history_writer import Recorder

if TYPE_CHECKING:
    import pytest
    from pyspark.sql import DataFrame, SparkSession


_IS_3_5 = pyspark.__version__.startswith("3.5.")
FILES_ARE_WRITTEN_BY = "tasks" if _IS_3_5 else "Spark"
"""Spark 3.5 can't be asked afterwards what its own writer counted, and `check` says so."""
FEW_ROWS_ARE_WRITTEN_BY = "tasks" if _IS_3_5 else "the driver"
"""Spark 3.5 hands no Arrow to the driver, and `check` says so."""
_LONG_S = 6


@dataclass
class Source:
    """JSON files in a folder; each is one epoch."""

    spark: SparkSession
    folder: Path
    schema: str = "id bigint, v string"
    files: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, *epochs: Sequence[dict[str, Any]]) -> None:
        for rows in epochs:
            text = "\n".join(json.dumps(row) for row in rows)
            # Spark ignores its first name: a query that is running must not see it without its
            # time, by which older files come first, and much older ones than the newest never.
            hidden = self.folder / f".{self.files:04d}.json"
            hidden.write_text(text)
            os.utime(hidden, (1_700_000_000 + self.files, 1_700_000_000 + self.files))
            hidden.rename(self.folder / f"{self.files:04d}.json")
            self.files += 1
            self.rows += rows

    def add_numbers(self, epochs: int, rows: int = 10) -> None:
        first = len(self.rows)
        for at in range(epochs):
            start = first + at * rows
            self.add([{"id": n, "v": f"v{n}"} for n in range(start, start + rows)])

    @property
    def stream(self) -> DataFrame:
        reader = self.spark.readStream.schema(self.schema).option("maxFilesPerTrigger", 1)
        return reader.json(str(self.folder))

    @property
    def ids(self) -> list[int]:
        return sorted(row["id"] for row in self.rows)


def ids(sink: Any) -> list[int]:
    """What readers of a Memory sink see, sorted: a row that is there twice shows twice."""
    rows = sink.rows()
    return sorted(rows.column("id").to_pylist()) if rows.num_rows else []


def run_to_end(pipeline: Pipeline, df: DataFrame, checkpoint: Path, **options: Any) -> None:
    """Write everything that the source has, then stop cleanly."""
    query = pipeline.start(df, checkpoint, availableNow=True, **options)
    query.awaitTermination()
    pipeline._run.end()


class Crash(Exception):
    """Stands for the kill of a driver, without the cost of a new process."""


class Killer:
    """
    Ends a driver at a named step, as SIGKILL would: nothing is aborted, nothing is logged.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at: tuple[str, int | None] | None = None
        self.is_dead = False
        for verb in ("abort", "stop"):
            monkeypatch.setattr(Coordinator, verb, self._unless_dead(getattr(Coordinator, verb)))
        self._recorders: list[Recorder] = []
        monkeypatch.setattr(Recorder, "claimed", self._noting(Recorder.claimed))

    def close(self) -> None:
        """SIGKILL would have ended these threads; here they would outlive the test."""
        for recorder in self._recorders:
            recorder.close()

    def _noting(self, claimed: Callable[..., None]) -> Callable[..., None]:
        def noted(recorder: Recorder, *arguments: Any) -> None:
            self._recorders.append(recorder)
            claimed(recorder, *arguments)

        return noted

    def watch(self, step: str, epoch: int | None) -> None:
        if self.at == (step, epoch):
            self.at = None
            self.is_dead = True
            raise Crash(f"{step} {epoch}")

    def _unless_dead(self, verb: Callable[..., None]) -> Callable[..., None]:
        def alive_only(coordinator: Coordinator, *arguments: Any, **options: Any) -> None:
            if not self.is_dead:
                verb(coordinator, *arguments, **options)

        return alive_only

    def run(self, pipeline: Pipeline, df: DataFrame, checkpoint: Path, **options: Any) -> bool:
        """Start and go on until the crash, or to the end. True if it crashed."""
        self.is_dead = False
        try:
            run_to_end(pipeline, df, checkpoint, **options)
        except Exception:
            if not self.is_dead:
                raise
        crashed = self.is_dead
        if pipeline._run is not None:
            pipeline._run.end()
        self.is_dead = False
        return crashed


def copy_folder(source: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    return target


class Rejecting(Memory):
    """Its target takes no row."""

    def writer(self, task: Any) -> Any:
        raise RowRejected("id 7 is not a colour", "send colours")


class Breaking(Memory):
    """Its library has a defect."""

    def writer(self, task: Any) -> Any:
        raise ValueError("something in a library")


class SlowWriter(Memory):
    """Its tasks take long enough to be stopped while they run."""

    def writer(self, task: Any) -> Any:
        time.sleep(_LONG_S)
        return super().writer(task)


def cached(source: Source) -> set[int]:
    """Ids of the RDDs that Spark keeps; a test before this one may have stopped a query midway."""
    return set(source.spark.sparkContext._jsc.getPersistentRDDs())


def wait_for(what: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 120
    while not what():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.05)


def slowly(batches: Iterator[Any]) -> Iterator[Any]:
    """A query whose tasks take long enough to be stopped while they run."""
    for batch in batches:
        time.sleep(_LONG_S)
        yield batch


# Tasks can't import this file: what they need of it travels with them.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
