"""
The committer of a sink that delivers from a spool.

    no entry in the ledger     not delivered, or not yet known to be: deliver
    delivery has begun         some rows may be outside already, so they can't be written anew
    an entry in the ledger     delivered; rows and acknowledgements may be removed

The order makes a crash harmless: first the note that delivery begins, then the calls, then the
entry, and only then is anything removed. A crash in between delivers again what was not
acknowledged, under the same keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import pyarrow as pa

from epochal.contract import Begin, Room
from epochal.errors import (
    InvariantBroken,
    Misconfigured,
    OutcomeUnknown,
    PreparedLost,
    Refused,
    copy_at_work,
    require_still_committed,
)
from epochal.kit.sink_base import Dropped, Operable
from epochal.kit.spool.ledger import Delivered, SpoolLedger
from epochal.kit.spool.rows import RowSpool
from epochal.protocol.recovery import give_up_command
from epochal.terms import (
    Ability,
    EpochNumber,
    Identity,
    InDoubt,
    Json,
    Mark,
    Proof,
    Receipt,
    quantity,
)

_PROBE = "ledger/probe-{}"


class Delivery(Protocol):
    """The part that differs from target to target: how rows get there."""

    def check(self, schema: pa.Schema | None) -> Sequence[Ability]: ...

    def deliver(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> Mapping[str, Json]:
        """
        Deliver all rows that are not acknowledged yet. What is returned is kept in the ledger.

        Called for a decided epoch, perhaps again after a crash, perhaps by two drivers at a time.
        """

    def kept(self) -> str:
        """What remains here of a dropped pipeline, and why; empty where nothing does."""

    def close(self) -> None: ...


def require_seen(spool: RowSpool, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
    """
    Raise where a row can't be read from here: executors may have written to their own disks, or as
    another user.
    """
    lost = [one for one in receipts if one.rows and not spool.can_read(one.handle)]
    if lost:
        raise Misconfigured(
            f"epoch {epoch}: the driver does not see the rows that {len(lost)} of "
            f"{len(receipts)} tasks wrote to the spool {spool.store.location}",
            "driver and executors must share it: name a mounted folder or an object store",
        )


def _lost(spool: RowSpool, receipts: Sequence[Receipt]) -> tuple[str, ...]:
    return tuple(
        str(receipt.handle)
        for receipt in receipts
        if receipt.rows and not spool.has(receipt.handle)
    )


class SpoolCommitter(Operable):
    """The whole committer of a sink that delivers from a spool."""

    def __init__(
        self, identity: Identity, spool: RowSpool, ledger: SpoolLedger, delivery: Delivery
    ) -> None:
        self._identity = identity
        self._spool = spool
        self._ledger = ledger
        self._delivery = delivery

    def check(self, schema: pa.Schema | None) -> Sequence[Ability]:
        self._require_writable()
        return self._delivery.check(schema)

    def begin(self, begin: Begin) -> Json:
        newest = self._ledger.newest_epoch()
        require_still_committed(self._identity.sink, begin.newest_committed, proven=newest)
        return None

    def rehearse(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        require_seen(self._spool, epoch, receipts)

    def commit(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        handles = frozenset(str(receipt.handle) for receipt in receipts)
        if not self._is_delivered(epoch, handles):
            try:
                self._deliver(epoch, receipts, handles)
            except (PreparedLost, InvariantBroken, Refused):
                # Another driver may have carried out the same decision meanwhile, and cleaned up.
                if not self._is_delivered(epoch, handles):
                    raise
        self._spool.remove([receipt.handle for receipt in receipts if receipt.rows])
        self._ledger.forget_delivery(epoch)

    def abort(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:  # noqa: ARG002
        self._spool.remove([receipt.handle for receipt in receipts])

    def in_doubt(self) -> Sequence[InDoubt]:
        listed = self._spool.listed(self._identity.uid, self._identity.tag)
        epochs = {found.handle.epoch for found in listed if found.handle is not None}
        entries = {epoch: self._ledger.find(epoch) for epoch in epochs}
        return [found for found in listed if not self._is_done(found, entries)]

    def room(self) -> Room:
        return Room(used_bytes=self._spool.size(self._identity.uid, self._identity.tag))

    def outcome(self, epoch: EpochNumber, receipt: Receipt) -> Proof:
        entry = self._ledger.find(epoch)
        if entry is not None and str(receipt.handle) in entry.handles:
            return Proof.COMMITTED
        if not receipt.rows or self._spool.has(receipt.handle):
            return Proof.UNKNOWN
        if entry is not None:
            return Proof.ABORTED
        is_open = self._ledger.acknowledged(epoch) is not None or self._is_pruned(epoch)
        return Proof.UNKNOWN if is_open else Proof.ABORTED

    def newest(self) -> Sequence[Mark]:
        return self._ledger.newest()

    def prune(self, below: EpochNumber) -> None:
        self._ledger.prune(below)

    def drop(self, *, is_dry_run: bool) -> Dropped:
        count = self._ledger.size()
        if not is_dry_run:
            self._spool.forget(self._identity.uid, self._identity.tag)
            self._ledger.forget()
        entries = quantity(count, "entry", "entries")
        removed = [f"{entries} of the ledger in {self._spool.store.location}"] if count else []
        return Dropped(removed=removed, kept=self._delivery.kept())

    def close(self) -> None:
        self._delivery.close()

    def _is_delivered(self, epoch: EpochNumber, handles: frozenset[str]) -> bool:
        entry = self._ledger.find(epoch)
        if entry is not None and entry.handles != handles:
            raise self._delivered_by_others(epoch)
        return entry is not None

    def _delivered_by_others(self, epoch: EpochNumber) -> Refused:
        return copy_at_work(
            f"sink {self._identity.sink!r}: epoch {epoch} is delivered from the spool "
            f"{self._spool.store.location}, and not from the handles that this log has for it"
        )

    def _deliver(
        self, epoch: EpochNumber, receipts: Sequence[Receipt], handles: frozenset[str]
    ) -> None:
        self._require_rows(epoch, receipts)
        self._require_not_past(epoch)
        # In this order: a driver of a copy may have delivered the epoch before this one began.
        if not self._ledger.begin(epoch, receipts) or self._is_delivered(epoch, handles):
            raise self._delivered_by_others(epoch)
        self._ledger.acknowledge(epoch, [])
        try:
            facts = self._delivery.deliver(epoch, receipts)
        except PreparedLost as lost:
            raise self._lost_in_delivery(epoch, lost.handles) from lost
        self._ledger.settle(epoch, handles, facts)

    def _require_rows(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        lost = _lost(self._spool, receipts)
        if not lost:
            return
        fact = f"epoch {epoch}: the spool {self._spool.store.location} no longer holds "
        if self._is_pruned(epoch):
            raise OutcomeUnknown(
                f"{fact}{list(lost)}, and its ledger has forgotten epochs this old",
                "a later epoch is delivered, so this one was: leave this driver stopped",
            )
        if self._ledger.acknowledged(epoch) is not None:
            raise self._lost_in_delivery(epoch, lost)
        raise PreparedLost(
            f"{fact}{len(lost)} of {len(receipts)} prepared attempts",
            "somebody removed them: files of a spool belong to the pipeline",
            handles=lost,
        )

    def _require_not_past(self, epoch: EpochNumber) -> None:
        """Epochs are delivered in order, so a later one is not this log's: see `_is_delivered`."""
        if self._is_pruned(epoch):
            raise self._delivered_by_others(epoch)

    def _lost_in_delivery(self, epoch: EpochNumber, lost: Sequence[str]) -> InvariantBroken:
        """Written anew, rows that were delivered before would go out under other numbers."""
        return InvariantBroken(
            f"epoch {epoch}: the spool {self._spool.store.location} no longer holds {list(lost)}, "
            "and their delivery had begun",
            "put the files back; or deliver the rows by hand and record it: "
            f"{give_up_command(self._identity.sink, epoch)}",
        )

    def _is_pruned(self, epoch: EpochNumber) -> bool:
        newest = self._ledger.newest_epoch()
        return newest is not None and epoch < newest

    def _is_done(self, found: InDoubt, entries: Mapping[EpochNumber, Delivered | None]) -> bool:
        """Delivered and only not removed yet: a commit was cut short after its proof."""
        entry = None if found.handle is None else entries[found.handle.epoch]
        if found.handle is None or entry is None or found.name not in entry.handles:
            return False
        self._spool.remove([found.handle])
        return True

    def _require_writable(self) -> None:
        key = _PROBE.format(self._identity.uid)
        self._spool.store.put(key, b"")
        self._spool.store.delete([key])
