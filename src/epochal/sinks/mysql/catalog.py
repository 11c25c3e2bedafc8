"""A table as the server's catalog describes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from epochal.kit.sql.client import Session
from epochal.kit.sql.names import TableName
from epochal.sinks.mysql.dialect import DIALECT
from epochal.terms import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    name: str
    data_type: str
    """`varchar`, without a length."""
    ddl: str
    """The whole type, character set and collation included."""
    scale: int = 0
    """Digits after the point, of a decimal; of a moment, of its seconds."""
    is_not_null: bool = False
    has_default: bool = False
    is_auto: bool = False
    is_generated: bool = False

    @property
    def needs_value(self) -> bool:
        return self.is_not_null and not (self.has_default or self.is_auto or self.is_generated)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    schema: str
    name: str
    kind: str
    is_transactional: bool
    engine: str
    columns: Mapping[str, Column]
    unique: Mapping[str, tuple[str, ...]]
    """Unique indexes and their columns; one on an expression has an empty name in it."""

    def __str__(self) -> str:
        return f"{self.schema}.{self.name}"

    def unique_hit_by(self, written: frozenset[str]) -> dict[str, tuple[str, ...]]:
        """
        Unique indexes that rows with these columns can meet another row in.

        Not those with a column that we leave to the server, and that it numbers or leaves null.
        """

        def is_never_equal(name: str) -> bool:
            column = self.columns.get(name)
            if column is None or name in written:
                return False
            return column.is_auto or not (column.is_not_null or column.has_default)

        return {
            name: columns
            for name, columns in self.unique.items()
            if not any(map(is_never_equal, columns))
        }


def read_table(session: Session, name: TableName) -> Table | None:
    """The table of this name, in the connection's own database where none is named."""
    schema = "DATABASE()" if name.schema is None else DIALECT.literal(name.schema)
    which = f"table_schema = {schema} AND table_name = {DIALECT.literal(name.table)}"
    found = session.query(
        "SELECT table_schema, table_name, table_type, t.engine, e.transactions"
        " FROM information_schema.tables t"
        f" LEFT JOIN information_schema.engines e ON e.engine = t.engine WHERE {which}"
    )
    if not found:
        return None
    in_schema, table, kind, engine, transactions = found[0]
    return Table(
        schema=in_schema,
        name=table,
        kind="view" if "VIEW" in kind else "table",
        is_transactional=transactions == "YES",
        engine=engine or "",
        columns=_columns(session, which),
        unique=_unique(session, which),
    )


def _columns(session: Session, which: str) -> dict[str, Column]:
    rows = session.query(
        "SELECT column_name, data_type, column_type, character_set_name, collation_name,"
        " COALESCE(datetime_precision, numeric_scale, 0), is_nullable, column_default, extra"
        f" FROM information_schema.columns WHERE {which} ORDER BY ordinal_position"
    )
    columns = [_column(row) for row in rows]
    return {column.name: column for column in columns}


def _column(row: Sequence[Any]) -> Column:
    (name, data_type, column_type, charset, collation, scale, is_nullable, default, extra) = row
    extras = (extra or "").upper()
    ddl = column_type
    if charset is not None:
        ddl = f"{column_type} CHARACTER SET {charset} COLLATE {collation}"
    return Column(
        name=name,
        data_type=data_type.lower(),
        ddl=ddl,
        scale=int(scale),
        is_not_null=is_nullable == "NO",
        has_default=default is not None and default != "NULL",
        is_auto="AUTO_INCREMENT" in extras,
        is_generated="GENERATED" in extras.replace("DEFAULT_GENERATED", ""),
    )


def _unique(session: Session, which: str) -> dict[str, tuple[str, ...]]:
    rows = session.query(
        "SELECT index_name, column_name FROM information_schema.statistics"
        f" WHERE {which} AND non_unique = 0 ORDER BY index_name <> 'PRIMARY', index_name,"
        " seq_in_index"
    )
    indexes: dict[str, tuple[str, ...]] = {}
    for index, column in rows:
        indexes[index] = (*indexes.get(index, ()), column or "")
    return indexes


def to_json(table: Table) -> Json:
    """A table's columns for the tasks."""
    return {
        "schema": table.schema,
        "name": table.name,
        "columns": [asdict(column) for column in table.columns.values()],
        "unique": {name: list(columns) for name, columns in table.unique.items()},
    }


def from_json(given: Mapping[str, Any]) -> Table:
    columns = [Column(**column) for column in given["columns"]]
    return Table(
        schema=given["schema"],
        name=given["name"],
        kind="table",
        is_transactional=True,
        engine="",
        columns={column.name: column for column in columns},
        unique={name: tuple(parts) for name, parts in given["unique"].items()},
    )
