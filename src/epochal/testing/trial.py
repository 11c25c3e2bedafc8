"""
`Target`: what the conformance suite must know about a sink. `Trial`: what it does with it.

Rows are compared as a reader of the target sees them, never as the sink reports them.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeAlias, get_args

import pyarrow as pa

from epochal.contract import Begin, Committer, Sink, Task
from epochal.errors import Misconfigured
from epochal.kit.sink_base import Cannot
from epochal.terms import (
    NO_ROWS,
    Claim,
    EpochNumber,
    Generation,
    Handle,
    Identity,
    InDoubt,
    Json,
    Limits,
    Receipt,
    SinkName,
    Uid,
)
from epochal.testing.other_process import READY, Job, OtherProcess

UID = Uid("aaaabbbbcccc")
OTHER_UID = Uid("ddddeeeeffff")
SCHEMA = pa.schema([pa.field("id", pa.int64()), pa.field("name", pa.string())])

Row: TypeAlias = tuple[int, str | None]
"""`id` and `name`."""
Tick: TypeAlias = Callable[..., Any]
"""Makes a call that it is given, `tick(function, *args, **named)`, or is a crash instead."""


@dataclass(kw_only=True)
class Target:
    """
    A sink and what its author knows about its target.

    Give `refused`, `unreachable` and `misconfigured`, or say in `cannot` why there is none.
    """

    sink: Sink
    visible: Callable[[], Sequence[Mapping[str, Any]]]
    """The rows that a reader of the target sees, all columns, in any order."""
    leftovers: Callable[[], Collection[object]] = tuple
    """What undecided work may not leave behind: staging tables, hidden files, open uploads."""
    schema: pa.Schema = SCHEMA
    """At least `id` (integer) and `name` (text, may be null)."""
    secrets: Sequence[str] = ()
    """Texts that may be in no repr and in no description."""
    refused: Row | None = None
    """A row that fits the schema and that the target never takes: it breaks a constraint, say."""
    unreachable: Callable[[], AbstractContextManager[Sink]] | None = None
    """
    While it is entered: a sink like this one, whose target does not answer. For a server that is a
    port where nobody listens, `lambda: nullcontext(MySink(port=1))`.
    """
    misconfigured: Mapping[str, Sink] = field(default_factory=dict)
    """Sinks that `check` must refuse, by what is wrong: a missing table, a wrong password."""
    calls: Callable[[Tick], AbstractContextManager[object]] | None = None
    """
    While it is entered, every call that the sink makes to its target goes through the tick; when it
    is left, connections end as those of a dead process do. `crash.statements` does it for a DB-API
    module. Without it the suite kills processes at random moments.
    """
    cannot: Mapping[Cannot, str] = field(default_factory=dict)
    """What this sink can't do or show, each with the reason."""
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        unknown = sorted(set(self.cannot) - set(get_args(Cannot)))
        if unknown or not all(self.cannot.values()):
            raise Misconfigured(
                f"Target(cannot={dict(self.cannot)})",
                f"a reason for each of: {', '.join(get_args(Cannot))}",
            )


class Trial:
    """One target and the verbs of its sink, shortened."""

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
        is_copy: bool = False,
        sink: str | None = None,
        run: str | None = None,
    ) -> Identity:
        """Each generation has a claim of its own, and another one in a copy of the log."""
        return Identity(
            pipeline="conformance",
            uid=uid,
            sink=SinkName(sink or self.sink.name),
            generation=Generation(generation),
            claim=_claim(generation, is_copy=is_copy),
            run=run,
        )

    def committer(self, of: Sink | None = None, **whose: Any) -> Committer:
        committer = (of or self.sink).committer(self.identity(**whose), self.target.limits)
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

    def begin(self, epoch: int, of: Sink | None = None, **whose: Any) -> Json:
        return self.committer(of, **whose).begin(Begin(epoch=EpochNumber(epoch)))

    def task(self, handle: Handle, **whose: Any) -> Task:
        """What a task gets in a pipeline, with what the driver hands out for its epoch."""
        whose = {"uid": handle.uid, "generation": handle.generation, **whose}
        return Task(
            handle=handle,
            schema=self.target.schema,
            handout=self.begin(handle.epoch, **whose),
            limits=self.target.limits,
        )

    def batch(self, *ids: int) -> pa.RecordBatch:
        return self.rows([(number, f"row {number}") for number in ids])

    def rows(self, rows: Sequence[Row]) -> pa.RecordBatch:
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
        writer = self.sink.writer(self.task(self.handle(epoch, partition, **whose), **whose))
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

    def seen(self) -> Counter[Row]:
        return Counter((row["id"], row.get("name")) for row in self.target.visible())

    def ids(self) -> list[int]:
        return sorted(int(row["id"]) for row in self.target.visible())

    # In another process

    def commit_in_other_process(self, epoch: int, receipts: Sequence[Receipt]) -> None:
        self._result(self.job("commit", epoch=EpochNumber(epoch), receipts=tuple(receipts)))

    def prepare_in_other_process(self, handle: Handle, batch: pa.RecordBatch) -> Receipt:
        job = self.job("prepare", task=self.task(handle), batches=[batch])
        found: Receipt = pickle.loads(self._result(job))  # noqa: S301  our own process wrote it
        return found

    def peaks_in_other_process(self, task: Task, batches: Sequence[pa.RecordBatch]) -> list[int]:
        """The most memory, in kibibytes, after the batches were written once and twice."""
        result = self._result(self.job("measure_memory", task=task, batches=batches))
        return [int(peak) for peak in result.split()]

    def die_while_preparing(self, prepared: Handle, unfinished: Handle) -> None:
        """A process prepares one attempt, writes half of another, and gets SIGKILL."""
        job = self.job(
            "prepare_and_wait",
            task=self.task(prepared),
            unfinished=self.task(unfinished),
            batches=[self.batch(1, 2, 3)],
        )
        with OtherProcess(job) as process:
            if process.reply() != READY.decode():
                raise AssertionError(f"the other process did not prepare: {process.end()!r}")
            process.kill()

    def job(self, verb: str, **given: Any) -> Job:
        return Job(
            verb=verb,
            sink=self.sink,
            identity=self.identity(),
            limits=self.target.limits,
            **given,
        )

    def _result(self, job: Job) -> bytes:
        with OtherProcess(job) as process:
            return process.end()


def _claim(generation: int, *, is_copy: bool) -> Claim:
    digits = "".join(chr(ord("a") + int(digit)) for digit in f"{generation:04d}")
    return Claim(f"{'copy' if is_copy else 'orig'}{digits}")
