"""The search, by halves, for staged rows that the table refuses.

A statement over a million rows fails as a whole, and often without naming the row. So the staged
rows are applied again in a transaction that is rolled back: a half that passes stays, a half that
fails is rolled back to its savepoint and cut in two. One bad row costs as many attempts as its
number has bits, and the time of a few passes over the rows:

    rows 0..7, 5 is bad:   0..7 fails   0..3 passes   4..7 fails   4..5 fails   4 passes   5 fails
"""

from __future__ import annotations

from dataclasses import replace

from epochal.kit.sql.apply import Apply, Source
from epochal.kit.sql.client import Session
from epochal.kit.sql.rejects import Rejected, Rows

_SAVEPOINT = "epochal_half"


class RefusedRowSearch:
    """One search through the staging tables of an epoch, inside an open transaction."""

    def __init__(self, session: Session, apply: Apply, *, limit: int) -> None:
        self._session = session
        self._apply = apply
        self._dialect = apply.dialect
        self._limit = limit
        self.found: list[Rejected] = []
        self.attempts = 0

    def run(self) -> list[Rejected]:
        """The refused rows, at most `limit` of them."""
        for source in self._apply.sources:
            rows = self._dialect.all_rows(self._session, source)
            if rows is not None:
                self._search(source, rows)
        return self.found

    def _search(self, source: Source, rows: Rows) -> None:
        if len(self.found) >= self._limit:
            return
        part = replace(source, condition=f"{source.condition} AND {rows.condition}")
        error = self._attempt(part)
        if error is None:
            return
        if rows.only is not None:
            self.found.append(self._rejected(part, rows.only, error))
            return
        for half in rows.halves(self._session, part):
            self._search(source, half)

    def _attempt(self, source: Source) -> Exception | None:
        """Apply these rows. Rows that pass stay, so that rows that exclude each other are found."""
        self.attempts += 1
        self._session.execute(f"SAVEPOINT {_SAVEPOINT}")
        try:
            for statement in replace(self._apply, sources=(source,)).statements():
                self._session.execute(statement)
            self._dialect.check_constraints(self._session)
        except self._dialect.errors as error:
            if not self._dialect.is_data_error(error):
                raise
            self._session.execute(f"ROLLBACK TO SAVEPOINT {_SAVEPOINT}")
            return error
        self._dialect.release_savepoint(self._session, _SAVEPOINT)
        return None

    def _rejected(self, source: Source, place: str, error: Exception) -> Rejected:
        return Rejected(
            table=source.table,
            place=place,
            part=source.part,
            row=self._dialect.row_text(self._session, source),
            sqlstate=self._dialect.sqlstate(error),
            reason=self._dialect.text_of(error),
        )
