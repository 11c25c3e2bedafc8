"""The statements that apply staged rows to the table. Every name is quoted; no row passes through.

A keyed epoch is first reduced to one row per key: the highest by `order_by`, and among equal rows
of one task the last to arrive. An epoch that does not determine that row is refused:

    key  order_by  task           result
    1    10        0
    1    12        3              this one is written
    2    10        0, twice       the later of the two is written
    2    10        0 and 1        refused: no order between tasks

With `newer`, that row then changes or deletes the table's only where it is higher; a null is lower
than everything. What the database compares is the value as its column keeps it.
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
_NULL_VALUE = "23502"
_NO_ROW = "02000"


def is_newer(there: str, come: str) -> str:
    """A null is older than everything."""
    return f"({come} > {there} OR ({there} IS NULL AND {come} IS NOT NULL))"


class UnwritableRows(Exception):
    """An epoch has rows that this mode can't write, whatever the table says."""

    def __init__(self, refusal: RowRejected) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class Unwritable:
    """A kind of such rows."""

    condition: str
    """Finds them among staged rows, called `s`."""
    sqlstate: str
    because: str
    """What is said of a row: `its key …`."""
    hint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A staging table, and the condition for the rows of it that are applied."""

    schema: str
    table: str
    part: int
    condition: str = "1 = 1"
    file: int = 0
    """See `Held.file`."""

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
    arrived: str
    """The expression for a staged row's place in the order of arrival."""

    def statements(self) -> list[str]:
        """In their order; afterwards the table holds the epoch."""
        if not self.mode.is_keyed:
            return [self._append(source) for source in self.sources]
        if self.mode.mode == "replace":
            return [self.dialect.delete(self, "1 = 1"), self.insert()]
        return [*self._deletes(), *self._writes()]

    def _deletes(self) -> list[str]:
        mode, dialect = self.mode, self.dialect
        if mode.delete_when is None:
            return []
        is_delete = " AND ".join(["i.is_delete = 1", *self.newer_condition()])
        buried = [dialect.bury(self)] if mode.tombstones is not None else []
        if not mode.delete_as:
            return [*buried, dialect.delete(self._with_every_delete(), is_delete)]
        marks = [f"{dialect.quote(column)} = {made}" for column, made in mode.delete_as.items()]
        version = [self.assignment(one) for one in self.newest]
        return [*buried, dialect.update(self, [*marks, *version], is_delete)]

    def _with_every_delete(self) -> Apply:
        """
        A key that is deleted and comes again in one epoch is a new row: columns that no field fills
        get their defaults. So deletes that do not win count, too. With `newer`, the winner decides.
        """
        if self.mode.newer is not None:
            return self
        return replace(self, mode=replace(self.mode, order_by=()))

    def _writes(self) -> list[str]:
        mode, dialect = self.mode, self.dialect
        if mode.mode != "update":
            unearthed = [dialect.unearth(self)] if mode.tombstones is not None else []
            return [dialect.upsert(self), *unearthed]
        changes = [*map(self.assignment, self.values), *self.live_marks()]
        unchanged = [self.dialect.differs(self, "i")] if mode.skip_unchanged else []
        which = " AND ".join(["i.is_delete = 0", *self.newer_condition(), *unchanged])
        return [dialect.update(self, changes, which)] if changes else []

    def clear(self, session: Session) -> None:
        for statement in self.clearing():
            session.execute(statement)

    def clearing(self) -> list[str]:
        """What empties the table, where the epoch is all that it is to hold."""
        if self.mode.mode != "complete":
            return []
        verb = "TRUNCATE" if self.mode.is_truncating else "DELETE FROM"
        return [f"{verb} {self.target}"]

    def reading_keys(self) -> list[str]:
        """A statement that fails where a key is not one of its column's type."""
        keys = f"SELECT 1 FROM ({self._incoming()}) r GROUP BY {self._key_aliases()}"
        return [f"SELECT COUNT(*) FROM ({keys}) q"]

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
    def newest(self) -> list[Mapped]:
        """The field of `newer`, if there is one."""
        return [one for one in self.mapped if one.field == self.mode.newer]

    @property
    def nullable_keys(self) -> list[Mapped]:
        """Keys whose nulls no column refuses: one that is NOT NULL refuses no delete."""
        has_deletes = self.mode.delete_when is not None
        return [key for key in self.keys if has_deletes or not key.is_not_null]

    def columns(self) -> str:
        return ", ".join(self.dialect.quote(one.column) for one in self.mapped)

    def alias(self, one: Mapped) -> str:
        return f"c{list(self.mapped).index(one)}"

    def insert(self) -> str:
        values = ", ".join(f"i.{self.alias(one)}" for one in self.mapped)
        return (
            f"INSERT INTO {self.target}{self.dialect.insert_alias} ({self.columns()})"
            f" SELECT {values} FROM ({self.winners()}) i WHERE {self.written()}"
            f"{self._in_key_order()}"
        )

    def _in_key_order(self) -> str:
        """
        Writers that lock rows in one order don't deadlock, and pages of the index are met once.
        Keys without a unique index (`replace`) may have no order.
        """
        if self.mode.mode == "replace":
            return ""
        return f" ORDER BY {', '.join(f'i.{self.alias(key)}' for key in self.keys)}"

    def assignment(self, one: Mapped) -> str:
        return f"{self.dialect.quote(one.column)} = i.{self.alias(one)}"

    def live_marks(self) -> list[str]:
        """A row that is written is not deleted: its marks are what the table's defaults say."""
        return [
            f"{name} = {self.dialect.default(name)}"
            for name in map(self.dialect.quote, self.mode.delete_as)
        ]

    def newer_condition(self, there: str = "t", come: str = "") -> list[str]:
        """Whether a row is newer than the table's; nothing where that is not asked."""
        return [
            is_newer(
                f"{there}.{self.dialect.quote(one.column)}",
                f"{come}.{self.dialect.quote(one.column)}" if come else f"i.{self.alias(one)}",
            )
            for one in self.newest
        ]

    def written(self) -> str:
        """The condition for winners that are no deletes, and that no tombstone keeps out."""
        if self.mode.tombstones is None:
            return "i.is_delete = 0"
        (version,) = self.newest
        at, column = f"i.{self.alias(version)}", f"x.{self.dialect.quote(version.column)}"
        return (
            f"i.is_delete = 0 AND NOT EXISTS (SELECT 1 FROM {self.tombstones} x"
            f" WHERE {self.matches('x', 'i')} AND ({column} >= {at} OR {at} IS NULL))"
        )

    @property
    def tombstones(self) -> str:
        named = self.mode.tombstones
        return self.dialect.quote(*named.parts) if named is not None else ""

    def buried(self) -> tuple[str, str]:
        """The columns of a tombstone, and the deletes that are to leave one."""
        kept = [*self.keys, *self.newest]
        values = ", ".join(f"i.{self.alias(one)}" for one in kept)
        at, column = f"i.{self.alias(self.newest[0])}", self.dialect.quote(self.newest[0].column)
        return (
            ", ".join(self.dialect.quote(one.column) for one in kept),
            f"SELECT {values} FROM ({self.winners()}) i WHERE i.is_delete = 1 AND {at} IS NOT NULL"
            f" AND NOT EXISTS (SELECT 1 FROM {self.target} t WHERE {self.matches('t', 'i')}"
            f" AND t.{column} >= {at})",
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
        came = "came" if self.mode.mode == "insert_new" else "came DESC"
        order = f"{self._order()}, part, {came}"
        return self.dialect.first_per_key(self._incoming(), self._key_aliases(), order)

    def _order(self) -> str:
        """The winner first: the highest, or where the first one stays the lowest."""
        is_first = self.mode.mode == "insert_new"
        put = self.dialect.ascending if is_first else self.dialect.descending
        return ", ".join(put(f"o{number}") for number in range(len(self.mode.order_by)))

    def _incoming(self) -> str:
        """All rows of all sources, under short names."""
        copies = {one.field: one.ordered_as for one in self.mapped if one.ordered_as}
        wanted = [
            *(f"{self._value(one)} AS {self.alias(one)}" for one in self.mapped),
            *(
                f"s.{self.dialect.quote(copies.get(name, name))} AS o{number}"
                for number, name in enumerate(self.mode.order_by)
            ),
            f"{self._is_delete()} AS is_delete",
            f"s.{self.arrived} AS came",
        ]
        return " UNION ALL ".join(
            f"SELECT {', '.join(wanted)}, {one.part} AS part"
            f" FROM {self.dialect.quote(one.schema, one.table)} s WHERE {one.condition}"
            for one in self.sources
        )

    def _is_delete(self) -> str:
        condition = self.mode.delete_when
        return f"CASE WHEN ({condition}) THEN 1 ELSE 0 END" if condition else "0"

    def _value(self, one: Mapped) -> str:
        is_compared = self.mode.skip_unchanged or one.field in {*self.mode.keys, self.mode.newer}
        before, after = one.key_cast if is_compared and one.key_cast is not None else one.cast
        return f"{before}s.{self.dialect.quote(one.field)}{after}"

    def _key_aliases(self) -> str:
        return ", ".join(self.alias(key) for key in self.keys)

    # Running

    def run(self, session: Session, epoch: int, rows: int) -> int:
        """
        Put the rows into the table, and return how many the last statement wrote or changed.
        `UnwritableRows` where this mode can't write some, `RowRejected` where it is unclear which
        row of a key.
        """
        if not self.mode.is_keyed:
            self.clear(session)
            return self.rows_written(session.execute_all(self.statements()))
        self._require_writable(session, epoch)
        is_checked = self._is_checked
        if not self.mode.order_by and not is_checked:
            self._require_single_rows(session, epoch)
        written = self._upsert_checked(session, epoch) if is_checked else self._execute(session)
        self.require_no_ties(session, epoch, written, rows)
        return written

    @property
    def _is_checked(self) -> bool:
        """Whether the server finds repeated keys; rows that are not written would not be found."""
        is_plain = self.mode.mode == "upsert" and not self.mode.skip_unchanged
        return is_plain and self.mode.delete_when is None and self.dialect.checks_keys_in_upsert

    def probes(self) -> list[str]:
        """Queries that find a row where `run` would refuse the epoch before it writes."""
        if not self.mode.is_keyed:
            return []
        unwritable = [
            f"SELECT 1 FROM ({without._incoming()}) r"
            for without in map(self._only, self.unwritable())
        ]
        repeated = [] if self.mode.order_by or self._is_checked else [self._repeated()]
        return [self.dialect.first(query, 1) for query in (*unwritable, *repeated)]

    def rows_written(self, counts: Sequence[int]) -> int:
        """How many rows the statements wrote or changed, by their answers: those of the last."""
        return counts[-1] if self.mode.is_keyed and counts else sum(counts)

    def count(self, source: Source) -> str:
        """A query for the number of rows of a source that are applied."""
        table = self.dialect.quote(source.schema, source.table)
        return f"SELECT COUNT(*) FROM {table} s WHERE {source.condition}"

    def _execute(self, session: Session) -> int:
        return self.rows_written(session.execute_all(self.statements()))

    def _upsert_checked(self, session: Session, epoch: int) -> int:
        session.defer(f"SAVEPOINT {_SAVEPOINT}")
        try:
            return self._execute(session)
        except self.dialect.errors as error:
            if self.dialect.is_repeated_key(error):
                session.execute(f"ROLLBACK TO SAVEPOINT {_SAVEPOINT}")
                self._require_single_rows(session, epoch)
            raise

    # Epochs that don't determine one row per key

    def _repeated(self) -> str:
        """Keys that come more than once."""
        return (
            f"SELECT {self._key_texts()}, COUNT(*) FROM ({self._incoming()}) r"
            f" GROUP BY {self._key_aliases()} HAVING COUNT(*) > 1"
        )

    def _require_single_rows(self, session: Session, epoch: int) -> None:
        repeated = self._some(session, self._repeated())
        if repeated:
            raise RowRejected(
                f"epoch {epoch} has several rows of one key, and nothing determines which is last: "
                f"{repeated}",
                'order_by="updated_at" (or another column that grows), or one row per key in the '
                "query",
            )

    def require_no_ties(self, session: Session, epoch: int, written: int, rows: int) -> None:
        """Asked after the rows were written: where each had a key of its own, there is none."""
        is_single = self._is_checked and written == rows
        if not self.mode.order_by or len(self.sources) == 1 or is_single:
            return
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

    def _require_writable(self, session: Session, epoch: int) -> None:
        for one in self.unwritable():
            ((count,),) = session.query(f"SELECT COUNT(*) FROM ({self._only(one)._incoming()}) r")
            if count:
                rows = quantity(int(count), "row")
                fact = f"epoch {epoch} has {rows} whose {one.because}"
                raise UnwritableRows(RowRejected(fact, one.hint))

    def _only(self, one: Unwritable) -> Apply:
        return replace(self, sources=[source.where(one.condition) for source in self.sources])

    def unwritable(self) -> list[Unwritable]:
        """The kinds of rows that this mode can't write."""
        found = []
        if self.nullable_keys:
            fields = ", ".join(key.field for key in self.nullable_keys)
            names = [self.dialect.quote(key.field) for key in self.nullable_keys]
            nulls = " OR ".join(f"s.{name} IS NULL" for name in names)
            found.append(
                Unwritable(
                    condition=f"({nulls})",
                    sqlstate=_NULL_VALUE,
                    because=f"key ({fields}) is null: null matches no row, not even itself",
                    hint=f'where="{self.nullable_keys[0].field} is not null"',
                )
            )
        strict = [one for one in self.values if one.is_not_null]
        if strict and self.mode.delete_when is not None and self.dialect.replaces_nulls:
            # Deletes may leave them out; where there are none, tasks refuse a null.
            nulls = " OR ".join(f"s.{self.dialect.quote(one.field)} IS NULL" for one in strict)
            found.append(
                Unwritable(
                    condition=f"{self._is_delete()} = 0 AND ({nulls})",
                    sqlstate=_NULL_VALUE,
                    because=f"{' or '.join(one.field for one in strict)} is null, and its column "
                    "NOT NULL",
                    hint=f'where="{strict[0].field} is not null"',
                )
            )
        if self.mode.on_miss == "reject":
            fields = ", ".join(key.field for key in self.keys)
            found.append(
                Unwritable(
                    condition=f"{self._is_delete()} = 0 AND {self._is_missing()}",
                    sqlstate=_NO_ROW,
                    because=f"key ({fields}) is not in the table, and mode='update' inserts none",
                    hint="on_miss='ignore' leaves such rows out; mode='upsert' inserts them",
                )
            )
        return found

    def _is_missing(self) -> str:
        """The condition for staged rows, called `s`, whose key is not in the table."""
        equal = " AND ".join(
            f"t.{self.dialect.quote(key.column)} = {self._value(key)}" for key in self.keys
        )
        return f"NOT EXISTS (SELECT 1 FROM {self.target} t WHERE {equal})"

    def left_out(self, session: Session) -> int:
        """
        How many keys of this epoch its mode leaves as they are in the table, or out of it. Asked
        before the rows are applied.
        """
        return sum(int(session.query(query)[0][0]) for query in self.counting())

    def counting(self) -> list[str]:
        exists = {"insert_new": "EXISTS", "update": "NOT EXISTS"}.get(self.mode.mode)
        if exists is None:
            return []
        return [
            f"SELECT COUNT(*) FROM ({self.winners()}) i WHERE i.is_delete = 0 AND {exists}"
            f" (SELECT 1 FROM {self.target} t WHERE {self.matches('t', 'i')})"
        ]

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
