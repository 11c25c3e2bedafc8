"""Finding the rows that the server refuses, by halves.

A statement over a million rows fails as a whole and often without saying which row it was. So the
staged rows are applied again in a transaction that is thrown away: a half that passes stays, a half
that fails is taken back and cut in two. A bad row costs as many attempts as a number has bits, and
the time of a few passes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from epochal.errors import RowRejected
from epochal.kit.sql.apply import Apply, Source
from epochal.kit.sql.dialect import UNFIT, Session
from epochal.kit.sql.rejects import Rejected, row_text

_SAVEPOINT = "epochal_half"


class Search:
    """One search through the staging tables of an epoch, inside an open transaction."""

    def __init__(self, session: Session, apply: Apply, *, limit: int) -> None:
        self._session = session
        self._apply = apply
        self._dialect = apply.dialect
        self._limit = limit
        self.found: list[Rejected] = []
        self.attempts = 0

    def run(self) -> list[Rejected]:
        """The rejected rows, at most `limit` of them."""
        for source in self._apply.sources:
            ((first, last),) = self._session.query(
                f"SELECT MIN(s.{self._at}), MAX(s.{self._at}) FROM {self._table(source)} s"
                f" WHERE {source.condition}"
            )
            if first is not None:
                self._look(source, int(first), int(last))
        return self.found

    @property
    def _at(self) -> str:
        return self._dialect.quote(self._dialect.at)

    def _table(self, source: Source) -> str:
        return self._dialect.quote(source.schema, source.table)

    def _look(self, source: Source, first: int, last: int) -> None:
        if len(self.found) >= self._limit:
            return
        between = f"{source.condition} AND s.{self._at} BETWEEN {first} AND {last}"
        part = replace(source, condition=between)
        error = self._attempt(part)
        if error is None:
            return
        if first == last:
            self.found.append(self._rejected(part, first, error))
            return
        middle = (first + last) // 2
        self._look(source, first, middle)
        self._look(source, middle + 1, last)

    def _attempt(self, source: Source) -> Exception | None:
        """Apply these rows: what passes stays, so that rows that exclude each other are found."""
        self.attempts += 1
        self._session.execute(f"SAVEPOINT {_SAVEPOINT}")
        try:
            for statement in replace(self._apply, sources=(source,)).statements():
                self._session.execute(statement)
        except self._dialect.errors as error:
            if not self._dialect.is_data_error(error):
                raise
            self._session.execute(f"ROLLBACK TO SAVEPOINT {_SAVEPOINT}")
            return error
        return None

    def _rejected(self, source: Source, at: int, error: Exception) -> Rejected:
        names = self._dialect.columns(self._session, source.schema, source.table)
        rows = self._session.query(
            f"SELECT s.* FROM {self._table(source)} s WHERE {source.condition}"
        )
        values: dict[str, Any] = dict(zip(names, rows[0], strict=False)) if rows else {}
        ours = {self._dialect.at, *UNFIT}
        return Rejected(
            table=source.table,
            at=str(at),
            part=source.part,
            row=row_text({name: value for name, value in values.items() if name not in ours}),
            sqlstate=self._dialect.sqlstate(error),
            reason=self._dialect.told(error),
        )


def refusal(
    table: object, epoch: int, rejected: list[Rejected], told: str, *, may_leave: bool
) -> RowRejected:
    """What is told of rows that the table will never take as they are."""
    if not rejected:
        return RowRejected(
            f"epoch {epoch}: {table} refuses rows: {told}",
            "no single row is refused alone: rows of this epoch exclude each other",
        )
    return RowRejected(
        f"epoch {epoch}: {table} refuses {'; '.join(map(str, rejected))}",
        "mend the row in the query or with where="
        + (", or send such rows elsewhere: on_reject=<sink>" if may_leave else ""),
    )
