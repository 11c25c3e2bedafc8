"""Carries decisions out in memory."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from epochal.contract import Begin, Dropped, Operable, Recount
from epochal.sinks.memory.store import Store
from epochal.terms import Ability, EpochNumber, Identity, InDoubt, Json, Mark, Proof, Receipt


class MemoryCommitter(Operable):
    """Speaks to the store under one identity; all state is the store's."""

    def __init__(self, identity: Identity, store: Store, *, replaces: bool) -> None:
        self._identity = identity
        self._store = store
        self._replaces = replaces

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

    def begin(self, begin: Begin) -> Json:  # noqa: ARG002
        return None

    def rehearse(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        """Nothing in memory can say no by content."""

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

    def close(self) -> None:
        """Nothing is kept open."""


def _handles(receipts: Sequence[Receipt]) -> list[str]:
    return [str(receipt.handle) for receipt in receipts]
