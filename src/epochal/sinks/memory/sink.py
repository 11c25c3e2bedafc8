"""
`Memory`: the reference sink, the shortest one that keeps every promise.

A sink is three objects. The declaration is what a user writes; it is pickled to the executors. Each
task gets a writer, which prepares its rows. The driver has the committer, which ends what tasks
prepared. Everything that must outlive a task is in the target: here the `Store`.

    task     writer.write(rows) … writer.prepare()   ──► receipt (store: prepared, invisible)
    driver   DECIDE                                       in the epoch log
    driver   committer.commit(epoch, receipts)            store: visible, and proven by its ledger
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import pyarrow as pa

from epochal.contract import Begin, Task
from epochal.errors import Misconfigured, require_still_committed
from epochal.kit.sink_base import CommitterBase, Dropped, Promises, Recount, SinkBase
from epochal.sinks.memory.client import StoreReference
from epochal.sinks.memory.store import Store
from epochal.terms import (
    Ability,
    EpochNumber,
    Fingerprint,
    Identity,
    InDoubt,
    Json,
    Limits,
    Mark,
    Proof,
    Receipt,
    SinkName,
)

_OUTPUT_MODES = {"append": frozenset({"append", "update"}), "complete": frozenset({"complete"})}


PROMISES = (
    Promises(
        sink="`Memory`",
        at_one_instant="a whole epoch",
        readers_must="be the driver's process",
        proof="a dictionary, gone with the process",
        output_modes="append and update, or complete",
        cannot={
            "refuse rows": "nothing in memory refuses a row",
            "be unreachable": "the rows are in the driver's own process",
            "be misconfigured": "there is nothing to configure",
            "bound memory": "memory is the target",
        },
    ),
)


@dataclass(frozen=True, kw_only=True)
class Memory(SinkBase):
    """
    Rows in the driver's memory, for tests and laptops: they are gone when the driver is.

    `mode="append"` keeps every epoch; of a query in update mode that is a changelog, each row a new
    version. `mode="complete"` shows the newest epoch only, for Spark's complete mode.

    The rows belong to this object: two sinks with the same name share nothing, and a pickled copy
    reaches the rows of the original, also from another process on the same machine.
    """

    kind: ClassVar[str] = "memory"
    writes_on_driver: ClassVar[bool] = True

    name: SinkName = SinkName("memory")
    mode: Literal["append", "complete"] = "append"
    """Every epoch is kept, or the newest only."""
    _reference: StoreReference = field(
        init=False, repr=False, compare=False, default_factory=StoreReference
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode not in _OUTPUT_MODES:
            raise Misconfigured(f"Memory(mode={self.mode!r})", "append or complete")

    @property
    def target(self) -> str:
        return "the driver's process"

    @property
    def output_modes(self) -> frozenset[str]:
        return _OUTPUT_MODES[self.mode]

    def describe(self) -> Mapping[str, Json]:
        return {"kind": self.kind, "target": self.target, "mode": self.mode}

    def writer(self, task: Task) -> MemoryWriter:
        return MemoryWriter(task, self._reference.store())

    def committer(self, identity: Identity, limits: Limits) -> MemoryCommitter:  # noqa: ARG002
        return MemoryCommitter(identity, self._reference.store(), replaces=self.mode == "complete")

    def rows(self) -> pa.Table:
        """All visible rows, in the order in which their epochs were committed."""
        return self._reference.store().rows()

    def epochs(self) -> list[EpochNumber]:
        """The epochs whose rows are visible, in the order in which they were committed."""
        return self._reference.store().epochs()


class MemoryWriter:
    """Holds its rows until `prepare`: a target in memory has nowhere else to put them."""

    def __init__(self, task: Task, store: Store) -> None:
        self._task = task
        self._store = store
        self._batches: list[pa.RecordBatch] = []

    def write(self, batch: pa.RecordBatch) -> None:
        self._batches.append(batch)

    def prepare(self) -> Receipt:
        rows = pa.Table.from_batches(self._batches, schema=self._task.schema)
        self._store.prepare(str(self._task.handle), rows)
        return Receipt(
            handle=self._task.handle, fingerprint=Fingerprint(rows.num_rows), bytes=rows.nbytes
        )

    def abort(self) -> None:
        self._batches.clear()
        self._store.abort([str(self._task.handle)])


class MemoryCommitter(CommitterBase):
    """Calls the store under one identity. It has no state of its own: any process may have one."""

    def __init__(self, identity: Identity, store: Store, *, replaces: bool) -> None:
        self._identity = identity
        self._store = store
        self._replaces = replaces

    def begin(self, begin: Begin) -> Json:
        mine = [mark.epoch for mark in self.newest() if mark.uid == self._identity.uid]
        newest = max(mine, default=None)
        require_still_committed(self._identity.sink, begin.newest_committed, proven=newest)
        return None

    def check(self, schema: pa.Schema | None) -> Sequence[Ability]:  # noqa: ARG002
        return [
            Ability(
                name="whole epochs",
                granted=True,
                because="rows of an epoch become visible in one step",
            ),
            Ability(
                name="outlives the driver", granted=False, because="rows are in the driver's memory"
            ),
        ]

    def rehearse(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        """A store in memory refuses no row by its content."""

    def commit(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        self._store.commit(self._identity, epoch, _handles(receipts), self._replaces)

    def abort(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:  # noqa: ARG002
        self._store.abort(_handles(receipts))

    def in_doubt(self) -> Sequence[InDoubt]:
        return self._store.in_doubt(self._identity)

    def outcome(self, epoch: EpochNumber, receipt: Receipt) -> Proof:
        return self._store.outcome(self._identity, epoch, str(receipt.handle))

    def newest(self) -> Sequence[Mark]:
        return self._store.newest(self._identity)

    def prune(self, below: EpochNumber) -> None:
        self._store.prune(self._identity, below)

    def recount(self) -> Recount:
        if self._replaces:
            return Recount(rows=None, because="each epoch replaces what was visible before")
        epochs = self._store.count(self._identity)
        return Recount(
            rows=sum(epochs.values()), epochs=epochs, because="rows in the driver's memory"
        )

    def drop(self, *, is_dry_run: bool) -> Dropped:
        if not is_dry_run:
            self._store.forget(self._identity)
        return Dropped(removed=["the proofs of its epochs"])


def _handles(receipts: Sequence[Receipt]) -> list[str]:
    return [str(receipt.handle) for receipt in receipts]
