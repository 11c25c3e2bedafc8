"""One sink's share of a transaction: its staging tables, its table, its ledger.

Also the search for staged rows that the table refuses.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import pyarrow as pa

from epochal.errors import OutcomeUnknown, PreparedLost, Refused, TryAgain
from epochal.kit.sql.apply import Apply, Mapped, Source
from epochal.kit.sql.check import StagedLayout
from epochal.kit.sql.client import Answer, Session
from epochal.kit.sql.committer import HOLDER_WAIT_S, SqlCommitter, has_rows
from epochal.kit.sql.dialect import UNFIT
from epochal.kit.sql.rejects import REJECTED, Rejected, Rows, SetApart, table_of
from epochal.kit.sql.staging_tables import Held
from epochal.terms import EpochNumber, Handle, Receipt, quantity

logger = logging.getLogger("epochal")

_DATA_EXCEPTION = "22000"
_SAVEPOINT = "epochal_half"
_MORE_TRIED = 2
"""How many rows more are tried before it is taken for certain that none passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """How rows of one shape are applied, as long as the table is what it was."""

    basis: str
    shape: str
    layout: StagedLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Composed:
    """
    One sink's share of a transaction as statements of one message, none of which waits for the
    answer to another. Whatever an answer might change fails in the server (`Dialect.is_short`), or
    is compared at the end, before the transaction is worth anything.
    """

    claim: str
    """Of the epoch: inserts one row."""
    before: Sequence[str]
    """Take the staged attempts, or fail."""
    counting: Sequence[str]
    probes: Sequence[str]
    """Find nothing."""
    clearing: Sequence[str]
    apply: Apply
    expected: Mapping[Handle, int]
    """How many rows of each attempt are read."""
    basis: str
    after: Sequence[str]

    @property
    def statements(self) -> list[str]:
        asked = [*self.counting, *self.probes]
        return [*self.before, *asked, *self.clearing, *self.apply.statements(), *self.after]


