"""Carries decisions out, the staged way, where DDL commits by itself.

`rehearse` applies the staging tables to the table and writes the ledger, and leaves the transaction
open; `commit` commits it, and drops the staging tables after that, as dropping them would commit.
Where the transaction was lost, or another process commits, the same is applied again from the
staging tables, unless the ledger shows that it is done: a staging table that the ledger proves
committed is only litter, and goes with the next commit of its epoch.

Rows that the table refuses are taken out of staging for good before the decision, so that whoever
applies again leaves out the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import pyarrow as pa

from epochal.contract import Begin
from epochal.errors import Fenced, OutcomeUnknown, PreparedLost, Refused, RowRejected, TryAgain
from epochal.kit.sql.apply import Apply, Mapped, Source
from epochal.kit.sql.columns import columns_of
from epochal.kit.sql.committing import Committing
from epochal.kit.sql.dialect import UNFIT, Session
from epochal.kit.sql.insisting import HOLDER_WAIT_S, insist
from epochal.kit.sql.names import staging_name
from epochal.kit.sql.receipts import proven
from epochal.kit.sql.rejects import REJECTED, Rejected, SetApart, rows_of
from epochal.kit.sql.search import Search, refusal
from epochal.kit.sql.staging import committed_elsewhere, staged_tables
from epochal.terms import (
    EpochNumber,
    Handle,
    InDoubt,
    Json,
    Proof,
    Receipt,
)

_DATA_EXCEPTION = "22000"


@dataclass(frozen=True, slots=True)
class _Open:
    """A rehearsed epoch: everything is done but the COMMIT."""

    epoch: EpochNumber
    handles: frozenset[Handle]
    session: Session


class _RowsRefused(Exception):
    """The table refuses what is in the rows."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class StagedCommitter(Committing):
    _open: _Open | None = None

    @cached_property
    def apart(self) -> SetApart:
        return SetApart(self._sink.table, self._sink.rejects_limit)

    def begin(self, begin: Begin) -> Json:  # noqa: ARG002
        self._give_up()
        return self._get_ready()

    def rehearse(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        self._give_up()
        self.apart.begin(epoch, receipts)
        insist(lambda: self._rehearse(epoch, receipts), self._limits)

    def commit(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        handles = frozenset(receipt.handle for receipt in receipts)
        open_ = self._open
        if open_ is None or (open_.epoch, open_.handles) != (epoch, handles):
            self._give_up()
            self._get_ready()
            open_ = insist(lambda: self._apply_decided(epoch, receipts), self._limits)
        self._open = None
        if open_ is not None:
            try:
                with self._dialect.sorting(self._doing(f"commit epoch {epoch}"), is_commit=True):
                    open_.session.commit()
            finally:
                self._pool.give_back(open_.session)
        self._drop(f"clear up after epoch {epoch}", receipts)

    def abort(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        self._give_up()
        self._forget()
        self._drop(f"abort epoch {epoch}", receipts)

    def in_doubt(self) -> Sequence[InDoubt]:
        return self._ask(
            "list what is staged",
            lambda session: self._dialect.staged(session, self._sink.meta, self._identity),
            missing=[],
        )

    def outcome(self, epoch: EpochNumber, receipt: Receipt) -> Proof:  # noqa: ARG002
        def ask(session: Session) -> Proof:
            name = staging_name(receipt.handle)
            is_there = self._dialect.present(session, self._sink.meta, [name])
            proof = self._ledger.proof(session, receipt.handle)
            # Litter of a committed epoch may be there as well.
            return Proof.UNKNOWN if is_there and proof is Proof.ABORTED else proven(receipt, proof)

        return self._ask("ask for proof", ask, missing=Proof.ABORTED)

    def close(self) -> None:
        self._give_up()
        super().close()

    # The one transaction

    def _give_up(self) -> None:
        """Let go of a rehearsed transaction that will not be committed."""
        if self._open is not None:
            self._let_go(self._open.session)
            self._open = None

    def _let_go(self, session: Session) -> None:
        session.roll_back()
        self._pool.give_back(session)

    def _rehearse(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        try:
            self._note_unfit(epoch, receipts)
            self.remove_apart()
            self._open = self._apply_what_fits(epoch, receipts)
        except PreparedLost as error:
            raise TryAgain(
                f"{error.message}; no decision was made", "the epoch is tried again whole"
            ) from error
        if self._open is None:
            raise self._committed_elsewhere(epoch)

    def _committed_elsewhere(self, epoch: EpochNumber) -> Fenced | Refused:
        by = self._ask("read the ledger", lambda session: self._ledger.holds(session, epoch))
        return committed_elsewhere(self._sink.table, epoch, by, self._identity)

    def _apply_what_fits(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> _Open | None:
        """Before the decision: rows are set apart until the table refuses none."""
        while True:
            try:
                return self._apply(epoch, receipts)
            except _RowsRefused as refused:
                self._set_apart(epoch, receipts, refused.error)

    def _apply_decided(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> _Open | None:
        try:
            return self._apply(epoch, receipts)
        except _RowsRefused as refused:
            raise self._refusal(epoch, receipts, refused.error) from refused.error

    def _apply(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> _Open | None:
        """Everything but COMMIT, in a new transaction; None where it is committed already."""
        session = self._pool.take()
        try:
            if self._applied(session, epoch, receipts):
                return _Open(epoch, frozenset(one.handle for one in receipts), session)
        except self._dialect.errors as error:
            self._let_go(session)
            raise self._explained(epoch, error) from error
        except BaseException:
            self._let_go(session)
            raise
        self._let_go(session)
        return None

    def _applied(self, session: Session, epoch: EpochNumber, receipts: Sequence[Receipt]) -> bool:
        session.begin(lock_wait_s=HOLDER_WAIT_S)
        rows = sum(receipt.rows for receipt in receipts)
        if not self._ledger.claim_epoch(session, epoch, rows):
            return False
        session.wait_for_locks()
        tables = self._staged(session, epoch, receipts)
        if tables:
            self._read_apply(session, tables).run(session, epoch)
        for statement in self._ledger.record(receipts):
            session.execute(statement)
        return True

    def _read_apply(self, session: Session, tables: dict[str, int]) -> Apply:
        """What is to be done, by what the catalog says now: staging tables describe themselves."""
        sink, dialect = self._sink, self._dialect
        there = self._checker.columns(session)
        known = dialect.columns(session, sink.meta, next(iter(tables)))
        fields = [name for name in known if name not in {dialect.at, *UNFIT}]
        fits = f"s.{dialect.quote(dialect.at)} >= 0" if UNFIT[0] in known else "1 = 1"
        wanted = columns_of(fields, there, sink.column_map, sink.write_mode)
        return Apply(
            dialect=dialect,
            mode=sink.write_mode,
            target=dialect.quote(*sink.table_name.parts),
            mapped=[
                Mapped(field=name, column=column, is_not_null=there.get(column, False))
                for name, column in wanted.items()
            ],
            sources=[
                Source(schema=sink.meta, table=name, part=part, condition=fits)
                for name, part in tables.items()
            ],
        )

    def _staged(
        self, session: Session, epoch: EpochNumber, receipts: Sequence[Receipt]
    ) -> dict[str, int]:
        """The staging tables of these receipts, with their partitions."""
        meta = self._sink.meta
        return staged_tables(
            epoch, receipts, meta, lambda names: self._dialect.present(session, meta, names)
        )

    def _drop(self, verb: str, receipts: Sequence[Receipt]) -> None:
        tables = [staging_name(receipt.handle) for receipt in receipts]
        if not tables:
            return

        def drop(session: Session) -> bool:
            there = self._dialect.present(session, self._sink.meta, tables)
            if there:
                # A task that still writes to it is asked after later, not waited for.
                session.wait_for_locks(HOLDER_WAIT_S)
                self._dialect.drop(session, self._sink.meta, sorted(there))
            return True

        def drop_or_end_the_holder() -> None:
            try:
                self._ask(verb, drop, missing=True)
            except TryAgain as error:
                self._end_older_sessions(error.__cause__)
                raise

        insist(drop_or_end_the_holder, self._limits)

    # Rows that the table refuses (`Rejecting`)

    rejected_schema = REJECTED

    def rejected(self, epoch: EpochNumber) -> pa.Table | None:
        found = self.apart.rows
        return rows_of(self._identity.sink, epoch, found) if found else None

    def remove_apart(self) -> None:
        """Take out of staging, durably, what was set apart. May be repeated, so a lost reply is."""
        quote, at = self._dialect.quote, self._dialect.quote(self._dialect.at)
        statements = [
            f"DELETE FROM {quote(self._sink.meta, table)} WHERE {at} IN ({', '.join(places)})"
            for table, places in self.apart.removals()
        ]
        if not statements:
            return
        try:
            self._in_transaction(
                "set rejected rows apart", lambda session: [*map(session.execute, statements)]
            )
        except OutcomeUnknown as error:
            raise TryAgain(error.message, error.hint) from error
        self.apart.is_removed = True

    def _note_unfit(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        if self._sink.rejects_to is not None:
            self.apart.note(
                self._ask("read unfit rows", lambda one: self._unfit(one, epoch, receipts))
            )

    def _unfit(
        self, session: Session, epoch: EpochNumber, receipts: Sequence[Receipt]
    ) -> list[Rejected]:
        """What tasks could not put into staging but as text."""
        at, row, why = map(self._dialect.quote, (self._dialect.at, *UNFIT))
        return [
            Rejected(
                table=table, at=str(at_), part=part, row=text, sqlstate=_DATA_EXCEPTION, reason=told
            )
            for table, part in self._staged(session, epoch, receipts).items()
            for at_, text, told in session.query(
                f"SELECT {at}, {row}, {why} FROM {self._dialect.quote(self._sink.meta, table)}"
                f" WHERE {at} < 0 ORDER BY {at} DESC"
            )
        ]

    def _set_apart(self, epoch: EpochNumber, receipts: Sequence[Receipt], error: Exception) -> None:
        if self._sink.rejects_to is None:
            raise self._refusal(epoch, receipts, error) from error
        found = self._find_refused(epoch, receipts, self.apart.left + 1)
        if not found:
            raise self._refusal_of(epoch, found, error) from error
        self.apart.add(found)
        self.remove_apart()

    def _refusal(
        self, epoch: EpochNumber, receipts: Sequence[Receipt], error: Exception
    ) -> RowRejected:
        return self._refusal_of(epoch, self._find_refused(epoch, receipts, 1), error)

    def _refusal_of(
        self, epoch: EpochNumber, found: list[Rejected], error: Exception
    ) -> RowRejected:
        told = self._dialect.told(error)
        may_leave = self._sink.sends_rejects
        return refusal(self._sink.table, epoch, found, told, may_leave=may_leave)

    def _find_refused(
        self, epoch: EpochNumber, receipts: Sequence[Receipt], limit: int
    ) -> list[Rejected]:
        """Search in a transaction that is thrown away."""

        def search(session: Session) -> list[Rejected]:
            session.begin()
            try:
                tables = self._staged(session, epoch, receipts)
                return Search(session, self._read_apply(session, tables), limit=limit).run()
            finally:
                session.roll_back()

        return self._ask("find refused rows", search)

    # Trouble

    def _explained(self, epoch: EpochNumber, error: Exception) -> Exception:
        """Why an epoch could not be applied; a zombie that stood in the way is ended."""
        self._end_older_sessions(error)
        if self._dialect.is_data_error(error):
            return _RowsRefused(error)
        return self._dialect.sort(error, self._doing(f"apply epoch {epoch}"))

    def _end_older_sessions(self, error: BaseException | None) -> None:
        if isinstance(error, Exception) and self._dialect.is_lock_wait(error):
            session = self._pool.take()
            with suppress(*self._dialect.errors):
                self._dialect.end_older_sessions(session, self._identity)
            self._pool.give_back(session)
