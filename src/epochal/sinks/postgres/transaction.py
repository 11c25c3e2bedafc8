"""The one transaction of an epoch: applied before the decision, committed after it.

All staged sinks of a pipeline on one server share it, in the order in which they are declared, so
that rows which refer to each other arrive together; a sink that is alone shares it with nobody.
`rehearse` applies the staging tables and writes the ledgers, and leaves the transaction open;
`commit` commits it. Where that transaction was lost, or another process commits, the same is
applied again from the staging tables, which disappear in the very transaction that makes their rows
visible: as long as one is listed, its rows are not in the table.

Rows that a table refuses are taken out of staging for good before the decision, so that whoever
applies again leaves out the same ones.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg

from epochal.contract import Limits
from epochal.errors import EpochalError, PreparedLost, RowRejected, TryAgain
from epochal.kit.sql.insisting import HOLDER_WAIT_S, insist
from epochal.kit.sql.rejects import Rejected
from epochal.sinks.postgres import meta
from epochal.sinks.postgres.applying import find_rejected
from epochal.sinks.postgres.connecting import roll_back
from epochal.sinks.postgres.rejects import refusal
from epochal.sinks.postgres.sorting import is_data_error, is_lock_wait, sorted_error, sorting
from epochal.terms import EpochNumber, Handle, Receipt, Receipts, SinkName

if TYPE_CHECKING:
    from epochal.sinks.postgres.committer import StagedCommitter

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Part:
    """What one sink brings."""

    member: StagedCommitter
    receipts: Sequence[Receipt]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Open:
    """A rehearsed epoch: everything is done but the COMMIT."""

    epoch: EpochNumber
    sinks: frozenset[SinkName]
    handles: frozenset[Handle]
    claimed: Sequence[_Part]
    connection: psycopg.Connection[Any]


class _RowsRefused(Exception):
    """A table refuses what is in the rows of one sink."""

    def __init__(self, part: _Part, before: Sequence[_Part], error: Exception) -> None:
        super().__init__(str(error))
        self.part = part
        self.before = before
        """What was applied before it: its rows may refer to theirs."""
        self.error = error


class Transaction:
    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._members: dict[SinkName, StagedCommitter] = {}
        self._open: _Open | None = None
        self._giving_up = threading.Lock()

    def add(self, member: StagedCommitter) -> None:
        self._members[member.identity.sink] = member

    # The verbs

    def rehearse(self, epoch: EpochNumber, receipts: Receipts) -> None:
        self.give_up()
        parts = self._parts(receipts)
        for part in parts:
            part.member.apart.begin(epoch, part.receipts)
        insist(lambda: self._rehearse(epoch, parts), self._limits)

    def commit(self, epoch: EpochNumber, receipts: Receipts) -> None:
        parts = self._parts(receipts)
        open_ = self._open
        if open_ is None or (open_.epoch, open_.sinks, open_.handles) != (epoch, *_named(parts)):
            self.give_up()
            for part in parts:
                part.member.get_ready()
            open_ = insist(lambda: self._apply_decided(epoch, parts), self._limits)
        self._open = None
        if open_ is None:
            return
        doing = self._doing(f"commit epoch {epoch}")
        try:
            with sorting(doing, is_commit=True):
                done = open_.connection.execute("COMMIT").statusmessage
            if done != "COMMIT":
                raise TryAgain(f"{doing}: the server answered {done}")
        finally:
            self._first.pool.give_back(open_.connection)

    def give_up(self) -> None:
        """Let go of a rehearsed transaction that will not be committed; any member may ask."""
        with self._giving_up:
            open_, self._open = self._open, None
        if open_ is not None:
            self._let_go(open_.connection)

    # Applying

    @property
    def _first(self) -> StagedCommitter:
        return next(iter(self._members.values()))

    def _parts(self, receipts: Receipts) -> list[_Part]:
        """In the order of declaration, whatever order they are given in."""
        return [
            _Part(member, receipts[name])
            for name, member in self._members.items()
            if name in receipts
        ]

    def _doing(self, verb: str) -> str:
        return self._first.doing(verb)

    def _rehearse(self, epoch: EpochNumber, parts: Sequence[_Part]) -> None:
        for part in parts:
            part.member.remove_apart()
        while True:
            try:
                self._open = self._apply(epoch, parts)
                break
            except PreparedLost as error:
                raise TryAgain(
                    f"{error.message}; no decision was made", "the epoch is tried again whole"
                ) from error
            except _RowsRefused as refused:
                self._set_apart(epoch, refused)
        claimed = self._open.claimed if self._open is not None else ()
        for part in parts:
            if part not in claimed:
                self.give_up()
                raise part.member.committed_elsewhere(epoch)

    def _apply_decided(self, epoch: EpochNumber, parts: Sequence[_Part]) -> _Open | None:
        try:
            return self._apply(epoch, parts)
        except _RowsRefused as refused:
            raise self._refusal(epoch, refused) from refused.error

    def _apply(self, epoch: EpochNumber, parts: Sequence[_Part]) -> _Open | None:
        """Everything but COMMIT, in a new transaction; None where all is committed already."""
        connection = self._first.pool.take()
        try:
            claimed = self._claimed(connection, epoch, parts)
            for place, part in enumerate(claimed):
                self._apply_part(connection, epoch, part, claimed[:place])
        except psycopg.Error as error:
            self._let_go(connection)
            raise self._explained(epoch, error) from error
        except BaseException:
            self._let_go(connection)
            raise
        if not claimed:
            self._let_go(connection)
            return None
        sinks, handles = _named(parts)
        return _Open(
            epoch=epoch, sinks=sinks, handles=handles, claimed=claimed, connection=connection
        )

    def _claimed(
        self, connection: psycopg.Connection[Any], epoch: EpochNumber, parts: Sequence[_Part]
    ) -> list[_Part]:
        """The parts that are not committed yet, their ledgers' rows written."""
        server = self._first.server
        connection.execute(server.begin(lock_wait_s=HOLDER_WAIT_S))
        claimed = [
            part for part in parts if part.member.claim_epoch(connection, epoch, part.receipts)
        ]
        connection.execute(server.settings())
        return claimed

    def _apply_part(
        self,
        connection: psycopg.Connection[Any],
        epoch: EpochNumber,
        part: _Part,
        before: Sequence[_Part],
    ) -> None:
        if before:
            # Those of the tables before were checked; this one's may wait until its rows are in.
            connection.execute("SET CONSTRAINTS ALL DEFERRED")
        try:
            part.member.apply(connection, epoch, part.receipts)
        except psycopg.Error as error:
            if is_data_error(error):
                raise _RowsRefused(part, before, error) from error
            raise
        except RowRejected as error:
            raise _RowsRefused(part, before, error) from error

    def _let_go(self, connection: psycopg.Connection[Any]) -> None:
        roll_back(connection)
        self._first.pool.give_back(connection)

    def _explained(self, epoch: EpochNumber, error: psycopg.Error) -> Exception:
        """Why an epoch could not be applied; a zombie that stood in the way is ended."""
        self.end_holders(error)
        return sorted_error(error, self._doing(f"apply epoch {epoch}"))

    def end_holders(self, error: BaseException | None) -> None:
        """Where an earlier driver of these sinks may be what was waited for, end its sessions."""
        if error is not None and is_lock_wait(error):
            identities = [member.identity for member in self._members.values()]
            with self._first.pool.connection() as connection, suppress(psycopg.Error):
                meta.end_older_sessions(connection, identities)

    # Rows that a table refuses

    def _set_apart(self, epoch: EpochNumber, refused: _RowsRefused) -> None:
        """Take bad rows out of staging, for good and before the decision."""
        member = refused.part.member
        if not member.takes_rejects or isinstance(refused.error, EpochalError):
            raise self._refusal(epoch, refused) from refused.error
        found = self._find_rejected(epoch, refused, member.apart.left + 1)
        if not found:
            raise refusal(member.table, epoch, found, refused.error) from refused.error
        member.apart.add(found)
        member.remove_apart()

    def _refusal(self, epoch: EpochNumber, refused: _RowsRefused) -> Exception:
        if isinstance(refused.error, EpochalError):
            return refused.error
        found = self._find_rejected(epoch, refused, 1)
        return refusal(refused.part.member.table, epoch, found, refused.error)

    def _find_rejected(
        self, epoch: EpochNumber, refused: _RowsRefused, limit: int
    ) -> list[Rejected]:
        """Search in a transaction that is thrown away."""
        member = refused.part.member
        doing = member.doing("find refused rows")
        with self._first.pool.connection() as connection, sorting(doing):
            connection.execute(self._first.server.begin())
            try:
                for part in refused.before:
                    part.member.apply(connection, epoch, part.receipts)
                if refused.before:
                    connection.execute("SET CONSTRAINTS ALL DEFERRED")
                tables = member.staged(connection, epoch, refused.part.receipts)
                return find_rejected(connection, member.sink, tables, limit=limit)
            finally:
                roll_back(connection)


def _named(parts: Sequence[_Part]) -> tuple[frozenset[SinkName], frozenset[Handle]]:
    return (
        frozenset(part.member.identity.sink for part in parts),
        frozenset(receipt.handle for part in parts for receipt in part.receipts),
    )
