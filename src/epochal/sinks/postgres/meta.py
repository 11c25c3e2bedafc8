"""The schema of our own: staging tables and the ledger. Made on demand, read without fuss."""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Sequence
from typing import Any

import psycopg
from psycopg import sql

from epochal.errors import Misconfigured
from epochal.kit.sql.names import parse_staging_name, staging_prefix
from epochal.sinks.postgres.connecting import driver_prefix, parse_driver_name
from epochal.sinks.postgres.ledger import LEDGER, Ledger
from epochal.terms import Generation, Identity, InDoubt, SinkTag

_MAKING = 0x65706F63  # "epoc": one at a time makes the schema, whoever else wants to


def ensure_meta(connection: psycopg.Connection[Any], ledger: Ledger) -> None:
    """Make the schema and the ledger where they are missing, inside an open transaction."""
    if _is_made(connection, ledger.schema):
        return
    connection.execute(sql.SQL("SELECT pg_advisory_xact_lock({})").format(sql.Literal(_MAKING)))
    # Whoever was first may have prepared rows by now, and an index that is there already would
    # still wait for them.
    if _is_made(connection, ledger.schema):
        return
    if not _has_schema(connection, ledger.schema):
        connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(ledger.schema)))
    connection.execute(ledger.create())


def require_meta_rights(connection: psycopg.Connection[Any], schema: str) -> None:
    if _has_schema(connection, schema):
        row = connection.execute(
            "SELECT has_schema_privilege(%(s)s, 'CREATE') AND has_schema_privilege(%(s)s, 'USAGE'),"
            " current_user",
            {"s": schema},
        ).fetchone()
        lacking = f'make tables in the schema "{schema}"'
        way_out = f'GRANT CREATE, USAGE ON SCHEMA "{schema}" TO "{{role}}"'
    else:
        row = connection.execute(
            "SELECT has_database_privilege(current_database(), 'CREATE'), current_user"
        ).fetchone()
        lacking = f'make the schema "{schema}", which is not there yet'
        way_out = f'CREATE SCHEMA "{schema}" AUTHORIZATION "{{role}}", or another meta_schema='
    may, role = row or (False, "")
    if not may:
        raise Misconfigured(f'role "{role}" may not {lacking}', way_out.format(role=role))


def _has_schema(connection: psycopg.Connection[Any], schema: str) -> bool:
    found = connection.execute("SELECT FROM pg_namespace WHERE nspname = %s", (schema,))
    return found.fetchone() is not None


def _is_made(connection: psycopg.Connection[Any], schema: str) -> bool:
    found = connection.execute(
        "SELECT FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE n.nspname = %s AND c.relname = %s",
        (schema, LEDGER),
    )
    return found.fetchone() is not None


# Staging tables


def staged(connection: psycopg.Connection[Any], schema: str, identity: Identity) -> list[InDoubt]:
    """Every staging table of this sink, from the names alone (I6)."""
    rows = connection.execute(
        "SELECT c.relname, obj_description(c.oid, 'pg_class')"
        " FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE n.nspname = %s AND c.relkind = 'r' AND starts_with(c.relname, %s)"
        " ORDER BY c.relname",
        (schema, staging_prefix(identity)),
    ).fetchall()
    return [
        InDoubt(name=name, handle=parse_staging_name(name), age_s=_age_s(comment))
        for name, comment in rows
    ]


def present(
    connection: psycopg.Connection[Any], schema: str, tables: Collection[str]
) -> frozenset[str]:
    """Which of these tables are there."""
    rows = connection.execute(
        "SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE n.nspname = %s AND c.relname = ANY(%s)",
        (schema, list(tables)),
    ).fetchall()
    return frozenset(name for (name,) in rows)


def drop(schema: str, tables: Collection[str]) -> sql.Composed:
    listed = sql.SQL(", ").join(sql.Identifier(schema, name) for name in tables)
    return sql.SQL("DROP TABLE IF EXISTS {}").format(listed)


def comment(handle: object) -> str:
    now = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    return f"{handle}, prepared at {now}"


def _age_s(text: str | None) -> float | None:
    """How long ago, by the clock of the task that wrote it: for people."""
    try:
        since = dt.datetime.fromisoformat((text or "").rpartition(" ")[2])
    except ValueError:
        return None
    return max(0.0, (dt.datetime.now(dt.UTC) - since).total_seconds())


# Sessions that were left behind


def end_older_sessions(connection: psycopg.Connection[Any], identities: Sequence[Identity]) -> int:
    """
    End transactions that an earlier driver of these sinks left open, and holds locks with.

    Nothing is lost: what was decided is applied again from staging, by whoever comes (I7). Only
    sessions up to one's own generation are ended; of a later one, this driver is the zombie. A
    transaction goes by the name of one of the sinks that share it, perhaps of one that is no longer
    declared: of other sinks only what is truly older is ended.
    """
    mine, tags = identities[0], {identity.tag for identity in identities}
    rows = connection.execute(
        "SELECT pid, application_name FROM pg_stat_activity WHERE datname = current_database()"
        " AND pid <> pg_backend_pid() AND starts_with(application_name, %s)"
        " AND state IN ('active', 'idle in transaction', 'idle in transaction (aborted)')",
        (driver_prefix(mine.uid),),
    ).fetchall()
    older = [pid for pid, name in rows if _is_older(name, mine.generation, tags)]
    for pid in older:
        connection.execute("SELECT pg_terminate_backend(%s)", (pid,))
    return len(older)


def _is_older(session: str, generation: Generation, tags: Collection[SinkTag]) -> bool:
    found = parse_driver_name(session)
    return found is not None and (
        found[1] < generation or (found[1] == generation and found[0] in tags)
    )
