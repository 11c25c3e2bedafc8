"""
`Store`: what a target must remember to keep the promises of a sink, and nothing else.

Three things: prepared attempts, visible epochs, and a ledger that proves which epochs were
committed. One lock makes each verb one step, so a reader sees an epoch whole or not at all (I1).
Why the ledger is written in the same step as the rows: after a lost reply the driver commits again,
and only the ledger distinguishes a commit that was carried out from attempts that were lost.

    commit(7, [a, b])   prepared {a, b}, ledger {}         → visible {7}, ledger {7: a, b}
    commit(7, [a, b])   prepared {},     ledger {7: a, b}  → already proven: nothing to do
    commit(7, [x])      prepared {x},    ledger {7: a, b}  → `Refused`: another log's 7
    commit(8, [c])      prepared {},     ledger {7: a, b}  → `PreparedLost(c)`
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from epochal.errors import PreparedLost, copy_at_work
from epochal.terms import EpochNumber, Handle, Identity, InDoubt, Mark, Proof, Uid, handle_prefix

VERBS = (
    "prepare",
    "commit",
    "abort",
    "in_doubt",
    "outcome",
    "newest",
    "prune",
    "rows",
    "epochs",
    "count",
    "forget",
)
"""What other processes may call."""


@dataclass(frozen=True, slots=True)
class _Prepared:
    rows: pa.Table
    since_s: float


@dataclass(frozen=True, slots=True)
class _Owner:
    """The owner of epoch numbers: they start again with another uid."""

    pipeline: str
    sink: str
    uid: Uid


@dataclass(slots=True)
class _Ledger:
    run: str | None
    settled_below: EpochNumber = EpochNumber(0)
    handles: dict[EpochNumber, frozenset[str]] = field(default_factory=dict)

    def proves(self, epoch: EpochNumber) -> bool:
        """Epochs are committed in order: one below the newest was, by this log or another."""
        return epoch <= max(self.handles, default=-1)


class Store:
    """The state of one `Memory` sink. Usable from any thread of the process that made it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._prepared: dict[str, _Prepared] = {}
        self._visible: dict[tuple[_Owner, EpochNumber], pa.Table] = {}
        self._ledgers: dict[_Owner, _Ledger] = {}

    def prepare(self, handle: str, rows: pa.Table) -> None:
        with self._lock:
            self._prepared[handle] = _Prepared(rows, time.monotonic())

    def commit(
        self, identity: Identity, epoch: EpochNumber, handles: Sequence[str], replaces: bool
    ) -> None:
        """Make rows visible and prove it, in one step. `replaces` drops what was visible before."""
        with self._lock:
            ledger = self._ledgers.setdefault(_owner(identity), _Ledger(identity.run))
            if ledger.proves(epoch):
                _require_ours(ledger, identity, epoch, handles)
                return
            lost = tuple(handle for handle in handles if handle not in self._prepared)
            if lost:
                raise PreparedLost(
                    f"epoch {epoch}: {len(lost)} of {len(handles)} prepared attempts are not there",
                    handles=lost,
                    shows_none=True,
                )
            rows = _joined([self._prepared.pop(handle).rows for handle in handles])
            if replaces:
                self._visible.clear()
            self._visible[_owner(identity), epoch] = rows
            ledger.handles[epoch] = frozenset(handles)

    def abort(self, handles: Sequence[str]) -> None:
        """A committed handle is no longer prepared, so an abort can't touch visible rows."""
        with self._lock:
            for handle in handles:
                self._prepared.pop(handle, None)

    def in_doubt(self, identity: Identity) -> list[InDoubt]:
        now = time.monotonic()
        with self._lock:
            listed = [
                InDoubt(name=name, handle=Handle.parse(name), age_s=now - prepared.since_s)
                for name, prepared in self._prepared.items()
                if name.startswith(handle_prefix(identity.uid))
            ]
        return [one for one in listed if one.handle is None or one.handle.sink == identity.tag]

    def outcome(self, identity: Identity, epoch: EpochNumber, handle: str) -> Proof:
        with self._lock:
            if handle in self._prepared:
                return Proof.UNKNOWN
            ledger = self._ledgers.get(_owner(identity))
            if ledger is not None and handle in ledger.handles.get(epoch, ()):
                return Proof.COMMITTED
            is_forgotten = ledger is not None and epoch < ledger.settled_below
            return Proof.UNKNOWN if is_forgotten else Proof.ABORTED

    def newest(self, identity: Identity) -> list[Mark]:
        with self._lock:
            return [
                Mark(uid=owner.uid, epoch=max(ledger.handles), run=ledger.run)
                for owner, ledger in self._ledgers.items()
                if (owner.pipeline, owner.sink) == (identity.pipeline, identity.sink)
                and ledger.handles
            ]

    def prune(self, identity: Identity, below: EpochNumber) -> None:
        with self._lock:
            ledger = self._ledgers.get(_owner(identity))
            if ledger is None or not ledger.handles:
                return
            ledger.settled_below = max(ledger.settled_below, min(below, max(ledger.handles)))
            for epoch in [epoch for epoch in ledger.handles if epoch < ledger.settled_below]:
                del ledger.handles[epoch]

    def count(self, identity: Identity) -> dict[EpochNumber, int]:
        """Visible rows of this uid, by epoch."""
        with self._lock:
            return {
                epoch: rows.num_rows
                for (owner, epoch), rows in self._visible.items()
                if owner == _owner(identity)
            }

    def forget(self, identity: Identity) -> None:
        """Drop the proofs of this uid's epochs; its rows stay."""
        with self._lock:
            self._ledgers.pop(_owner(identity), None)

    def rows(self) -> pa.Table:
        with self._lock:
            return _joined(list(self._visible.values()))

    def epochs(self) -> list[EpochNumber]:
        with self._lock:
            return [epoch for _, epoch in self._visible]


def _owner(identity: Identity) -> _Owner:
    return _Owner(identity.pipeline, identity.sink, identity.uid)


def _joined(tables: Sequence[pa.Table]) -> pa.Table:
    """One table of all; an epoch without a task has no columns, and adds none."""
    with_columns = [table for table in tables if table.num_columns]
    if not with_columns:
        return pa.table({})
    return pa.concat_tables(with_columns, promote_options="permissive")


def _require_ours(
    ledger: _Ledger, identity: Identity, epoch: EpochNumber, handles: Sequence[str]
) -> None:
    """
    An epoch is proven by these very handles. A driver that meets a later one instead was
    superseded, or a copy of its log has gone past it.
    """
    if ledger.handles.get(epoch) != frozenset(handles):
        raise copy_at_work(
            f"sink {identity.sink!r}: epoch {epoch} is committed under handles that this log did "
            "not decide"
        )
