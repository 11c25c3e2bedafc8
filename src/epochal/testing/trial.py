"""
A sink on trial: the few things that the conformance suite needs to know, and does again and again.

Rows are compared as a reader of the target sees them, never as the sink tells them.
"""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from epochal.contract import Begin, Committer, Limits, Sink, Task
from epochal.terms import (
    NO_ROWS,
    EpochNumber,
    Generation,
    Handle,
    Identity,
    InDoubt,
    Receipt,
    SinkName,
    Uid,
)
from epochal.testing.elsewhere import READY, Errand

UID = Uid("aaaabbbbcccc")
OTHER_UID = Uid("ddddeeeeffff")
SCHEMA = pa.schema([pa.field("id", pa.int64()), pa.field("name", pa.string())])
_ELSEWHERE_S = 180.0


@dataclass(kw_only=True)
class Target:
    """What a sink's author tells the suite."""

    sink: Sink
    visible: Callable[[], Sequence[Mapping[str, Any]]]
    """The rows that a reader of the target sees, all columns, in any order."""
    leftovers: Callable[[], Collection[object]] = tuple
    """What undecided work may not leave behind: staging tables, hidden files, open uploads."""
    schema: pa.Schema = SCHEMA
    """At least `id` (integer) and `name` (text, may be null)."""
    secrets: Sequence[str] = ()
    """Words that may stand in no repr and no description."""
    reaches_other_processes: bool = True
    limits: Limits = field(default_factory=Limits)


class Trial:
    """One target and its verbs, shortened."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.sink = target.sink
        self._attempts = 0
        self._opened: list[Committer] = []

    def identity(
        self,
        *,
        uid: Uid = UID,
        generation: int = 1,
        sink: str | None = None,
        run: str | None = None,
    ) -> Identity:
        return Identity(
            pipeline="conformance",
            uid=uid,
            sink=SinkName(sink or self.sink.name),
            generation=Generation(generation),
            run=run,
        )

    def committer(self, **whose: Any) -> Committer:
        committer = self.sink.committer(self.identity(**whose), self.target.limits)
        self._opened.append(committer)
        return committer

    def close(self) -> None:
        for committer in self._opened:
            committer.close()

    def handle(self, epoch: int, partition: int = 0, **whose: Any) -> Handle:
        """A handle of its own for every attempt (I6)."""
        self._attempts += 1
        return self.identity(**whose).handle(
            EpochNumber(epoch), partition=partition, attempt=self._attempts
        )

    def task(self, handle: Handle, handout: Any = None) -> Task:
        return Task(
            handle=handle, schema=self.target.schema, handout=handout, limits=self.target.limits
        )

    def batch(self, *ids: int) -> pa.RecordBatch:
        return self.rows([(number, f"row {number}") for number in ids])

    def rows(self, rows: Sequence[tuple[int, str | None]]) -> pa.RecordBatch:
        columns: dict[str, list[Any]] = {
            field.name: [None] * len(rows) for field in self.target.schema
        }
        columns["id"] = [number for number, _ in rows]
        columns["name"] = [name for _, name in rows]
        return pa.record_batch(columns, schema=self.target.schema)

    def prepare(
        self, epoch: int, *batches: pa.RecordBatch, partition: int = 0, **whose: Any
    ) -> Receipt:
        """What a task does: a writer, its batches, a receipt."""
        committer = self.committer(**whose)
        handout = committer.begin(Begin(epoch=EpochNumber(epoch)))
        writer = self.sink.writer(self.task(self.handle(epoch, partition, **whose), handout))
        for batch in batches:
            writer.write(batch)
        return writer.prepare()

    def commit(self, epoch: int, *receipts: Receipt, **whose: Any) -> None:
        self.committer(**whose).commit(EpochNumber(epoch), receipts)

    def abort(self, epoch: int, *receipts: Receipt, **whose: Any) -> None:
        self.committer(**whose).abort(EpochNumber(epoch), receipts)

    def listed(self, **whose: Any) -> Sequence[InDoubt]:
        return self.committer(**whose).in_doubt()

    def handles(self, **whose: Any) -> set[Handle | None]:
        return {found.handle for found in self.listed(**whose)}

    def sweep(self, **whose: Any) -> None:
        """Abort all that is listed, as a driver's sweep does."""
        for found in self.listed(**whose):
            if found.handle is None:
                raise AssertionError(f"{found.name} is listed and can't be read")
            receipt = found.receipt or Receipt(handle=found.handle, fingerprint=NO_ROWS)
            self.abort(found.handle.epoch, receipt, **whose)

    def seen(self) -> Counter[tuple[int, str | None]]:
        return Counter((row["id"], row.get("name")) for row in self.target.visible())

    def ids(self) -> list[int]:
        return sorted(int(row["id"]) for row in self.target.visible())

    # In another process

    def commits_elsewhere(self, epoch: int, receipts: Sequence[Receipt]) -> None:
        self._finish(
            self._elsewhere(
                Errand(verb="commit", epoch=EpochNumber(epoch), receipts=tuple(receipts))
            )
        )

    def prepares_elsewhere(self, handle: Handle, batch: pa.RecordBatch) -> Receipt:
        errand = Errand(verb="prepare", task=self.task(handle), batch=batch)
        found: Receipt = pickle.loads(  # noqa: S301  our own process wrote it
            self._finish(self._elsewhere(errand))
        )
        return found

    def dies_while_preparing(self, prepared: Handle, unfinished: Handle) -> None:
        """A process prepares one attempt, writes half of another, and gets SIGKILL."""
        errand = Errand(
            verb="prepare and wait",
            task=self.task(prepared),
            unfinished=self.task(unfinished),
            batch=self.batch(1, 2, 3),
        )
        process = self._elsewhere(errand)
        if process.stdout is None or process.stdout.readline().strip() != READY:
            self._finish(process)
            raise AssertionError("the other process did not prepare")
        process.send_signal(signal.SIGKILL)
        self._ended(process)

    def _elsewhere(self, errand: Errand) -> subprocess.Popen[bytes]:
        carried = replace(
            errand, sink=self.sink, identity=self.identity(), limits=self.target.limits
        )
        with tempfile.NamedTemporaryFile(suffix=".pickle", delete=False) as file:
            file.write(pickle.dumps(carried))
        return subprocess.Popen(
            [sys.executable, "-m", "epochal.testing.elsewhere", file.name],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def _finish(self, process: subprocess.Popen[bytes]) -> bytes:
        out, told = self._ended(process)
        if process.returncode != 0:
            raise AssertionError(f"the other process failed: {told.decode()[-2000:]}")
        return out

    def _ended(self, process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
        """What it said, once it is over; its errand is removed."""
        said = process.communicate(timeout=_ELSEWHERE_S)
        Path(str(process.args[-1])).unlink(missing_ok=True)  # type: ignore[index] # a list, as above
        return said
