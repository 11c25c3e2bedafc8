"""Carries decisions out on an Iceberg table: one metadata commit an epoch.

That commit adds the snapshot and writes the ledger, and it holds only if the branch is still where
it was when the ledger was read. So whoever else commits in between, another writer or another
driver of the same pipeline, makes it fail, and the ledger is asked again before anything is
repeated.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
from pyiceberg.exceptions import CommitFailedException, ValidationException
from pyiceberg.table import Table
from pyiceberg.table.update import RemovePropertiesUpdate

from epochal.contract import Begin, Dropped, Limits, Operable, Recount
from epochal.errors import Fenced, InvariantBroken, PreparedLost, Refused, TryAgain
from epochal.sinks.iceberg import inside
from epochal.sinks.iceberg.attempt import discard
from epochal.sinks.iceberg.changing import DRIVER, Changing, Plan
from epochal.sinks.iceberg.checking import add_columns, check_schema, check_table
from epochal.sinks.iceberg.counting import recount
from epochal.sinks.iceberg.data_files import is_for, locations_in
from epochal.sinks.iceberg.layout import Layout, layout_around, layout_of
from epochal.sinks.iceberg.ledger import Entry, Ledger, winner
from epochal.sinks.iceberg.sorting import sorting
from epochal.sinks.iceberg.storage import Storage, at_once
from epochal.terms import (
    Ability,
    EpochNumber,
    Handle,
    Identity,
    InDoubt,
    Json,
    Mark,
    Proof,
    Receipt,
    handle_prefix,
)

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog

    from epochal.sinks.iceberg.sink import Iceberg

_CONFLICTS_MAX = 20
"""How often one call tries again after others' commits; then the coordinator waits and repeats."""
_CONFLICT_WAIT_S = 0.02


@dataclass(frozen=True, slots=True)
class _Rehearsed:
    epoch: EpochNumber
    handles: frozenset[Handle]
    table: Table


