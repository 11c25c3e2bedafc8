"""
A driver to be killed between two tables of an epoch: `python changes_victim.py <folder> <table>
<epoch>` dies when that table has committed and the other has not begun to.

The next driver has to find the one done and do the other.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from epochal.sinks.delta import Delta
from epochal.sinks.delta.committer import DeltaCommitter
from epochal.spark.local_session import local_session
from epochal.spark.pipeline import Pipeline

CHANGES: tuple[tuple[tuple[int, str, str], ...], ...] = (
    ((0, "mon", "u"), (1, "mon", "u"), (2, "tue", "u"), (3, "tue", "u")),
    ((1, "tue", "u"), (2, "tue", "d"), (4, "tue", "u")),
    ((1, "mon", "u"), (4, "wed", "d"), (2, "mon", "u"), (0, "wed", "d")),
)
"""By epoch: whose row, its day, and whether it is put or deleted."""


def report(root: Path) -> None:
    """Each epoch's changes in a file of its own, in the order of their times."""
    (root / "in").mkdir()
    for epoch, changes in enumerate(CHANGES):
        rows = [
            {"id": number, "day": day, "op": op, "name": _name(number, epoch)}
            for number, day, op in changes
        ]
        file = root / "in" / f"{epoch}.json"
        file.write_text("\n".join(json.dumps(row) for row in rows))
        os.utime(file, (1_700_000_000 + epoch,) * 2)


def merged() -> list[tuple[int, str]]:
    """What is there when every change was made once, in turn."""
    names: dict[int, str] = {}
    for epoch, changes in enumerate(CHANGES):
        for number, _, op in changes:
            names[number] = _name(number, epoch)
            if op == "d":
                del names[number]
    return sorted(names.items())


def replaced() -> list[tuple[int, str]]:
    """What is there when every epoch replaced the days that it has rows for."""
    days: dict[str, list[tuple[int, str]]] = {}
    for epoch, changes in enumerate(CHANGES):
        days |= {day: [] for _, day, _ in changes}
        for number, day, _ in changes:
            days[day].append((number, _name(number, epoch)))
    return sorted(row for rows in days.values() for row in rows)


def _name(number: int, epoch: int) -> str:
    return f"{number} at {epoch}"


def run(spark: Any, root: Path) -> None:
    """Every change, to two tables under one decision."""
    made: dict[str, Any] = {"create_table": "if_missing"}
    by_key = Delta(
        root / "merged", name="merged", mode="merge", keys="id", delete_when="op = 'd'", **made
    )
    by_day = Delta(
        root / "replaced",
        name="replaced",
        mode="overwrite_partitions",
        partition_by=["day"],
        select=["id", "day", "name"],
        **made,
    )
    reader = spark.readStream.schema("id long, day string, op string, name string")
    stream = reader.option("maxFilesPerTrigger", 1).json(str(root / "in"))
    pipeline = Pipeline("changes", [by_key, by_day])
    pipeline.start(stream, root / "checkpoint", availableNow=True).awaitTermination()


def die_between(done: str, epoch: int) -> None:
    """Let one table commit this epoch, hold the other back, and die."""
    write, clear = DeltaCommitter._write, DeltaCommitter._clear

    def held(self: Any, table: Any, number: int, receipts: Any) -> None:
        if number == epoch and self._sink.name != done:
            threading.Event().wait()
        write(self, table, number, receipts)

    def last(self: Any, receipts: Any) -> None:
        if self._sink.name == done and receipts and receipts[0].handle.epoch == epoch:
            os.kill(os.getpid(), signal.SIGKILL)
        clear(self, receipts)

    DeltaCommitter._write, DeltaCommitter._clear = held, last  # type: ignore[method-assign]


if __name__ == "__main__":
    die_between(sys.argv[2], int(sys.argv[3]))
    run(local_session("victim", threads=2), Path(sys.argv[1]))
