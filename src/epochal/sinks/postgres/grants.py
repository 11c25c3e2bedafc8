"""The least that the role of a sink needs, as statements a DBA can read and run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from epochal.kit.sql.modes import WriteMode
from epochal.sinks.postgres.dialect import DIALECT

if TYPE_CHECKING:
    from epochal.sinks.postgres.sink import Postgres


def needs(mode: WriteMode, columns: Sequence[str], keys: Sequence[str]) -> list[tuple[str, str]]:
    """Rights on the table, each with its column, or none where it is a right on the whole."""
    every = list(columns) or [""]
    rights = [("INSERT", column) for column in every]
    if mode.mode == "upsert":
        # Columns of `excluded` count as read.
        rights += [("UPDATE", column) for column in every if column not in keys]
        rights += [("SELECT", column) for column in every]
    elif mode.is_keyed:
        rights += [("SELECT", key) for key in keys]
    if mode.mode == "replace" or mode.delete_when is not None:
        rights.append(("DELETE", ""))
    return rights


def grants(sink: Postgres, role: str) -> list[str]:
    """Statements for the owner of the table and for a role that may create schemas."""
    to = DIALECT.quote(role)
    meta = DIALECT.quote(sink.meta_schema)
    name = sink.table_name
    table = DIALECT.quote(*name.parts)
    statements = [
        f"CREATE SCHEMA IF NOT EXISTS {meta}",
        f"GRANT USAGE, CREATE ON SCHEMA {meta} TO {to}",
    ]
    if name.schema:
        schema = DIALECT.quote(name.schema)
        right = "USAGE, CREATE" if sink.create_table == "if_missing" else "USAGE"
        statements.append(f"GRANT {right} ON SCHEMA {schema} TO {to}")
    if sink.create_table == "if_missing":
        return statements
    columns, keys = _columns(sink)
    by_right: dict[str, list[str]] = {}
    for right, column in needs(sink.write_mode, columns, keys):
        by_right.setdefault(right, []).append(column)
    rights = ", ".join(_right(right, which) for right, which in by_right.items())
    statements.append(f"GRANT {rights} ON {table} TO {to}")
    return statements


def _columns(sink: Postgres) -> tuple[list[str], list[str]]:
    """Without columns= the columns are not known yet: then rights are on the whole table."""
    if sink.column_map is None:
        return [], list(sink.write_mode.keys)
    keys = [sink.column_map.get(key, key) for key in sink.write_mode.keys]
    return list(sink.column_map.values()), keys


def _right(right: str, columns: Sequence[str]) -> str:
    quoted = [DIALECT.quote(column) for column in columns if column]
    return f"{right} ({', '.join(quoted)})" if quoted else right
