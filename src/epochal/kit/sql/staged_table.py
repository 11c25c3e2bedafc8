"""One sink's share of a transaction: its staging tables, its table, its ledger."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from epochal.errors import Fenced, OutcomeUnknown, PreparedLost, Refused, TryAgain
from epochal.kit.sql.apply import Apply, Source
from epochal.kit.sql.bisect_rows import RefusedRowSearch
from epochal.kit.sql.client import Session
from epochal.kit.sql.committer import HOLDER_WAIT_S, SqlCommitter, has_rows
from epochal.kit.sql.dialect import UNFIT
from epochal.kit.sql.names import staging_name
from epochal.kit.sql.rejects import REJECTED, Rejected, SetApart, table_of
from epochal.terms import EpochNumber, Receipt

_DATA_EXCEPTION = "22000"


class StagedTable(SqlCommitter):
    """Claims, applies and clears staged epochs of one sink, in sessions that others may share."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.apart = SetApart(self.sink.table, self.sink.rejects_max)

    # Applying

    def claim_epoch(
        self, session: Session, epoch: EpochNumber, receipts: Sequence[Receipt]
    ) -> bool:
        """Insert the epoch's row of the ledger; False where it is committed already."""
        return self._ledger.claim_epoch(session, epoch, sum(one.rows for one in receipts))

    def apply(self, session: Session, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        """
        Apply the staged rows and write the ledger. The transaction is somebody else's to end.

        Where DDL can be part of it, the staging tables disappear in the very transaction that makes
        their rows visible: as long as one is listed, its rows are not in the table. Elsewhere they
        are dropped after the commit, and one that the ledger proves committed is only litter.
        """
        tables = self.staged(session, epoch, receipts)
        if tables:
            rows = sum(receipt.rows for receipt in receipts)
            self.read_apply(session, tables).run(session, epoch, rows)
        self.dialect.check_constraints(session)
        for statement in self._ledger.record(receipts):
            session.execute(statement)
        if tables and not self.dialect.ddl_commits:
            self.dialect.drop(session, self.sink.meta, list(tables))

    def read_apply(self, session: Session, tables: dict[str, int]) -> Apply:
        """What is to be done, by what the catalog contains now: staging tables have columns."""
        sink, dialect = self.sink, self.dialect
        first = next(iter(tables))
        mapped, keeps_unfit = self._checker.mapped(session, first)
        fits = f"s.{dialect.quote(UNFIT[0])} IS NULL" if keeps_unfit else "1 = 1"
        return Apply(
            dialect=dialect,
            mode=sink.write_mode,
            target=dialect.quote(*sink.table_name.parts),
            mapped=mapped,
            sources=[
                Source(schema=sink.meta, table=name, part=part, condition=fits)
                for name, part in tables.items()
            ],
        )

    def staged(
        self, session: Session, epoch: EpochNumber, receipts: Sequence[Receipt]
    ) -> dict[str, int]:
        """The staging tables of these receipts, with their partitions; `PreparedLost` without."""
        meta = self.sink.meta
        wanted = {staging_name(one.handle): one.handle for one in receipts if has_rows(one)}
        there = self.dialect.present(session, meta, wanted.keys())
        lost = tuple(str(handle) for name, handle in wanted.items() if name not in there)
        if lost:
            raise PreparedLost(
                f"epoch {epoch}: {len(lost)} of {len(receipts)} staging tables are not in {meta}, "
                "and the ledger does not prove them committed",
                "somebody dropped them, or the server was restored from a backup",
                handles=lost,
            )
        return {name: handle.partition for name, handle in wanted.items()}

    def committed_elsewhere(self, epoch: EpochNumber) -> Fenced | Refused:
        """Why an epoch can't be rehearsed that the ledger proves committed."""
        by = self._ask("read the ledger", lambda session: self._ledger.holds(session, epoch))
        fact = f"epoch {epoch} is being written, and {self.sink.table} proves it committed"
        if by is not None and by > self.identity.generation:
            return Fenced(
                f"{fact} by generation {by}; this driver is {self.identity.generation}",
                "another driver has taken this checkpoint over: leave this one stopped",
            )
        return Refused(
            f"{fact} already: the epoch log is older than the table",
            "the log or the checkpoint was restored from a backup: start with the newer one, or "
            "with a run= of its own",
        )

    def drop_staged(self, verb: str, receipts: Sequence[Receipt]) -> None:
        """Drop the staging tables of these receipts that are still there."""
        tables = [staging_name(receipt.handle) for receipt in receipts]
        meta, dialect = self.sink.meta, self.dialect

        def drop(session: Session) -> bool:
            there = dialect.present(session, meta, tables)
            if there:
                if dialect.ddl_commits:
                    # A task that still writes to one makes this wait: not for long, it is retried.
                    session.wait_for_locks(HOLDER_WAIT_S)
                dialect.drop(session, meta, sorted(there))
            return True

        if not tables:
            return
        if dialect.ddl_commits:
            self._ask(verb, drop, missing=True)
        else:
            self._in_transaction(verb, drop, missing=True, lock_wait_s=HOLDER_WAIT_S)

    # Rows that the table refuses (`Rejecting`)

    rejected_schema = REJECTED

    @property
    def takes_rejects(self) -> bool:
        return self.sink.rejects_to is not None

    def rejected(self, epoch: EpochNumber) -> pa.Table | None:
        found = self.apart.rows
        return table_of(self.identity.sink, epoch, found) if found else None

    def find_refused(
        self, session: Session, epoch: EpochNumber, receipts: Sequence[Receipt], *, limit: int
    ) -> list[Rejected]:
        """The rows that the table refuses, at most `limit`; the transaction must be rolled back."""
        tables = self.staged(session, epoch, receipts)
        return RefusedRowSearch(session, self.read_apply(session, tables), limit=limit).run()

    def remove_apart(self) -> None:
        """Delete from staging, durably, the rows set apart. May be repeated, so a lost reply is."""
        statements = [
            f"DELETE FROM {self.dialect.quote(self.sink.meta, table)}"
            f" WHERE {self.dialect.at_places(places)}"
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

    def note_unfit(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        """Read the rows that tasks could only stage as text; their receipts report how many."""
        unfit = [one for one in receipts if has_rows(one) and one.token.get("unfit", 1)]
        if self.takes_rejects and unfit:
            self.apart.note(
                self._ask("read unfit rows", lambda session: self._unfit(session, epoch, unfit))
            )

    def _unfit(
        self, session: Session, epoch: EpochNumber, receipts: Sequence[Receipt]
    ) -> list[Rejected]:
        row, why = map(self.dialect.quote, UNFIT)
        place = self.dialect.place
        return [
            Rejected(
                table=table,
                place=str(at),
                part=part,
                row=text,
                sqlstate=_DATA_EXCEPTION,
                reason=reason,
            )
            for table, part in self.staged(session, epoch, receipts).items()
            for at, text, reason in session.query(
                f"SELECT {place}, {row}, {why} FROM {self.dialect.quote(self.sink.meta, table)}"
                f" WHERE {row} IS NOT NULL ORDER BY {place} DESC"
            )
        ]
