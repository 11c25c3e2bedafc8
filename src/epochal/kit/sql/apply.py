"""The statements that apply staged rows to the table. Every name is quoted; no row passes through.

A keyed epoch is first reduced to one row per key: the highest by `order_by`, and among equal rows
of one task the last to arrive. An epoch that does not determine that row is refused:

    key  order_by  task           result
    1    10        0
    1    12        3              this one is written
    2    10        0, twice       the later of the two is written
    2    10        0 and 1        refused: no order between tasks
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from epochal.errors import RowRejected
from epochal.kit.sql.client import Session
from epochal.kit.sql.dialect import Dialect
from epochal.kit.sql.modes import WriteMode
from epochal.terms import quantity

KEYS_NAMED_MAX = 5
_SAVEPOINT = "epochal_apply"


class NullKeys(Exception):
    """Rows of an epoch have no key."""

    def __init__(self, refusal: RowRejected) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A staging table, and the condition for the rows of it that are applied."""

    schema: str
    table: str
    part: int
    condition: str = "1 = 1"

    def where(self, condition: str) -> Source:
        """The same, limited to some of the rows, which the condition calls `s`."""
        return replace(self, condition=f"{self.condition} AND {condition}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapped:
    """One field that is written, and the column that takes it."""

    field: str
    column: str
    is_not_null: bool = False
    cast: tuple[str, str] = ("", "")
    """SQL before and after the staged value, where its type is not the column's."""
    key_cast: tuple[str, str] | None = None
    """The same for a key, which is compared before it is assigned; None: the same cast."""
    ordered_as: str = ""
    """The staging column that `order_by` compares, where it is not the field's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Apply:
    """Everything that is done with the rows of some staging tables."""

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
        values = ", ".join(self._value(one) for one in self.mapped)
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
        """What an upsert changes in an existing row."""
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
        """One row per key, where `order_by` determines which."""
        if not self.mode.order_by:
            return self._incoming()
        order = f"{self._order()}, part, came DESC"
        return self.dialect.first_per_key(self._incoming(), self._key_aliases(), order)

    def _order(self) -> str:
        return ", ".join(
            self.dialect.descending(f"o{number}") for number in range(len(self.mode.order_by))
        )

    def _incoming(self) -> str:
        """All rows of all sources, under short names."""
        condition = self.mode.delete_when
        copies = {one.field: one.ordered_as for one in self.mapped if one.ordered_as}
        is_delete = f"CASE WHEN ({condition}) THEN 1 ELSE 0 END" if condition else "0"
        wanted = [
            *(f"{self._value(one)} AS {self.alias(one)}" for one in self.mapped),
            *(
                f"s.{self.dialect.quote(copies.get(name, name))} AS o{number}"
                for number, name in enumerate(self.mode.order_by)
            ),
            f"{is_delete} AS is_delete",
            f"s.{self.dialect.place} AS came",
        ]
        return " UNION ALL ".join(
            f"SELECT {', '.join(wanted)}, {one.part} AS part"
            f" FROM {self.dialect.quote(one.schema, one.table)} s WHERE {one.condition}"
            for one in self.sources
        )

    def _value(self, one: Mapped) -> str:
        is_key = one.key_cast is not None and one.field in self.mode.keys
        before, after = one.key_cast if is_key and one.key_cast is not None else one.cast
        return f"{before}s.{self.dialect.quote(one.field)}{after}"

    def _key_aliases(self) -> str:
        return ", ".join(self.alias(key) for key in self.keys)

    # Running

    def run(self, session: Session, epoch: int, rows: int) -> None:
        """
        Put the rows into the table; `NullKeys` where some have no key, `RowRejected` where it is
        unclear which row of a key.
        """
        if not self.mode.is_keyed:
            self._execute(session)
            return
        self._require_known_keys(session, epoch)
        is_plain = self.mode.mode == "upsert" and self.mode.delete_when is None
        is_checked = is_plain and self.dialect.checks_keys_in_upsert
        if not self.mode.order_by and not is_checked:
            self._require_single_rows(session, epoch)
        written = self._upsert_checked(session, epoch) if is_checked else self._execute(session)
        is_single = is_checked and written == rows
        if self.mode.order_by and len(self.sources) > 1 and not is_single:
            self._require_no_ties(session, epoch)

    def _execute(self, session: Session) -> int:
        written = 0
        for statement in self.statements():
            written = session.execute(statement)
        return written

    def _upsert_checked(self, session: Session, epoch: int) -> int:
        session.execute(f"SAVEPOINT {_SAVEPOINT}")
        try:
            return self._execute(session)
        except self.dialect.errors as error:
            if self.dialect.is_repeated_key(error):
                session.execute(f"ROLLBACK TO SAVEPOINT {_SAVEPOINT}")
                self._require_single_rows(session, epoch)
            raise

    # Epochs that don't determine one row per key

    def _require_single_rows(self, session: Session, epoch: int) -> None:
        keys = self._key_aliases()
        repeated = self._some(
            session,
            f"SELECT {self._key_texts()}, COUNT(*) FROM ({self._incoming()}) r GROUP BY {keys}"
            " HAVING COUNT(*) > 1",
        )
        if repeated:
            raise RowRejected(
                f"epoch {epoch} has several rows of one key, and nothing determines which is last: "
                f"{repeated}",
                'order_by="updated_at" (or another column that grows), or one row per key in the '
                "query",
            )

    def _require_no_ties(self, session: Session, epoch: int) -> None:
        keys = self._key_aliases()
        tied = self._some(
            session,
            f"SELECT {self._key_texts()}, COUNT(*) FROM (SELECT {keys}, part, RANK() OVER"
            f" (PARTITION BY {keys} ORDER BY {self._order()}) place FROM ({self._incoming()}) r) q"
            f" WHERE place = 1 GROUP BY {keys} HAVING COUNT(DISTINCT part) > 1",
        )
        if tied:
            raise RowRejected(
                f"epoch {epoch} has rows of one key from several tasks that are equal by "
                f"{', '.join(self.mode.order_by)}: {tied}",
                "add a column that distinguishes them to order_by=, or repartition by the key: "
                "among rows of one task the last to arrive wins",
            )

    def _require_known_keys(self, session: Session, epoch: int) -> None:
        if not self.nullable_keys:
            return
        without = replace(self, sources=[one.where(self.is_keyless()) for one in self.sources])
        ((count,),) = session.query(f"SELECT COUNT(*) FROM ({without._incoming()}) r")
        if count:
            raise NullKeys(
                RowRejected(
                    f"epoch {epoch} has {quantity(int(count), 'row')} whose {self.why_keyless()}",
                    f'where="{self.nullable_keys[0].field} is not null", or NOT NULL on the column',
                )
            )

    def is_keyless(self) -> str:
        """The condition for staged rows, called `s`, whose key is null though the column may be."""
        return f"({' OR '.join(f'{self._value(key)} IS NULL' for key in self.nullable_keys)})"

    def why_keyless(self) -> str:
        fields = ", ".join(key.field for key in self.nullable_keys)
        return f"key ({fields}) is null: null matches no row, not even itself"

    def _key_texts(self) -> str:
        return ", ".join(self.dialect.as_text(self.alias(key)) for key in self.keys)

    def _some(self, session: Session, query: str) -> str:
        """A few of the keys that a query finds, for a message."""
        found = session.query(self.dialect.first(query, KEYS_NAMED_MAX))
        return "; ".join(
            ", ".join(f"{key.field}={value}" for key, value in zip(self.keys, row, strict=False))
            + f" ({row[-1]} rows)"
            for row in found
        )
