"""The statements that apply staged rows to the table. Every name is quoted; no row passes through.

A keyed epoch is first brought down to one row a key: the highest by `order_by`, and among equals of
one task the one that came last. Staging columns have the type of the columns that they are meant
for, so keys are compared as the table compares them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from epochal.kit.sql.ambiguous import equal_rows, null_keys, several_rows
from epochal.kit.sql.dialect import Dialect, Session
from epochal.kit.sql.modes import WriteMode

NAMED_MAX = 5
"""How many keys an error names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A staging table, and which of its rows are meant."""

    schema: str
    table: str
    part: int
    condition: str = "1 = 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapped:
    field: str
    column: str
    is_not_null: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Apply:
    """Everything that is to be done with the rows of some staging tables."""

    dialect: Dialect
    mode: WriteMode
    target: str
    """The table, quoted."""
    mapped: Sequence[Mapped]
    sources: Sequence[Source]

    def statements(self) -> list[str]:
        """In their order; afterwards the table holds the epoch."""
        if not self.mode.is_keyed:
            return [self._append(source) for source in self.sources]
        if self.mode.mode == "replace":
            return [self.dialect.delete(self, marked_only=False), self.insert()]
        if self.mode.delete_when is not None:
            return [self.dialect.delete(self, marked_only=True), self.dialect.upsert(self)]
        return [self.dialect.upsert(self)]

    def _append(self, source: Source) -> str:
        values = ", ".join(self._staged(one.field) for one in self.mapped)
        return (
            f"INSERT INTO {self.target} ({self.columns()}) SELECT {values}"
            f" FROM {self.dialect.quote(source.schema, source.table)} s WHERE {source.condition}"
        )

    # By key

    @property
    def keys(self) -> list[Mapped]:
        return [one for key in self.mode.keys for one in self.mapped if one.field == key]

    @property
    def values(self) -> list[Mapped]:
        """What an upsert changes in a row that is there already."""
        return [one for one in self.mapped if one.field not in self.mode.keys]

    @property
    def nullable_keys(self) -> list[Mapped]:
        return [key for key in self.keys if not key.is_not_null]

    def columns(self) -> str:
        return ", ".join(self.dialect.quote(one.column) for one in self.mapped)

    def alias(self, one: Mapped) -> str:
        return f"c{list(self.mapped).index(one)}"

    def insert(self) -> str:
        values = ", ".join(f"i.{self.alias(one)}" for one in self.mapped)
        return (
            f"INSERT INTO {self.target} ({self.columns()}) SELECT {values}"
            f" FROM ({self.winners()}) i WHERE i.is_delete = 0"
        )

    def matches(self, left: str, right: str) -> str:
        return " AND ".join(
            f"{left}.{self.dialect.quote(key.column)} = {right}.{self.alias(key)}"
            for key in self.keys
        )

    def winners(self) -> str:
        """One row a key, where `order_by` says which."""
        if not self.mode.order_by:
            return self._incoming()
        return (
            f"SELECT w.* FROM (SELECT r.*, ROW_NUMBER() OVER (PARTITION BY {self._key_aliases()}"
            f" ORDER BY {self._order()}, part, came DESC) place FROM ({self._incoming()}) r) w"
            " WHERE w.place = 1"
        )

    def _order(self) -> str:
        return ", ".join(
            self.dialect.descending(f"o{place}") for place in range(len(self.mode.order_by))
        )

    def _incoming(self) -> str:
        """All rows of all sources, under short names."""
        condition = self.mode.delete_when
        is_delete = f"CASE WHEN ({condition}) THEN 1 ELSE 0 END" if condition else "0"
        wanted = [
            *(f"{self._staged(one.field)} {self.alias(one)}" for one in self.mapped),
            *(f"{self._staged(name)} o{place}" for place, name in enumerate(self.mode.order_by)),
            f"{is_delete} is_delete",
            f"s.{self.dialect.quote(self.dialect.at)} came",
        ]
        return " UNION ALL ".join(
            f"SELECT {', '.join(wanted)}, {one.part} part"
            f" FROM {self.dialect.quote(one.schema, one.table)} s WHERE {one.condition}"
            for one in self.sources
        )

    def _staged(self, field: str) -> str:
        return f"s.{self.dialect.quote(field)}"

    def _key_aliases(self) -> str:
        return ", ".join(self.alias(key) for key in self.keys)

    # What makes an epoch ambiguous

    def run(self, session: Session, epoch: int) -> None:
        """Put the rows into the table, or say what makes the epoch ambiguous."""
        if self.mode.is_keyed:
            self._require_known_keys(session, epoch)
            if not self.mode.order_by:
                self._require_single_rows(session, epoch)
            elif len(self.sources) > 1:
                self._require_no_ties(session, epoch)
        for statement in self.statements():
            session.execute(statement)

    def _require_single_rows(self, session: Session, epoch: int) -> None:
        keys = self._key_aliases()
        repeated = self._some(
            session,
            f"SELECT {keys}, COUNT(*) FROM ({self._incoming()}) r GROUP BY {keys}"
            " HAVING COUNT(*) > 1",
        )
        if repeated:
            raise several_rows(epoch, self._named(repeated))

    def _require_no_ties(self, session: Session, epoch: int) -> None:
        keys = self._key_aliases()
        tied = self._some(
            session,
            f"SELECT {keys}, COUNT(*) FROM (SELECT {keys}, part, RANK() OVER (PARTITION BY {keys}"
            f" ORDER BY {self._order()}) place FROM ({self._incoming()}) r) q WHERE place = 1"
            f" GROUP BY {keys} HAVING COUNT(DISTINCT part) > 1",
        )
        if tied:
            raise equal_rows(epoch, self.mode.order_by, self._named(tied))

    def _require_known_keys(self, session: Session, epoch: int) -> None:
        unsure = self.nullable_keys
        if not unsure:
            return
        unknown = " OR ".join(f"{self.alias(key)} IS NULL" for key in unsure)
        ((count,),) = session.query(f"SELECT COUNT(*) FROM ({self._incoming()}) r WHERE {unknown}")
        if count:
            raise null_keys(epoch, int(count), [key.field for key in unsure])

    def _some(self, session: Session, query: str) -> list[tuple[object, ...]]:
        return session.query(self.dialect.first(query, NAMED_MAX))

    def _named(self, found: Sequence[Sequence[object]]) -> str:
        return "; ".join(
            ", ".join(f"{key.field}={value}" for key, value in zip(self.keys, row, strict=False))
            + f" ({row[-1]} rows)"
            for row in found
        )
