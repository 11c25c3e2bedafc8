"""Counting a table, forgetting a pipeline, asking for the time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql

from epochal.contract import Dropped, Recount
from epochal.sinks.postgres.ledger import Ledger
from epochal.terms import quantity

if TYPE_CHECKING:
    from epochal.sinks.postgres.sink import Postgres


def recount(connection: psycopg.Connection[Any], sink: Postgres) -> Recount:
    """All rows of the table: it does not say whose they are."""
    name = sink.table_name
    table = sql.Identifier(*([name.schema] if name.schema else []), name.table)
    row = connection.execute(sql.SQL("SELECT count(*) FROM {}").format(table)).fetchone()
    return Recount(
        rows=int(row[0]) if row else None,
        because=f"all rows of {sink.table}, whoever wrote them",
        is_alone=False,
    )


def forget(connection: psycopg.Connection[Any], ledger: Ledger, *, is_dry_run: bool) -> Dropped:
    """The ledger rows of one sink of one uid."""
    whose = sql.SQL("FROM {} WHERE uid = {} AND sink = {}").format(
        ledger.table, sql.Literal(ledger.identity.uid), sql.Literal(ledger.identity.tag)
    )
    verb = sql.SQL("SELECT 1 " if is_dry_run else "DELETE ")
    count = connection.execute(verb + whose).rowcount
    return Dropped(removed=[f"{quantity(count, 'row')} of {ledger.schema}.ledger"] if count else [])


def server_time(connection: psycopg.Connection[Any]) -> float:
    row = connection.execute("SELECT extract(epoch FROM clock_timestamp())").fetchone()
    return float(row[0]) if row else 0.0