class StagedTable(SqlCommitter):
    """Claims, applies and clears staged epochs of one sink, in sessions that others may share."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.left_out = 0
        """Keys of the last epoch that `insert_new` found there already, or `update` did not."""
        self.apart = SetApart(self.sink.table, self.sink.rejects_max)
        self._known: _Known | None = None

    # Applying

    def claim_epoch(
        self, session: Session, epoch: EpochNumber, receipts: Sequence[Receipt]
    ) -> bool:
        """
        Insert the epoch's row of the ledger; False where these receipts are committed already.

        Raises where the epoch was committed from others, which proves nothing of these, and where
        the server went back in time.
        """
        if self._ledger.claim_epoch(session, epoch, receipts, after=self._after):
            return True
        handles = frozenset(receipt.handle for receipt in receipts)
        if self._ledger.handles(session, epoch) == handles:
            return False
        self._require_not_back(session)
        raise self._committed_by_others(epoch)

    def apply(self, session: Session, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        """
        Apply the staged rows and write the ledger. The transaction is somebody else's to end.
        """
        self.apply_rows(session, epoch, receipts)
        for statement in self._ledger.record_epoch(epoch, receipts):
            session.defer(statement)
        self.dialect.check_constraints(session)

    def apply_rows(self, session: Session, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        """
        Take what is staged under these receipts, and put it into the table.

        As long as an attempt is listed, its rows are not in the table; where DDL commits, an
        attempt that the ledger proves committed may be listed still, as a leftover.
        """
        taken = self.take(session, epoch, receipts)
        if taken:
            basis = self._checker.basis(session)
            layout = self._read_layout(session, taken)
            apply = self._apply_to(layout, taken)
            expected = self._rows_to_read(taken, receipts)
            self._note_left_out(epoch, apply.left_out(session))
            written = apply.run(session, epoch, sum(expected.values()))
            self._require_basis(session, basis)
            self._require_all_read(session, epoch, apply, expected, written)
            self._remember(basis, layout, taken)
        else:
            self._apply_of((), (), "").clear(session)

    def _note_left_out(self, epoch: EpochNumber, keys: int) -> None:
        self.left_out = keys
        if keys:
            known = "are there already" if self.sink.mode == "insert_new" else "are not there"
            fact = f"epoch {epoch}: {quantity(keys, 'key')} left out, which {known}"
            logger.info(self.doing(fact))

    def _require_basis(self, session: Session, basis: str) -> None:
        """The rows are in the table, so nobody alters it until the transaction ends."""
        if self._checker.basis(session) != basis:
            raise TryAgain(
                self.doing(f"{self.sink.table} was altered while rows were applied"),
                "they are applied again to its new columns",
            )

    def _remember(self, basis: str, layout: StagedLayout, taken: Sequence[Held]) -> None:
        """For `compose`: the next epochs are mostly alike."""
        shapes = {one.shape for one in taken}
        shape = shapes.pop()
        is_same = shape and not shapes
        self._known = _Known(basis=basis, shape=shape, layout=layout) if is_same else None

    # Applying in one message

    def compose(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> Composed | None:
        """
        `claim_epoch` and `apply` as one message: what the table and the staged rows look like is
        taken from the epoch before. None where that is not enough, or the server can't.
        """
        staged = [one for one in receipts if has_rows(one)]
        dialect, known = self.dialect, self._known
        is_unfit = any(one.token.get("unfit", 1) for one in staged)
        if known is None or not staged or is_unfit or len(self.apart):
            return None
        taking = self.staging.taking(staged, known.shape)
        taken = None if taking is None else dialect.require_rows(taking.changes)
        if taking is None or taken is None:
            return None
        apply = self._apply_to(known.layout, taking.held)
        return Composed(
            claim=self._ledger.claim(epoch, receipts, after=self._after),
            before=[taken],
            counting=apply.counting(),
            probes=apply.probes(),
            clearing=apply.clearing(),
            apply=apply,
            expected=self._rows_to_read(taking.held, receipts),
            basis=known.basis,
            after=[
                self._checker.basis_sql,
                *self._ledger.record_epoch(epoch, receipts),
                dialect.now_constraints,
            ],
        )

    def verify(
        self, session: Session, epoch: EpochNumber, sent: Composed, answers: Iterator[Answer]
    ) -> bool:
        """
        Whether all is as it was taken to be; else the transaction is of no use, and `apply` finds
        out why. Takes its answers from the front of all.
        """

        def rows_of(statements: Sequence[str]) -> list[list[tuple[Any, ...]]]:
            return [answer.rows for answer in islice(answers, len(statements))]

        rows_of(sent.before)
        left_out = sum(int(count) for ((count,),) in rows_of(sent.counting))
        found = rows_of(sent.probes)
        rows_of(sent.clearing)
        counts = [one.rows_changed for one in islice(answers, len(sent.apply.statements()))]
        basis, *_ = rows_of(sent.after)
        if any(found) or basis != [(sent.basis,)]:
            return False
        written, rows = sent.apply.rows_written(counts), sum(sent.expected.values())
        sent.apply.require_no_ties(session, epoch, written, rows)
        self._require_all_read(session, epoch, sent.apply, sent.expected, written)
        self._note_left_out(epoch, left_out)
        return True

    # What is staged

    def read_apply(self, session: Session, staged: Sequence[Held]) -> Apply:
        """What is to be done, by what the catalog contains now: staging tables have columns."""
        return self._apply_to(self._read_layout(session, staged), staged)

    def _read_layout(self, session: Session, staged: Sequence[Held]) -> StagedLayout:
        return self._checker.staged_layout(session, self.staging.schema, staged[0].table)

    def _apply_to(self, layout: StagedLayout, staged: Sequence[Held]) -> Apply:
        dialect, schema = self.dialect, self.staging.schema
        fits = f"s.{dialect.quote(UNFIT[0])} IS NULL" if layout.keeps_unfit else "1 = 1"
        sources = [
            Source(
                schema=schema,
                table=one.table,
                part=one.handle.partition,
                condition=fits,
                file=one.file,
            )
            for one in staged
        ]
        return self._apply_of(layout.mapped, sources, layout.arrived)

    def _apply_of(self, mapped: Sequence[Mapped], sources: Sequence[Source], arrived: str) -> Apply:
        sink, dialect = self.sink, self.dialect
        return Apply(
            dialect=dialect,
            mode=sink.write_mode,
            target=dialect.quote(*sink.table_name.parts),
            mapped=mapped,
            sources=sources,
            arrived=arrived,
        )

    def take(
        self, session: Session, epoch: EpochNumber, receipts: Sequence[Receipt]
    ) -> Sequence[Held]:
        """What is staged under these receipts, for the transaction that applies it."""
        handles = _with_rows(receipts)
        return self._all_of(epoch, handles, self.staging.take(session, handles))

    def hold(
        self, session: Session, epoch: EpochNumber, handles: Sequence[Handle]
    ) -> Sequence[Held]:
        """The same for a transaction that only reads it, or sets rows apart."""
        return self._all_of(epoch, handles, self.staging.hold(session, handles))

    def _all_of(
        self, epoch: EpochNumber, handles: Sequence[Handle], there: Mapping[Handle, Held]
    ) -> Sequence[Held]:
        lost = [handle for handle in handles if handle not in there]
        if lost:
            raise self._lost(epoch, lost, len(handles), "somebody dropped them")
        return [there[handle] for handle in handles]

    def _lost(
        self, epoch: EpochNumber, lost: Sequence[Handle], of: int, because: str
    ) -> PreparedLost:
        return PreparedLost(
            f"epoch {epoch}: {len(lost)} of {of} attempts are not staged any more in "
            f"{self.staging.schema}, and the ledger does not prove them committed",
            f"{because}, or the server was restored from a backup",
            handles=tuple(map(str, lost)),
            shows_none=True,
        )

    def _rows_to_read(
        self, taken: Sequence[Held], receipts: Sequence[Receipt]
    ) -> Mapping[Handle, int]:
        """How many rows of each attempt are applied: all that fit and were not set apart."""
        by_handle = {receipt.handle: receipt for receipt in receipts}
        return {
            one.handle: by_handle[one.handle].rows
            - int(str(by_handle[one.handle].token.get("unfit", 0)))
            - one.rows_apart
            for one in taken
        }

    def _require_all_read(
        self,
        session: Session,
        epoch: EpochNumber,
        apply: Apply,
        expected: Mapping[Handle, int],
        written: int,
    ) -> None:
        """
        A table may write fewer rows than it was given, by key or by a trigger; staging may not hold
        others than its receipts count.
        """
        is_exact = not self.sink.write_mode.is_keyed or self.dialect.checks_keys_in_upsert
        is_known = self.staging.counts_rows_apart or not self.takes_rejects
        if not is_known or (is_exact and written == sum(expected.values())):
            return
        counts = session.query_all([apply.count(source) for source in apply.sources])
        found = dict(zip(expected, (int(count) for ((count,),) in counts), strict=True))
        lost = [handle for handle, rows in expected.items() if found[handle] != rows]
        if lost:
            raise self._lost(epoch, lost, len(expected), "somebody changed their rows")

    def committed_already(self, epoch: EpochNumber) -> Refused:
        """Why an epoch can't be rehearsed whose very receipts the ledger proves committed."""
        return Refused(
            f"epoch {epoch} is being written, and {self.sink.table} proves it committed already: "
            "the epoch log is older than the table",
            "the log or the checkpoint was restored from a backup: start with the newer one, or "
            "with a run= of its own",
        )

    def throw_away(self, verb: str, receipts: Sequence[Receipt]) -> None:
        """Remove what is still staged under these receipts."""
        handles = [receipt.handle for receipt in receipts]

        def remove(session: Session) -> bool:
            if self.dialect.ddl_commits:
                # A task that still writes to one makes this wait: not for long, it is retried.
                session.wait_for_locks(HOLDER_WAIT_S)
            self.staging.throw_away(session, handles)
            return True

        if not handles:
            return
        if self.dialect.ddl_commits:
            self._ask(verb, remove, missing=True)
        else:
            self._in_transaction(verb, remove, missing=True, lock_wait_s=HOLDER_WAIT_S)

    def clear_up(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        """
        After a COMMIT. A table that somebody reads, or a backup locks, is left: it is listed, and a
        later sweep removes it.
        """
        if self.dialect.ddl_commits:
            try:
                self.throw_away(f"clear up after epoch {epoch}", receipts)
            except TryAgain as error:
                logger.info("staging tables are removed later: %s", error)
        self.clear_staging(receipts)

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
        held = self.hold(session, epoch, _with_rows(receipts))
        search = RefusedRowSearch(session, self.read_apply(session, held), limit=limit)
        return search.unwritable() or search.run()

    def remove_apart(self) -> None:
        """Delete from staging, durably, the rows set apart. May be repeated, so a lost reply is."""
        removals = list(self.apart.removals())
        if not removals:
            return

        def remove(session: Session) -> None:
            self.hold(session, *self.apart.attempts)
            for table, places in removals:
                rows = session.execute(
                    f"DELETE FROM {self.dialect.quote(self.staging.schema, table)}"
                    f" WHERE {self.dialect.at_places(places)}"
                )
                self.staging.note_apart(session, table, rows)
            # Only now nobody can move rows to other places any more.
            held = self.hold(session, *self.apart.attempts)
            self.apart.require_in_place({one.table: one.file for one in held})

        try:
            self._in_transaction("set rejected rows apart", remove)
        except OutcomeUnknown as error:
            raise TryAgain(error.message, error.hint) from error
        self.apart.is_removed = True

    def note_unfit(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        """Read the rows that tasks could only stage as text; their receipts report how many."""
        unfit = [one for one in receipts if has_rows(one) and one.token.get("unfit", 1)]
        if self.takes_rejects and unfit:
            self.apart.note(
                self._in_transaction(
                    "read unfit rows", lambda session: self._unfit(session, epoch, unfit)
                )
            )

    def _unfit(
        self, session: Session, epoch: EpochNumber, receipts: Sequence[Receipt]
    ) -> list[Rejected]:
        row, why = map(self.dialect.quote, UNFIT)
        place, schema = self.dialect.place, self.staging.schema
        return [
            Rejected(
                table=held.table,
                file=held.file,
                place=str(at),
                part=held.handle.partition,
                row=text,
                sqlstate=_DATA_EXCEPTION,
                reason=reason,
            )
            for held in self.hold(session, epoch, _with_rows(receipts))
            for at, text, reason in session.query(
                f"SELECT {place}, {row}, {why} FROM {self.dialect.quote(schema, held.table)}"
                f" WHERE {row} IS NOT NULL ORDER BY {place} DESC"
            )
        ]


def _with_rows(receipts: Sequence[Receipt]) -> list[Handle]:
    return [receipt.handle for receipt in receipts if has_rows(receipt)]


class RefusedRowSearch:
    """
    The search, by halves, for staged rows that the table refuses, inside an open transaction.

    A statement over a million rows fails as a whole, and often without naming the row. So the
    staged rows are applied again in a transaction that is rolled back: a half that passes stays, a
    half that fails is rolled back to its savepoint and cut in two. One bad row costs as many
    attempts as its number has bits, and the time of a few passes over the rows:

      rows 0..7, 5 is bad:   0..7 fails   0..3 passes   4..7 fails   4..5 fails   4 passes   5 fails

    The code of an error rarely proves whose fault it is: a trigger raises what its author chose,
    and row-level security has the code of a missing privilege. So the statement itself is asked:

      it fails without any row, too   not a row's fault: the error is raised
      an error that only rows cause   the row's fault
      any other, and it passes with
      other rows of the epoch         the row's fault
      any other, and no row passes    nobody knows: nothing is found
    """

    def __init__(self, session: Session, apply: Apply, *, limit: int) -> None:
        self._session = session
        self._apply = apply
        self._dialect = apply.dialect
        self._limit = limit
        self._sure: list[Rejected] = []
        self._unsure: list[Rejected] = []
        """Refused with an error that something else than the row may cause."""
        self._has_passed = False
        self._statements = Apply.statements
        self.attempts = 0

    def unwritable(self) -> list[Rejected]:
        """The rows that the mode itself can't write, at most `limit` of them."""
        kinds = self._apply.unwritable()
        if not kinds or self._error_of(self._apply.reading_keys()) is not None:
            return []
        return [
            self._rejected(
                source.where(self._dialect.at_places([place])),
                place,
                one.sqlstate,
                f"its {one.because}",
            )
            for one in kinds
            for source in self._apply.sources
            for place in self._places(source.where(one.condition))
        ][: self._limit]

    def run(self) -> list[Rejected]:
        """The refused rows, at most `limit` of them."""
        apply = self._apply
        apply.clear(self._session)
        error = self._attempt(apply.sources[0].where("1 = 0"))
        if error is not None:
            raise error
        if apply.mode.order_by:
            # Rows that are not written can't be refused; but which row of a key wins is not known
            # before all keys can be read.
            superseded = [self._dialect.delete_superseded(apply, one) for one in apply.sources]
            if self._error_of(superseded) is not None:
                self._statements = Apply.reading_keys
        for source in apply.sources:
            rows = self._dialect.all_rows(self._session, source)
            if rows is not None:
                self._search(source, rows)
        found = [*self._sure, *self._unsure] if self._has_passed else self._sure
        return found[: self._limit]

    def _search(self, source: Source, rows: Rows) -> None:
        if self._is_enough():
            return
        part = source.where(rows.condition)
        error = self._attempt(part)
        if error is None:
            self._has_passed = self._has_passed or bool(self._places(part))
        elif rows.only is None:
            for half in rows.halves(self._session, part):
                self._search(source, half)
        else:
            sqlstate, reason = self._dialect.sqlstate(error), self._dialect.text_of(error)
            found = self._sure if self._dialect.is_data_error(error) else self._unsure
            found.append(self._rejected(part, rows.only, sqlstate, reason))

    def _is_enough(self) -> bool:
        found = len(self._sure) + len(self._unsure)
        is_clear = self._has_passed or not self._unsure
        return found >= self._limit + (0 if is_clear else _MORE_TRIED)

    def _places(self, source: Source) -> list[str]:
        """Of some of its rows, at most `limit` and at least one of them."""
        table = self._dialect.quote(source.schema, source.table)
        query = f"SELECT s.{self._dialect.place} FROM {table} s WHERE {source.condition}"
        rows = self._session.query(self._dialect.first(query, max(1, self._limit)))
        return [str(place) for (place,) in rows]

    def _attempt(self, source: Source) -> Exception | None:
        """Apply these rows. Rows that pass stay, so that rows that exclude each other are found."""
        self.attempts += 1
        return self._error_of(self._statements(replace(self._apply, sources=(source,))))

    def _error_of(self, statements: Sequence[str]) -> Exception | None:
        """Run these; where rows make one fail, nothing is done."""
        self._session.execute(f"SAVEPOINT {_SAVEPOINT}")
        try:
            for statement in statements:
                self._session.execute(statement)
            self._dialect.check_constraints(self._session)
        except self._dialect.errors as error:
            if not self._dialect.may_be_rows(error):
                raise
            self._session.execute(f"ROLLBACK TO SAVEPOINT {_SAVEPOINT}")
            return error
        self._dialect.release_savepoint(self._session, _SAVEPOINT)
        return None

    def _rejected(self, source: Source, place: str, sqlstate: str, reason: str) -> Rejected:
        return Rejected(
            table=source.table,
            file=source.file,
            place=place,
            part=source.part,
            row=self._dialect.row_text(self._session, source),
            sqlstate=sqlstate,
            reason=reason,
        )
