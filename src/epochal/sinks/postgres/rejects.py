"""Finding the rows that the server refuses, by halves.

A statement over a million rows fails as a whole and often without saying which row it was. So the
staged rows are applied again in a transaction that is thrown away: a half that passes stays, a half
that fails is rolled back to its savepoint and cut in two, first by the table's blocks, then by
rows. A bad row costs as many subtransactions as a number has bits, and the time of a few passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psycopg
from psycopg import sql

from epochal.errors import RowRejected
from epochal.kit.sql.rejects import Rejected
from epochal.sinks.postgres.sorting import is_data_error, sqlstate_of, told
from epochal.sinks.postgres.sql import Apply, Source


@dataclass(frozen=True, slots=True)
class _Blocks:
    first: int
    end: int

    @property
    def condition(self) -> sql.Composed:
        return sql.SQL("s.ctid >= {}::tid AND s.ctid < {}::tid").format(
            sql.Literal(f"({self.first},0)"), sql.Literal(f"({self.end},0)")
        )

    def halves(
        self, connection: psycopg.Connection[Any], source: Source
    ) -> Sequence[_Blocks | _Rows]:
        if self.end - self.first > 1:
            middle = (self.first + self.end) // 2
            return _Blocks(self.first, middle), _Blocks(middle, self.end)
        places = connection.execute(
            sql.SQL("SELECT s.ctid::text FROM {} s WHERE {}").format(
                source.identifier, self.condition
            )
        ).fetchall()
        return (_Rows(tuple(place for (place,) in places)),) if places else ()


@dataclass(frozen=True, slots=True)
class _Rows:
    places: tuple[str, ...]

    @property
    def condition(self) -> sql.Composed:
        return sql.SQL("s.ctid = ANY ({}::tid[])").format(sql.Literal(list(self.places)))

    def halves(self, *_: object) -> Sequence[_Rows]:
        middle = len(self.places) // 2
        return _Rows(self.places[:middle]), _Rows(self.places[middle:])


class Search:
    """One search through the staging tables of an epoch, inside an open transaction."""

    def __init__(
        self,
        connection: psycopg.Connection[Any],
        apply: Apply,
        *,
        limit: int,
        check_now: Callable[[], object],
    ) -> None:
        self._connection = connection
        self._apply = apply
        self._limit = limit
        self._check_now = check_now
        self.found: list[Rejected] = []
        self.subtransactions = 0

    def run(self) -> list[Rejected]:
        """The rejected rows, at most `limit` of them."""
        for source in self._apply.sources:
            self._look(source, _Blocks(0, max(1, self._blocks(source))))
        return self.found

    def _blocks(self, source: Source) -> int:
        row = self._connection.execute(
            sql.SQL(
                "SELECT pg_relation_size({}::regclass) / current_setting('block_size')::int"
            ).format(sql.Literal(source.identifier.as_string(None)))
        ).fetchone()
        return int(row[0]) if row else 0

    def _look(self, source: Source, part: _Blocks | _Rows) -> None:
        if len(self.found) >= self._limit:
            return
        error = self._attempt(replace(source, condition=part.condition))
        if error is None:
            return
        if isinstance(part, _Rows) and len(part.places) == 1:
            self.found.append(self._rejected(source, part.places[0], error))
            return
        for half in part.halves(self._connection, source):
            self._look(source, half)

    def _attempt(self, source: Source) -> psycopg.Error | None:
        """Apply these rows: what passes stays, so that rows that exclude each other are found."""
        self.subtransactions += 1
        self._connection.execute("SAVEPOINT epochal_half")
        try:
            for statement in replace(self._apply, sources=(source,)).statements():
                self._connection.execute(statement)
            self._check_now()
        except psycopg.Error as error:
            if not is_data_error(error):
                raise
            self._connection.execute("ROLLBACK TO SAVEPOINT epochal_half")
            return error
        self._connection.execute("RELEASE SAVEPOINT epochal_half")
        return None

    def _rejected(self, source: Source, place: str, error: psycopg.Error) -> Rejected:
        row = self._connection.execute(
            sql.SQL("SELECT row_to_json(s)::text FROM {} s WHERE s.ctid = {}::tid").format(
                source.identifier, sql.Literal(place)
            )
        ).fetchone()
        return Rejected(
            table=source.table,
            at=place,
            part=source.part,
            row=row[0] if row else "",
            sqlstate=sqlstate_of(error) or "",
            reason=told(error),
        )


def removal(schema: str, table: str, places: Sequence[str]) -> sql.Composed:
    """Take these rows out of a staging table."""
    return sql.SQL("DELETE FROM {} s WHERE {}").format(
        sql.Identifier(schema, table), _Rows(tuple(places)).condition
    )


def refusal(
    table: object, epoch: int, rejected: Sequence[Rejected], error: Exception
) -> RowRejected:
    """What is told of rows that the table will never take as they are."""
    if not rejected:
        return RowRejected(
            f"epoch {epoch}: {table} refuses rows: {told(error)} [{sqlstate_of(error)}]",
            "no single row is refused alone: rows of this epoch exclude each other",
        )
    return RowRejected(
        f"epoch {epoch}: {table} refuses {'; '.join(map(str, rejected))} [{rejected[0].sqlstate}]",
        "mend the row in the query or with where=, or send such rows elsewhere: on_reject=<sink>",
    )
