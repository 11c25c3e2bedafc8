"""Applying staging tables to the table, inside a transaction that somebody else ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import psycopg

from epochal.errors import Misconfigured
from epochal.kit.sql.ambiguous import equal_rows, null_keys, several_rows
from epochal.kit.sql.names import TableName
from epochal.kit.sql.rejects import Rejected
from epochal.sinks.postgres.catalog import read_table
from epochal.sinks.postgres.plan import plan
from epochal.sinks.postgres.rejects import Search
from epochal.sinks.postgres.sorting import CARDINALITY, sqlstate_of
from epochal.sinks.postgres.sql import Apply, Source

if TYPE_CHECKING:
    from epochal.sinks.postgres.sink import Postgres


def read_apply(
    connection: psycopg.Connection[Any], sink: Postgres, tables: Mapping[str, int]
) -> Apply:
    """What is to be done, from what the catalog says now: staging tables describe themselves."""
    target = read_table(connection, sink.table_name)
    if target is None:
        raise Misconfigured(
            f"there is no table {sink.table}", "create it, or create_table='if_missing'"
        )
    staging = read_table(connection, TableName(sink.meta_schema, next(iter(tables))))
    fields = {} if staging is None else {c.name: c.type for c in staging.columns.values()}
    return Apply(
        plan=plan(fields, target, sink.column_map, sink.write_mode),
        mode=sink.write_mode,
        table=target,
        sources=[
            Source(schema=sink.meta_schema, table=name, part=part) for name, part in tables.items()
        ],
    )


def apply_rows(connection: psycopg.Connection[Any], apply: Apply, epoch: int, rows: int) -> None:
    """Put the rows into the table, or say what makes the epoch ambiguous."""
    if not apply.mode.is_keyed:
        for statement in apply.statements():
            connection.execute(statement)
        return
    if apply.plan.nullable_keys:
        _require_known_keys(connection, apply, epoch)
    is_plain_upsert = apply.mode.mode == "upsert" and apply.mode.delete_when is None
    if not apply.mode.order_by and not is_plain_upsert:
        _require_single_rows(connection, apply, epoch)
    connection.execute("SAVEPOINT epochal_apply")
    written = 0
    try:
        for statement in apply.statements():
            written = connection.execute(statement).rowcount
    except psycopg.Error as error:
        if sqlstate_of(error) == CARDINALITY:
            connection.execute("ROLLBACK TO SAVEPOINT epochal_apply")
            _require_single_rows(connection, apply, epoch)
        raise
    is_single = is_plain_upsert and written == rows
    if apply.mode.order_by and len(apply.sources) > 1 and not is_single:
        _require_no_ties(connection, apply, epoch)


def _require_single_rows(connection: psycopg.Connection[Any], apply: Apply, epoch: int) -> None:
    repeated = connection.execute(apply.repeated_keys()).fetchall()
    if repeated:
        raise several_rows(epoch, _named(repeated))


def _require_no_ties(connection: psycopg.Connection[Any], apply: Apply, epoch: int) -> None:
    tied = connection.execute(apply.tied_keys()).fetchall()
    if tied:
        raise equal_rows(epoch, apply.mode.order_by, _named(tied))


def _require_known_keys(connection: psycopg.Connection[Any], apply: Apply, epoch: int) -> None:
    row = connection.execute(apply.null_keys()).fetchone()
    if row is not None and row[0]:
        raise null_keys(epoch, row[0], [key.field for key in apply.plan.nullable_keys])


def _named(found: Sequence[Sequence[Any]]) -> str:
    return "; ".join(f"{key} ({count} rows)" for key, count in found)


def find_rejected(
    connection: psycopg.Connection[Any], sink: Postgres, tables: Mapping[str, int], *, limit: int
) -> list[Rejected]:
    """The rows that the table refuses, at most `limit`; the transaction must be thrown away."""
    search = Search(
        connection,
        read_apply(connection, sink, tables),
        limit=limit,
        check_now=lambda: connection.execute("SET CONSTRAINTS ALL IMMEDIATE"),
    )
    return search.run()
