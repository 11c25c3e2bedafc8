"""The staged strategy: one transaction per epoch, applied before the decision, committed after it.

All staged sinks of a pipeline on one server share it, in the order of their declaration, so that
rows which refer to each other arrive together; a sink that is alone is a group of one.

    tasks       each: load rows into a staging table, COMMIT        durable, invisible
    rehearse    BEGIN; per sink: claim the epoch in the ledger, take its staging tables, apply
                their rows, check constraints, write the ledger     left open (I3)
    (decision)
    commit      COMMIT                                              visible, and proven (I9)

Where that transaction was lost, or another process commits, the same is applied again from the
staging tables, unless the ledger shows that it is done.

Rows that a table refuses are deleted from staging before the decision, in a transaction of their
own, so that an epoch that is applied again leaves out the same rows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from epochal.contract import Begin
from epochal.errors import EpochalError, PreparedLost, TryAgain
from epochal.kit.sql.apply import UnwritableRows
from epochal.kit.sql.client import Session
from epochal.kit.sql.committer import HOLDER_WAIT_S, has_rows, proven, retry_transient
from epochal.kit.sql.rejects import Rejected, refusal
from epochal.kit.sql.staged_table import StagedTable
from epochal.terms import (
    EpochNumber,
    Handle,
    InDoubt,
    Json,
    Limits,
    Proof,
    Receipt,
    Receipts,
    SinkName,
)


@dataclass(frozen=True, slots=True)
class _Part:
    """What one sink contributes to an epoch."""

    table: StagedTable
    receipts: Sequence[Receipt]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Open:
    """A rehearsed epoch: everything is done but the COMMIT."""

    epoch: EpochNumber
    sinks: frozenset[SinkName]
    handles: frozenset[Handle]
    claimed: Sequence[_Part]
    session: Session


class _RowsRefused(Exception):
    """A statement with rows of one sink fails, and rows may be the reason."""

    def __init__(self, part: _Part, before: Sequence[_Part], error: Exception) -> None:
        super().__init__(str(error))
        self.part = part
        self.before = before
        """The parts applied before it: its rows may refer to theirs."""
        self.error = error


class EpochTransaction:
    """The transaction that the tables of one or several sinks are applied in (`share`)."""

    def __init__(self, tables: Sequence[StagedTable], limits: Limits) -> None:
        self._tables = {table.identity.sink: table for table in tables}
        self._first = tables[0]
        self._dialect = self._first.dialect
        self._limits = limits
        self._open: _Open | None = None
        self._giving_up = threading.Lock()
        self._first.pool.act_for([table.identity for table in tables])

    def rehearse(self, epoch: EpochNumber, receipts: Receipts) -> None:
        self.give_up()
        parts = self._parts(receipts)
        for part in parts:
            part.table.apart.begin(epoch, list(filter(has_rows, part.receipts)))
        retry_transient(
            lambda: self._rehearse(epoch, parts), self._limits, self._dialect.is_deadlock
        )

    def confirm(self, epoch: EpochNumber, receipts: Receipts) -> None:
        """Apply again what was lost since, so that the decision is on rows that the tables take."""
        parts, open_ = self._parts(receipts), self._open
        if open_ is not None and self._is_held(open_):
            return
        apart = [len(part.table.apart) for part in parts]
        self.rehearse(epoch, receipts)
        if [len(part.table.apart) for part in parts] != apart:
            raise TryAgain(
                self._first.doing(f"epoch {epoch} was applied again, and more rows are refused"),
                "the epoch is tried again whole",
            )

    def commit(self, epoch: EpochNumber, receipts: Receipts) -> None:
        parts = self._parts(receipts)
        open_ = self._open
        if open_ is None or (open_.epoch, open_.sinks, open_.handles) != (epoch, *_names(parts)):
            self.give_up()
            for part in parts:
                part.table.make_ready()
            open_ = retry_transient(lambda: self._apply_decided(epoch, parts), self._limits)
        self._open = None
        if open_ is not None:
            self._commit(epoch, open_.session)
        for part in parts:
            part.table.clear_up(epoch, part.receipts)

    @property
    def _held_max_s(self) -> float:
        """
        How long a rehearsed transaction may wait for gates, or for the log to take the decision.

        Gates may take longer: then it is applied again (`confirm`).
        """
        return self._limits.decide_retry_max_s + self._limits.commit_retry_max_s

    def _is_held(self, open_: _Open) -> bool:
        try:
            open_.session.query(f"SELECT 1{self._dialect.dual}")
        except self._dialect.errors:
            return False
        return True

    def give_up(self) -> None:
        """Roll a rehearsed transaction back that will not be committed; any member may ask."""
        with self._giving_up:
            open_, self._open = self._open, None
        if open_ is not None:
            self._let_go(open_.session)

    def throw_away(self, verb: str, table: StagedTable, receipts: Sequence[Receipt]) -> None:
        """Again after an open rehearsal of an earlier driver, which locks them, was ended."""
        retry_transient(lambda: table.throw_away(verb, receipts), self._limits)

    # Applying

    def _parts(self, receipts: Receipts) -> list[_Part]:
        """In the order of declaration, whatever order they are given in."""
        return [
            _Part(table, receipts[name]) for name, table in self._tables.items() if name in receipts
        ]

    def _rehearse(self, epoch: EpochNumber, parts: Sequence[_Part]) -> None:
        try:
            for part in parts:
                part.table.note_unfit(epoch, part.receipts)
                part.table.remove_apart()
            self._open = self._apply_at_once(epoch, parts)
            if self._open is None:
                self._open = self._apply_without_refused(epoch, parts)
        except PreparedLost as error:
            raise TryAgain(
                f"{error.message}; no decision was made", "the epoch is tried again whole"
            ) from error
        claimed = self._open.claimed if self._open is not None else ()
        for part in parts:
            if part not in claimed:
                self.give_up()
                raise part.table.committed_already(epoch)

    def _apply_without_refused(self, epoch: EpochNumber, parts: Sequence[_Part]) -> _Open | None:
        """Before the decision: rows are set apart until no table refuses one."""
        while True:
            try:
                return self._apply(epoch, parts)
            except _RowsRefused as refused:
                self._set_apart(epoch, refused)

    def _apply_decided(self, epoch: EpochNumber, parts: Sequence[_Part]) -> _Open | None:
        try:
            return self._apply(epoch, parts)
        except _RowsRefused as refused:
            raise self._refusal(epoch, refused) from refused.error

    def _apply(self, epoch: EpochNumber, parts: Sequence[_Part]) -> _Open | None:
        """Everything but COMMIT, in a new transaction; None where all is committed already."""

        def work(session: Session) -> Sequence[_Part]:
            claimed = self._claim(session, epoch, parts)
            for number, part in enumerate(claimed):
                self._apply_part(session, epoch, part, claimed[:number])
            return claimed

        return self._left_open(epoch, parts, work)

    def _apply_at_once(self, epoch: EpochNumber, parts: Sequence[_Part]) -> _Open | None:
        """
        The same in one round trip, before the decision: it needs every part, and a server that
        stops where one of its statements finds less than those behind it need. None where something
        is not as it was in the epoch before, or a row is refused: `_apply` finds out what.
        """
        found = [(part, part.table.compose(epoch, part.receipts)) for part in parts]
        composed = [(part, sent) for part, sent in found if sent is not None]
        claim = self._dialect.require_rows([(sent.claim, 1) for _, sent in composed])
        if len(composed) < len(parts) or claim is None:
            return None

        def work(session: Session) -> Sequence[_Part]:
            session.begin(lock_wait_s=HOLDER_WAIT_S, idle_max_s=self._held_max_s)
            session.defer(claim)
            session.wait_for_locks()
            deferring: list[str] = []
            statements: list[str] = []
            for _, sent in composed:
                statements += [*deferring, *sent.statements]
                deferring = [self._dialect.later_constraints]
            try:
                answers = iter(session.run_all(statements))
            except self._dialect.errors as error:
                if self._dialect.is_short(error) or self._dialect.may_be_rows(error):
                    return []
                raise
            for number, (part, sent) in enumerate(composed):
                if number:
                    next(answers)
                if not part.table.verify(session, epoch, sent, answers):
                    return []
            return parts

        return self._left_open(epoch, parts, work)

    def _left_open(
        self,
        epoch: EpochNumber,
        parts: Sequence[_Part],
        work: Callable[[Session], Sequence[_Part]],
    ) -> _Open | None:
        """A new transaction, open with the parts that were applied in it; none: rolled back."""
        session = self._first.pool.take()
        try:
            claimed = work(session)
        except self._dialect.errors as error:
            self._let_go(session)
            self._first.end_holders(error, [table.identity for table in self._tables.values()])
            doing = self._first.doing(f"apply epoch {epoch}")
            raise self._dialect.classify(error, doing) from error
        except BaseException:
            self._let_go(session)
            raise
        if not claimed:
            self._let_go(session)
            return None
        sinks, handles = _names(parts)
        return _Open(epoch=epoch, sinks=sinks, handles=handles, claimed=claimed, session=session)

    def _claim(self, session: Session, epoch: EpochNumber, parts: Sequence[_Part]) -> list[_Part]:
        """The parts that are not committed yet, their epoch rows inserted in the ledgers."""
        session.begin(lock_wait_s=HOLDER_WAIT_S, idle_max_s=self._held_max_s)
        claimed = [part for part in parts if part.table.claim_epoch(session, epoch, part.receipts)]
        if claimed:
            session.wait_for_locks()
        return claimed

    def _apply_part(
        self, session: Session, epoch: EpochNumber, part: _Part, before: Sequence[_Part]
    ) -> None:
        if before:
            # Constraints of the tables before were checked; this table's may wait for its rows.
            self._dialect.defer_constraints(session)
        try:
            part.table.apply(session, epoch, part.receipts)
        except UnwritableRows as error:
            raise _RowsRefused(part, before, error) from error
        except self._dialect.errors as error:
            if self._dialect.may_be_rows(error):
                raise _RowsRefused(part, before, error) from error
            raise

    def _commit(self, epoch: EpochNumber, session: Session) -> None:
        doing = self._first.doing(f"commit epoch {epoch}")
        try:
            with self._dialect.classified(doing, is_commit=True):
                session.commit()
        finally:
            self._first.pool.give_back(session)

    def _let_go(self, session: Session) -> None:
        session.roll_back()
        self._first.pool.give_back(session)

    # Rows that a table refuses

    def _set_apart(self, epoch: EpochNumber, refused: _RowsRefused) -> None:
        """Delete refused rows from staging, for good and before the decision."""
        table = refused.part.table
        if not table.takes_rejects:
            raise self._refusal(epoch, refused) from refused.error
        found = self._find_refused(epoch, refused, table.apart.left + 1)
        if not found:
            raise self._refusal_of(epoch, refused, found) from refused.error
        table.apart.add(found)
        table.remove_apart()

    def _refusal(self, epoch: EpochNumber, refused: _RowsRefused) -> EpochalError:
        is_found = isinstance(refused.error, UnwritableRows)
        found = [] if is_found else self._find_refused(epoch, refused, 1)
        return self._refusal_of(epoch, refused, found)

    def _refusal_of(
        self, epoch: EpochNumber, refused: _RowsRefused, found: Sequence[Rejected]
    ) -> EpochalError:
        table, error = refused.part.table, refused.error
        if isinstance(error, UnwritableRows):
            return error.refusal
        if not found and not self._dialect.is_data_error(error):
            return self._dialect.classify(error, table.doing(f"apply epoch {epoch}"))
        return refusal(table.sink.table, epoch, found, self._dialect.text_of(error))

    def _find_refused(
        self, epoch: EpochNumber, refused: _RowsRefused, limit: int
    ) -> list[Rejected]:
        """Search in a transaction that is rolled back."""
        part = refused.part
        session = self._first.pool.take()
        try:
            with self._dialect.classified(part.table.doing(f"apply epoch {epoch}")):
                session.begin()
                for earlier in refused.before:
                    earlier.table.apply(session, epoch, earlier.receipts)
                if refused.before:
                    self._dialect.defer_constraints(session)
                return part.table.find_refused(session, epoch, part.receipts, limit=limit)
        finally:
            self._let_go(session)


def _names(parts: Sequence[_Part]) -> tuple[frozenset[SinkName], frozenset[Handle]]:
    return (
        frozenset(part.table.identity.sink for part in parts),
        frozenset(receipt.handle for part in parts for receipt in part.receipts),
    )


class StagedSqlCommitter(StagedTable):
    """The `Committer` of one staged sink; its transaction may be shared (`SharesTransaction`)."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.transaction = EpochTransaction([self], self._limits)

    def share(self, members: Sequence[StagedSqlCommitter]) -> EpochTransaction:
        shared = EpochTransaction(members, self._limits)
        for member in members:
            member.transaction.give_up()
            member.transaction = shared
        return shared

    def begin(self, begin: Begin) -> Json:
        self.transaction.give_up()
        if self.is_settled_in:
            # The claim in the rehearsal compares as well: nothing is created or handed out here.
            self._after = begin.newest_committed
            return None
        self._begin_after(begin.newest_committed)
        return self.hand_out()

    def rehearse(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        self.transaction.rehearse(epoch, {self.identity.sink: receipts})

    def confirm(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        self.transaction.confirm(epoch, {self.identity.sink: receipts})

    def commit(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        self.transaction.commit(epoch, {self.identity.sink: receipts})

    def abort(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        self.transaction.give_up()
        self._read_again()
        self.transaction.throw_away(f"abort epoch {epoch}", self, receipts)

    def in_doubt(self) -> Sequence[InDoubt]:
        return self._ask(
            "list staged attempts",
            lambda session: self.staging.listed(session, self.identity),
            missing=[],
        )

    def outcome(self, epoch: EpochNumber, receipt: Receipt) -> Proof:  # noqa: ARG002
        def ask(session: Session) -> Proof:
            is_there = self.staging.is_listed(session, receipt.handle)
            proof = self._ledger.proof(session, receipt.handle)
            # Where DDL commits, a staging table of a committed epoch may be there as well.
            return Proof.UNKNOWN if is_there and proof is Proof.ABORTED else proven(receipt, proof)

        return self._ask("ask for proof", ask, missing=Proof.ABORTED)

    def close(self) -> None:
        self.transaction.give_up()
        super().close()
