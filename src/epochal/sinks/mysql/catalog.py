"""Reads a table from the server's catalog."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from epochal.kit.sql.client import Session
from epochal.kit.sql.names import TableName
from epochal.sinks.mysql.dialect import DIALECT
from epochal.sinks.mysql.plan import Column, Table


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
