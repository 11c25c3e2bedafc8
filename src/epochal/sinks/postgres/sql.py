"""The statements that apply staged rows to the table. Every name is quoted; no row passes through.

A keyed epoch is first brought down to one row a key: the highest by `order_by`, and among equals of
one task the one that came last. Keys are compared as the column's own type compares them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from psycopg import sql

from epochal.kit.sql.modes import WriteMode
from epochal.sinks.postgres.catalog import Table
from epochal.sinks.postgres.plan import Mapped, Plan

NAMED_MAX = 5
"""How many keys an error names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A staging table, and which of its rows are meant."""

    schema: str
    table: str
    part: int
    condition: sql.Composable = field(default_factory=lambda: sql.SQL("true"))

    @property
    def identifier(self) -> sql.Identifier:
        return sql.Identifier(self.schema, self.table)


@dataclass(frozen=True, slots=True, kw_only=True)
class Apply:
    """Everything that is to be done with the rows of some staging tables."""

    plan: Plan
    mode: WriteMode
    table: Table
    sources: Sequence[Source]

    # Appending

    def statements(self) -> list[sql.Composed]:
        """In their order; afterwards the table holds the epoch."""
        if not self.mode.is_keyed:
            return [self._append(source) for source in self.sources]
        if self.mode.mode == "replace":
            return [self._delete(marked_only=False), self._insert()]
        if self.mode.delete_when is not None:
            return [self._delete(marked_only=True), self._upsert()]
        return [self._upsert()]

    def _append(self, source: Source) -> sql.Composed:
        return sql.SQL("INSERT INTO {} ({}) SELECT {} FROM {} s WHERE {}").format(
            self.table.identifier,
            _list(_column(one) for one in self.plan.mapped),
            _list(_value(one) for one in self.plan.mapped),
            source.identifier,
            source.condition,
        )

    # By key

    def _insert(self) -> sql.Composed:
        return sql.SQL("INSERT INTO {} ({}) SELECT {} FROM ({}) i WHERE NOT i.is_delete").format(
            self.table.identifier,
            _list(_column(one) for one in self.plan.mapped),
            _list(_alias(place) for place in range(len(self.plan.mapped))),
            self._winners(),
        )

    def _upsert(self) -> sql.Composed:
        keys = _list(_column(one) for one in self.plan.keys)
        changes = [sql.SQL("{0} = excluded.{0}").format(_column(one)) for one in self.plan.values]
        action = sql.SQL("UPDATE SET {}").format(_list(changes)) if changes else sql.SQL("NOTHING")
        return sql.SQL("{} ON CONFLICT ({}) DO {}").format(self._insert(), keys, action)

    def _delete(self, *, marked_only: bool) -> sql.Composed:
        matches = sql.SQL(" AND ").join(
            sql.SQL("t.{} = i.{}").format(_column(key), self._alias_of(key))
            for key in self.plan.keys
        )
        return sql.SQL("DELETE FROM {} t USING ({}) i WHERE {}{}").format(
            self.table.identifier,
            self._winners(),
            matches,
            sql.SQL(" AND i.is_delete" if marked_only else ""),
        )

    def _winners(self) -> sql.Composed:
        """One row a key, where `order_by` says which."""
        if not self.mode.order_by:
            return self._incoming()
        keys = self._key_aliases()
        return sql.SQL(
            "SELECT DISTINCT ON ({0}) * FROM ({1}) r ORDER BY {0}, {2}, part, at DESC"
        ).format(keys, self._incoming(), self._order())

    def _order(self) -> sql.Composed:
        count = len(self.mode.order_by)
        return _list(sql.SQL("{} DESC NULLS LAST").format(_order_alias(n)) for n in range(count))

    def _incoming(self) -> sql.Composed:
        """All rows of all sources, mapped columns cast and under short names."""
        is_delete = sql.SQL(
            f"COALESCE(({self.mode.delete_when}), false)" if self.mode.delete_when else "false"
        )
        wanted = [
            *(
                sql.SQL("{} AS {}").format(_value(one, is_key=one in self.plan.keys), _alias(place))
                for place, one in enumerate(self.plan.mapped)
            ),
            *(
                sql.SQL("s.{} AS {}").format(sql.Identifier(name), _order_alias(place))
                for place, name in enumerate(self.mode.order_by)
            ),
            sql.SQL("{} AS is_delete").format(is_delete),
            sql.SQL("s.ctid AS at"),
        ]
        return sql.SQL(" UNION ALL ").join(
            sql.SQL("SELECT {}, {} AS part FROM {} s WHERE {}").format(
                _list(wanted), sql.Literal(one.part), one.identifier, one.condition
            )
            for one in self.sources
        )

    # What makes an epoch ambiguous

    def repeated_keys(self) -> sql.Composed:
        """Keys with several rows, as text, where nothing says which one wins."""
        return sql.SQL(
            "SELECT {}, count(*) FROM ({}) r GROUP BY {} HAVING count(*) > 1 LIMIT {}"
        ).format(self._key_text(), self._incoming(), self._key_aliases(), sql.Literal(NAMED_MAX))

    def tied_keys(self) -> sql.Composed:
        """Keys whose highest rows by `order_by` came from several tasks: none is the last."""
        return sql.SQL(
            "SELECT {0}, count(*) FROM (SELECT {1}, part, rank() OVER"
            " (PARTITION BY {1} ORDER BY {2}) AS place FROM ({3}) r) q WHERE place = 1 GROUP BY {1}"
            " HAVING count(DISTINCT part) > 1 LIMIT {4}"
        ).format(
            self._key_text(),
            self._key_aliases(),
            self._order(),
            self._incoming(),
            sql.Literal(NAMED_MAX),
        )

    def null_keys(self) -> sql.Composed:
        """How many rows have a key that is unknown."""
        unknown = sql.SQL(" OR ").join(
            sql.SQL("{} IS NULL").format(self._alias_of(key)) for key in self.plan.nullable_keys
        )
        return sql.SQL("SELECT count(*) FROM ({}) r WHERE {}").format(self._incoming(), unknown)

    def _alias_of(self, one: Mapped) -> sql.SQL:
        return _alias(self.plan.mapped.index(one))

    def _key_aliases(self) -> sql.Composed:
        return _list(self._alias_of(key) for key in self.plan.keys)

    def _key_text(self) -> sql.Composed:
        parts = [
            sql.SQL("{} || COALESCE({}::text, 'null')").format(
                sql.Literal(f"{key.field}="), self._alias_of(key)
            )
            for key in self.plan.keys
        ]
        return sql.SQL("concat_ws(', ', {})").format(_list(parts))


def _list(parts: Iterable[sql.Composable]) -> sql.Composed:
    return sql.SQL(", ").join(parts)


def _column(one: Mapped) -> sql.Identifier:
    return sql.Identifier(one.column.name)


def _value(one: Mapped, *, is_key: bool = False) -> sql.Composed:
    # A key is compared before it is assigned: as the column's own type, where that differs.
    after = (
        f"::{one.column.type.written}" if is_key and _compares_otherwise(one) else one.cast.after
    )
    return sql.SQL("{}s.{}{}").format(
        sql.SQL(one.cast.before), sql.Identifier(one.field), sql.SQL(after)
    )


def _compares_otherwise(one: Mapped) -> bool:
    return one.column.type.base == "citext"


def _alias(place: int) -> sql.SQL:
    return sql.SQL(f"c{place}")


def _order_alias(place: int) -> sql.SQL:
    return sql.SQL(f"o{place}")
