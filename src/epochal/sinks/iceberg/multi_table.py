"""
The commit of several Iceberg tables of one REST catalog by one request.

`POST …/transactions/commit` takes the changes of several tables, each with its requirements. That
they become visible at one instant is the catalog's word: the reference implementation applies them
one after the other. So after any answer but a success each table's ledger is asked, and only those
that do not prove the epoch are sent again.

Where a catalog does not have this endpoint, or two sinks write one table, tables are committed one
after the other.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyiceberg.exceptions import CommitFailedException
from pyiceberg.table import Table

from epochal.errors import TryAgain
from epochal.sinks.iceberg import pyiceberg_private as private
from epochal.sinks.iceberg.errors import translate_errors
from epochal.sinks.iceberg.snapshot_plan import SnapshotPlan
from epochal.sinks.iceberg.table_files import TableFiles
from epochal.terms import Ability, EpochNumber, Receipt, Receipts, quantity

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog

    from epochal.sinks.iceberg.committer import IcebergCommitter
    from epochal.sinks.iceberg.sink import Iceberg

_TRIES_MAX = 20
_WAIT_S = 0.02


def together_with_others(sink: Iceberg, catalog: Catalog) -> Ability | None:
    """Whether this table and others of the same catalog become visible by one request."""
    if sink.transaction_key is None:
        return None
    is_granted = private.can_send_together(catalog)
    return Ability(
        name="several tables at one instant",
        granted=is_granted,
        because="the catalog commits several tables by one request"
        if is_granted
        else "the catalog does not offer to commit several tables by one request "
        "(POST …/transactions/commit): they are committed one after the other",
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """One table's change in the request."""

    member: IcebergCommitter
    receipts: Sequence[Receipt]
    table: Table
    plan: SnapshotPlan

    def discard(self) -> None:
        self.plan.discard(TableFiles(self.table.io))


class TablesTransaction:
    """The tables of several sinks, in the order of their declaration."""

    def __init__(self, members: Sequence[IcebergCommitter]) -> None:
        self._members = members

    def rehearse(self, epoch: EpochNumber, receipts: Receipts) -> None:
        for member in self._given(receipts):
            member.rehearse(epoch, receipts[member.sink_name])

    def commit(self, epoch: EpochNumber, receipts: Receipts) -> None:
        given = self._given(receipts)
        tables = {str(member.address): member for member in given}
        together = list(tables.values())
        if len(together) > 1 and private.can_send_together(together[0].catalog):
            self._commit_together(epoch, together, receipts)
            given = [member for member in given if member not in together]
        for member in given:
            member.commit(epoch, receipts[member.sink_name])

    def _given(self, receipts: Receipts) -> list[IcebergCommitter]:
        return [member for member in self._members if member.sink_name in receipts]

    def _commit_together(
        self, epoch: EpochNumber, members: Sequence[IcebergCommitter], receipts: Receipts
    ) -> None:
        for _ in range(_TRIES_MAX):
            parts = self._parts(epoch, members, receipts)
            if not parts or self._is_sent(epoch, parts):
                return
            time.sleep(_WAIT_S)
        raise TryAgain(
            f"epoch {epoch}: others committed {_TRIES_MAX} times while the changes of "
            f"{quantity(len(members), 'table')} were made"
        )

    def _parts(
        self, epoch: EpochNumber, members: Sequence[IcebergCommitter], receipts: Receipts
    ) -> list[_Part]:
        """What is left to be sent: the ledger of each table was asked."""
        parts: list[_Part] = []
        try:
            for member in members:
                planned = member.planned(epoch, receipts[member.sink_name])
                if planned is not None:
                    parts.append(_Part(member, receipts[member.sink_name], *planned))
        except BaseException:
            for part in parts:
                part.discard()
            raise
        return parts

    def _is_sent(self, epoch: EpochNumber, parts: Sequence[_Part]) -> bool:
        """Send all parts by one request; False where the catalog refused."""
        first = parts[0].member
        named = ", ".join(str(part.member.address) for part in parts)
        doing = f"commit epoch {epoch} to {named}"
        with translate_errors(doing, scrub=first.address.scrub, is_commit=True):
            try:
                changes = [(part.table, part.plan.change) for part in parts]
                private.send_together(first.catalog, changes)
            except CommitFailedException:
                for part in parts:
                    part.plan.undo(part.table)
                return False
        for part in parts:
            part.member.taken(epoch, part.plan, part.receipts)
        return True
