"""
A driver to be killed: a Hudi table and files under one decision.

    python hudi_victim.py <folder> <mode> <step>

It writes all that its source has, and kills its JVM and itself when it first comes to the step: one
of the pipeline's, or one between two calls to Hudi.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sinks.hudi.hudi_stage import OPTIONS, session

from epochal.sinks.files import Files
from epochal.sinks.hudi import Hudi
from epochal.sinks.hudi.client import HudiClient
from epochal.sinks.hudi.ledger import Ledger
from epochal.spark.pipeline import Pipeline

ROWS = 20
COLUMNS = "id BIGINT, version BIGINT, value BIGINT"
STEPS = (
    # of the pipeline
    "begun",
    "prepared",
    "rehearsed",
    "decided",
    "committed files",
    "committed hudi",
    # between calls to Hudi
    "before start",
    "after start",
    "after get_ready",
    "in the lock",
    "in the metadata table",
    "after complete",
    # what the driver before has left must be there to be cleared
    "after start",
    "before roll_back",
    "prepared",
    "after roll_back",
)
OPEN_S = 60


def ids_of(mode: str, epoch: int) -> range:
    """New ones; for upsert those of the epoch before, too."""
    first = epoch - 1 if mode == "upsert" and epoch else epoch
    return range(first * ROWS, (epoch + 1) * ROWS)


def add_epoch(root: Path, mode: str, epoch: int) -> None:
    file = root / "in" / f"{epoch}.json"
    rows = [{"id": n, "version": epoch} for n in ids_of(mode, epoch)]
    scratch = root / file.name
    scratch.write_text("\n".join(json.dumps(row) for row in rows))
    os.utime(scratch, (1_700_000_000 + epoch, 1_700_000_000 + epoch))
    scratch.rename(file)


def sinks_of(root: Path, mode: Any) -> list[Any]:
    return [
        Hudi(root / "table", name="hudi", mode=mode, options=OPTIONS),
        Files(str(root / "files"), name="files"),
    ]


class Death:
    def __init__(self, spark: Any, root: Path, step: str) -> None:
        self._jvm = spark.sparkContext._gateway.proc.pid
        self._root, self._step = root, step
        for name in ("start", "get_ready", "complete", "roll_back"):
            self._wrap(name)
        written = Ledger.with_epoch

        def with_epoch(ledger: Ledger, *given: Any) -> str:
            self.at("in the lock")
            if step == "in the metadata table":
                threading.Thread(target=self._await_metadata, daemon=True).start()
            return written(ledger, *given)

        Ledger.with_epoch = with_epoch  # type: ignore[method-assign]

    def at(self, step: str, *_: object) -> None:
        if step == self._step:
            (self._root / "died").write_text(step)
            os.kill(self._jvm, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

    def _wrap(self, name: str) -> None:
        method: Callable[..., Any] = getattr(HudiClient, name)

        def wrapped(client: HudiClient, *given: Any) -> Any:
            self.at(f"before {name}")
            result = method(client, *given)
            self.at(f"after {name}")
            return result

        setattr(HudiClient, name, wrapped)

    def _await_metadata(self) -> None:
        """The instant is complete in the metadata table, and in the table itself not yet."""
        timeline = self._root / "table" / ".hoodie" / "metadata" / ".hoodie" / "timeline"
        before = set(timeline.iterdir())
        end = time.monotonic() + OPEN_S
        while time.monotonic() < end:
            if any("_" in path.name for path in set(timeline.iterdir()) - before):
                self.at(self._step)


def main(root: Path, mode: str, step: str) -> None:
    spark = session("victim")
    death = Death(spark, root, step)
    reader = spark.readStream.schema("id bigint, version bigint").option("maxFilesPerTrigger", 1)
    rows = reader.json(str(root / "in")).selectExpr("id", "version", "id * 7 + version AS value")
    pipeline = Pipeline("orders", sinks_of(root, mode), watch=death.at)
    pipeline.start(rows, root / "checkpoint", availableNow=True).awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