class IcebergCommitter(Operable):
    """One sink's decisions on one table."""

    def __init__(self, sink: Iceberg, identity: Identity, limits: Limits) -> None:
        self._sink = sink
        self._identity = identity
        self._limits = limits
        self._catalog: Catalog | None = None
        self._known: Table | None = None
        self._rehearsed: _Rehearsed | None = None
        self._schema: pa.Schema | None = None
        self._changing = Changing(sink, identity)

    def check(self, schema: pa.Schema | None) -> Sequence[Ability]:
        with self._sorting("check"):
            abilities = check_table(self._sink, self._load(), schema)
        self._schema = schema
        return abilities

    def begin(self, begin: Begin) -> Json:  # noqa: ARG002
        """Add missing columns where that is wanted, and hand the table's shape to the tasks."""
        with self._sorting("begin"):
            table = self._known or self._load()
            self._forget_rehearsal(table)
            if self._schema is not None and self._sink.evolve == "add_columns":
                table = self._evolved(table, self._schema)
            # A catalog that lends keys for the files lends them to whoever asks: tasks ask too.
            is_lent = bool(table.config)
            return {"metadata": None if is_lent else self._changing.handed(table)}

    def rehearse(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        """See that every file is there and that the newest state of the table takes them."""
        with self._sorting(f"rehearse epoch {epoch}"):
            table = self._load()
            self._forget_rehearsal(table)
            ledger = self._ledger(table)
            if ledger.is_done(epoch):
                raise self._committed_elsewhere(epoch, ledger)
            if self._schema is not None:
                check_schema(self._sink, table, self._schema)
            self._require_files(table, epoch, receipts)
            self._changing.rehearse(table, epoch, receipts)
            handles = frozenset(receipt.handle for receipt in receipts)
            self._rehearsed = _Rehearsed(epoch, handles, table)

    def commit(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        with self._sorting(f"commit epoch {epoch}"):
            seen = self._rehearsed_table(epoch, receipts)
            self._rehearsed = None
            for conflicts in range(_CONFLICTS_MAX):
                table = self._load() if seen is None else seen
                if self._is_done(table, epoch, receipts):
                    break
                if seen is None:
                    self._require_decided_files(table, epoch, receipts)
                if self._sent(table, self._changing.plan(table, epoch, receipts)):
                    break
                seen = None
                time.sleep(_CONFLICT_WAIT_S * conflicts)
            else:
                raise TryAgain(
                    f"{self._sink.place}: epoch {epoch}: others committed {_CONFLICTS_MAX} times "
                    "while this commit was made"
                )
            self._known = table
            Storage(table.io).delete(_marker(table, receipt) for receipt in receipts)
            self._changing.tidy(table)

    def abort(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        with self._sorting(f"abort epoch {epoch}"):
            table = self._load()
            self._forget_rehearsal(table)
            storage, ledger = Storage(table.io), self._ledger(table)
            for receipt in receipts:
                self._discard(receipt, storage, table, ledger)

    def in_doubt(self) -> Sequence[InDoubt]:
        with self._sorting("list what is prepared"):
            table = self._known or self._load()
            storage, layout = Storage(table.io), _layout(table)
            prefix = handle_prefix(self._identity.uid)
            listed = [one for one in storage.names(layout.markers) if one.name.startswith(prefix)]
            found = [(one, Handle.parse(one.name)) for one in listed]
            mine = [
                (one, handle)
                for one, handle in found
                if handle is None or handle.sink == self._identity.tag
            ]
            if not mine:
                return []
            # The ledger after the markers: what was committed in between is proven by now.
            ledger = self._ledger(self._load())
            committed = [handle for _, handle in mine if handle and _proves(ledger, handle)]
            self._unmark(table, committed)
            return [
                InDoubt(name=one.name, handle=handle, age_s=one.age_s)
                for one, handle in mine
                if handle not in committed
            ]

    def outcome(self, epoch: EpochNumber, receipt: Receipt) -> Proof:
        with self._sorting("ask for proof"):
            known = self._known or self._load()
            has_files = bool(receipt.token.get("files"))
            is_marked = has_files and Storage(known.io).exists(_marker(known, receipt))
            ledger = self._ledger(self._load())
        if _proves(ledger, receipt.handle):
            return Proof.COMMITTED
        # What no file was written for left nothing that could be missed.
        is_open = is_marked or not has_files or ledger.is_done(EpochNumber(epoch + 1))
        return Proof.UNKNOWN if is_open else Proof.ABORTED

    def newest(self) -> Sequence[Mark]:
        with self._sorting("read the ledger"):
            return self._ledger(self._load()).marks()

    def prune(self, below: EpochNumber) -> None:
        """Nothing to do: each commit removes the proofs below its own."""

    def recount(self) -> Recount:
        with self._sorting("count rows"):
            return recount(self._sink, self._identity, self._load())

    def drop(self, *, is_dry_run: bool) -> Dropped:
        """Remove this life's proofs from the table's properties; rows and snapshots stay."""
        with self._sorting("drop"):
            for _ in range(_CONFLICTS_MAX):
                table = self._load()
                keys = self._ledger(table).keys()
                if is_dry_run or not keys:
                    break
                try:
                    removal = RemovePropertiesUpdate(removals=keys)
                    inside.send(table, inside.properties_only(table, removal))
                except (CommitFailedException, inside.Stale):
                    continue
                break
        return Dropped(removed=[f"property {key} of {self._sink.place}" for key in keys])

    def close(self) -> None:
        self._rehearsed = None
        self._known = None
        if self._catalog is not None:
            self._catalog.close()
            self._catalog = None

    # The table

    def _load(self) -> Table:
        """The table as it is now; a proof is never read from what was known before (I9)."""
        if self._catalog is None:
            self._catalog = self._sink.place.open()
        self._known = self._sink.place.load(self._catalog)
        return self._known

    def _ledger(self, table: Table) -> Ledger:
        return Ledger(self._identity, table.metadata.properties)

    def _sorting(self, verb: str, *, is_commit: bool = False) -> AbstractContextManager[None]:
        doing = f"sink {self._identity.sink!r} on {self._sink.place}: {verb}"
        return sorting(doing, scrub=self._sink.place.scrub, is_commit=is_commit)

    def _evolved(self, table: Table, schema: pa.Schema) -> Table:
        for _ in range(_CONFLICTS_MAX):
            if all(name in table.schema().column_names for name in schema.names):
                return table
            try:
                add_columns(table, schema)
            except CommitFailedException:
                time.sleep(_CONFLICT_WAIT_S)
            table = self._load()
        raise TryAgain(f"{self._sink.place}: others change the table all the time")

    # One epoch

    def _rehearsed_table(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> Table | None:
        """The table of the rehearsal, where it was this epoch's: its files were seen."""
        handles = frozenset(receipt.handle for receipt in receipts)
        known = self._rehearsed
        is_this = known is not None and (known.epoch, known.handles) == (epoch, handles)
        return known.table if known is not None and is_this else None

    def _forget_rehearsal(self, table: Table) -> None:
        self._rehearsed = None
        self._changing.give_up(table)

    def _is_done(self, table: Table, epoch: EpochNumber, receipts: Sequence[Receipt]) -> bool:
        ledger = self._ledger(table)
        there = ledger.find(epoch)
        if there is not None:
            _require_same(there, epoch, receipts)
        return ledger.is_done(epoch)

    def _sent(self, table: Table, plan: Plan) -> bool:
        """Whether the catalog took the change; False where the branch had moved."""
        storage = Storage(table.io)
        at_once(storage.settle, plan.change.written)
        with self._sorting("commit", is_commit=True):
            try:
                inside.send(table, plan.change)
            except (CommitFailedException, ValidationException):
                plan.undo(table)
                return False
            except inside.Stale:
                # No clear refusal, so nothing is undone: the ledger is read anew, and what the
                # driver wrote has a marker.
                return False
        storage.settle(table.metadata_location)
        self._unmark(table, plan.handles)
        return True

    def _unmark(self, table: Table, handles: Sequence[Handle]) -> None:
        layout = _layout(table)
        Storage(table.io).delete(layout.marker(handle) for handle in handles)

    def _discard(self, receipt: Receipt, storage: Storage, table: Table, ledger: Ledger) -> None:
        """Without a marker it is committed or was thrown away: neither is ours to touch."""
        layout = _layout_for(table, receipt)
        if _proves(ledger, receipt.handle) or not storage.exists(layout.marker(receipt.handle)):
            return
        discard(receipt.handle, storage=storage, layout=layout)

    def _missing(self, table: Table, receipts: Sequence[Receipt]) -> dict[str, list[str]]:
        """What this table can't have: files that are gone, or that carry another table's ids."""
        locations = [where for receipt in receipts for where in locations_in(receipt)]
        gone = set(Storage(table.io).missing(locations))
        return {
            str(receipt.handle): lost
            for receipt in receipts
            if (
                lost := [
                    where
                    for where in locations_in(receipt)
                    if where in gone or not is_for(receipt, table.metadata)
                ]
            )
        }

    def _require_files(self, table: Table, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        gone = self._missing(table, receipts)
        if gone:
            raise TryAgain(
                f"epoch {epoch}: files of {len(gone)} of {len(receipts)} receipts can't be seen "
                f"from the driver, or were written for a table that was dropped, such as "
                f"{next(iter(gone.values()))[0]}",
                "driver and executors must reach the same storage; the epoch is tried again",
            )

    def _require_decided_files(
        self, table: Table, epoch: EpochNumber, receipts: Sequence[Receipt]
    ) -> None:
        gone = self._missing(table, receipts)
        if gone:
            raise PreparedLost(
                f"epoch {epoch}: files of {len(gone)} of {len(receipts)} receipts are not there, "
                f"or were written for a table that was dropped, such as "
                f"{next(iter(gone.values()))[0]}, and the ledger of {self._sink.place} "
                "does not prove the epoch committed",
                "somebody removed them: orphan files may be removed only when they are older than "
                "any epoch that is still to be committed",
                handles=tuple(gone),
            )

    def _committed_elsewhere(self, epoch: EpochNumber, ledger: Ledger) -> Fenced | Refused:
        fact = f"epoch {epoch} is being written, and {self._sink.place} proves it committed"
        newest = ledger.newest
        if newest is not None and newest.generation > self._identity.generation:
            return Fenced(
                f"{fact} by generation {newest.generation}; this driver is "
                f"{self._identity.generation}",
                "another driver has taken this checkpoint over: leave this one stopped",
            )
        return Refused(
            f"{fact} already: the epoch log is older than the table",
            "the log or the checkpoint was restored from a backup: start with the newer one, or "
            "with a run= of its own",
        )


def _layout(table: Table) -> Layout:
    return layout_of(table.metadata.location, table.metadata.properties)


def _marker(table: Table, receipt: Receipt) -> str:
    return _layout_for(table, receipt).marker(receipt.handle)


def _layout_for(table: Table, receipt: Receipt) -> Layout:
    """As the receipt says, for the table's data may have been moved elsewhere since (I9)."""
    folder = receipt.token.get("folder")
    return _layout(table) if folder is None else layout_around(str(folder))


def _proves(ledger: Ledger, handle: Handle) -> bool:
    entry = ledger.find(handle.epoch)
    return entry is not None and entry.names(handle)


def _require_same(there: Entry, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
    """A second commit of an epoch must name the same winners: decisions don't change (I2)."""
    named = {winner(receipt.handle) for receipt in receipts}
    proven = {one for one in there.winners if one[1] != DRIVER}
    if named != proven:
        raise InvariantBroken(
            f"epoch {epoch} is committed with attempts {sorted(proven)}, and a commit now names "
            f"{sorted(named)} (generation, partition, attempt)"
        )
