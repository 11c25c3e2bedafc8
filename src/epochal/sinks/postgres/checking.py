"""What is asked of a server before the first row, and made on it before the first epoch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow as pa
from psycopg import sql

from epochal.errors import Misconfigured
from epochal.kit.sql.columns import staged_fields
from epochal.kit.sql.committing import abilities
from epochal.kit.sql.incoming import Incoming
from epochal.sinks.postgres import meta
from epochal.sinks.postgres.catalog import Column, Table, UniqueIndex, identifier, read_table
from epochal.sinks.postgres.grants import needs
from epochal.sinks.postgres.ledger import Ledger
from epochal.sinks.postgres.names import require_identifier
from epochal.sinks.postgres.plan import plan
from epochal.sinks.postgres.types import Sent, Type, create_as, sent_as
from epochal.terms import Ability

if TYPE_CHECKING:
    from epochal.sinks.postgres.sink import Postgres

_VERSION_MIN = 120000


def sent_fields(schema: pa.Schema, sink: Postgres) -> dict[str, Sent]:
    """How each field of these rows travels; `Misconfigured` where one can't."""
    sent, problems = {}, []
    for field in schema:
        how = sent_as(field.type)
        if isinstance(how, str):
            problems.append(f'field "{field.name}": {how}')
        else:
            sent[require_identifier(field.name, "field")] = how
    if len(sent) + len(problems) < len(schema):
        problems.append(f"two fields have one name: {', '.join(schema.names)}")
    if problems:
        raise Misconfigured(
            f"{sink.table}: {'; '.join(problems)}",
            "cast it to another type, or leave it out: select=",
        )
    return {name: sent[name] for name in staged_fields(sent, sink.column_map, sink.write_mode)}


class Checker:
    """Remembers what rows will come, so that what they need can be made once the start is sure."""

    def __init__(self, sink: Postgres, ledger: Ledger) -> None:
        self._sink = sink
        self._ledger = ledger
        self._incoming: Incoming[Sent] | None = None
        self.is_ready = False

    # Asking

    def check(self, connection: psycopg.Connection[Any], schema: pa.Schema | None) -> list[Ability]:
        sink = self._sink
        if connection.info.server_version < _VERSION_MIN:
            raise Misconfigured(
                f"{sink.server.place} is PostgreSQL {connection.info.server_version // 10000}",
                "12 or newer is needed",
            )
        meta.require_meta_rights(connection, sink.meta_schema)
        self._incoming = incoming = (
            None if schema is None else Incoming(sent=sent_fields(schema, sink), sink=sink)
        )
        there = read_table(connection, sink.table_name)
        table = self._expected(connection, there)
        if there is not None:
            self._require_rights(connection, there)
        if table is not None and incoming is not None:
            fields = {name: one.type for name, one in incoming.sent.items()}
            plan(fields, table, sink.column_map, sink.write_mode)
        pooler = _pooler(connection)
        if sink.strategy == "prepared":
            _require_preparable(connection, sink, table, pooler)
        return self._abilities(pooler)

    def _abilities(self, pooler: str) -> list[Ability]:
        return [
            *abilities(self._sink),
            Ability(
                name="direct connection",
                granted=not pooler,
                because=pooler or "the session is the server's own",
            ),
        ]

    def _expected(self, connection: psycopg.Connection[Any], table: Table | None) -> Table | None:
        """The table as it will be at the first epoch."""
        sink, incoming = self._sink, self._incoming
        if table is None:
            if sink.create_table == "never":
                raise _no_table(connection, sink)
            _require_may_create(connection, sink)
            return None if incoming is None else _imagined(sink, incoming)
        if incoming is None or sink.evolve == "never":
            return table
        added = incoming.missing(table.columns)
        if added:
            _require_owner(connection, table, added)
        columns = {name: _column(name, sent) for name, sent in added.items()}
        return replace(table, columns={**table.columns, **columns})

    def _require_rights(self, connection: psycopg.Connection[Any], table: Table) -> None:
        incoming = self._incoming or Incoming(sent={}, sink=self._sink)
        columns = [name for name in incoming.created() if name in table.columns]
        lacking = [
            f"{right} on {column}" if column else right
            for right, column in needs(self._sink.write_mode, columns, incoming.keys)
            if (not column or column in table.columns)
            and not _may(connection, table.oid, right, column)
        ]
        if lacking:
            row = connection.execute("SELECT current_user").fetchone()
            role = row[0] if row else ""
            raise Misconfigured(
                f'role "{role}" lacks {", ".join(lacking)} for {table}',
                "; ".join(self._sink.grants(role)),
            )

    # Making

    def make_ready(self, connection: psycopg.Connection[Any]) -> None:
        """Inside a transaction: our schema, and the table or columns where that was asked."""
        meta.ensure_meta(connection, self._ledger)
        incoming = self._incoming
        if incoming is None:
            return
        table = read_table(connection, self._sink.table_name)
        if table is None and self._sink.create_table == "if_missing":
            connection.execute(_create(self._sink, incoming))
        elif table is not None and self._sink.evolve == "add_columns":
            for name, sent in incoming.missing(table.columns).items():
                connection.execute(
                    sql.SQL("ALTER TABLE {} ADD COLUMN IF NOT EXISTS {} {}").format(
                        table.identifier, sql.Identifier(name), sql.SQL(create_as(sent))
                    )
                )


def _imagined(sink: Postgres, incoming: Incoming[Sent]) -> Table:
    key = UniqueIndex(
        name="the primary key",
        columns=incoming.keys,
        is_exclusion=False,
        is_immediate=True,
        is_plain=True,
    )
    return Table(
        oid=0,
        schema=sink.table_name.schema or "",
        name=sink.table_name.table,
        kind="new table",
        has_row_security=False,
        columns={name: _column(name, sent) for name, sent in incoming.created().items()},
        unique=(key,) if incoming.keys else (),
    )


def _create(sink: Postgres, incoming: Incoming[Sent]) -> sql.Composed:
    parts = [
        sql.SQL("{} {}").format(sql.Identifier(name), sql.SQL(create_as(sent)))
        for name, sent in incoming.created().items()
    ]
    if incoming.keys:
        keys = sql.SQL(", ").join(map(sql.Identifier, incoming.keys))
        parts.append(sql.SQL("PRIMARY KEY ({})").format(keys))
    return sql.SQL("CREATE TABLE IF NOT EXISTS {} ({})").format(
        identifier(sink.table_name), sql.SQL(", ").join(parts)
    )


def _column(name: str, sent: Sent) -> Column:
    written = create_as(sent)
    type_ = Type(
        written=written,
        base="jsonb" if written == "jsonb" else sent.type.base,
        category=sent.type.category,
        is_array=sent.type.is_array,
        scale=sent.type.scale,
    )
    return Column(name=name, type=type_)


def _may(connection: psycopg.Connection[Any], oid: int, right: str, column: str) -> bool:
    row = (
        connection.execute("SELECT has_column_privilege(%s::oid, %s, %s)", (oid, column, right))
        if column
        else connection.execute("SELECT has_table_privilege(%s::oid, %s)", (oid, right))
    ).fetchone()
    return bool(row and row[0])


def _pooler(connection: psycopg.Connection[Any]) -> str:
    """A pooler answers the handshake with a process number of its own invention."""
    row = connection.execute("SELECT pg_backend_pid()").fetchone()
    told = connection.info.backend_pid
    if row is None or row[0] == told:
        return ""
    return f"a pooler stands in between: it calls the session {told}, the server {row[0]}"


def _no_table(connection: psycopg.Connection[Any], sink: Postgres) -> Misconfigured:
    rows = connection.execute(
        "SELECT n.nspname, c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE lower(c.relname) = lower(%s) AND c.relkind IN ('r', 'p', 'v', 'f')"
        " ORDER BY 1, 2 LIMIT 3",
        (sink.table_name.table,),
    ).fetchall()
    alike = ", ".join(f"{schema}.{name}" for schema, name in rows)
    return Misconfigured(
        f"there is no table {sink.table} on {sink.server.place}",
        f"names are taken exactly as they are written; there is {alike}"
        if alike
        else "create it, or create_table='if_missing'",
    )


def _require_may_create(connection: psycopg.Connection[Any], sink: Postgres) -> None:
    row = connection.execute(
        "SELECT s.name, current_user,"
        " CASE WHEN to_regnamespace(quote_ident(s.name)) IS NULL THEN NULL"
        " ELSE has_schema_privilege(s.name, 'CREATE') END"
        " FROM (SELECT COALESCE(%s, current_schema()) AS name) s",
        (sink.table_name.schema,),
    ).fetchone()
    schema, role, may = row or (None, "", None)
    if not may:
        fact = "is not there" if may is None else f'does not let role "{role}" make tables'
        raise Misconfigured(
            f'{sink.table} is to be created, and the schema "{schema}" {fact}',
            f'CREATE SCHEMA "{schema}"'
            if may is None
            else f'GRANT CREATE ON SCHEMA "{schema}" TO "{role}"',
        )


def _require_owner(
    connection: psycopg.Connection[Any], table: Table, added: Collection[str]
) -> None:
    row = connection.execute(
        "SELECT pg_has_role(c.relowner, 'USAGE'), current_user, c.relowner::regrole::text"
        " FROM pg_class c WHERE c.oid = %s",
        (table.oid,),
    ).fetchone()
    may, role, owner = row or (False, "", "")
    if not may:
        raise Misconfigured(
            f"{table} lacks the columns {', '.join(added)}, and only its owner {owner} "
            f'may add them, not role "{role}"',
            "add them by hand, or let the owner's role run this pipeline",
        )


def _require_preparable(
    connection: psycopg.Connection[Any], sink: Postgres, table: Table | None, pooler: str
) -> None:
    staged = "strategy='staged' (the default) needs none of this"
    if pooler:
        raise Misconfigured(
            f"strategy='prepared' through a pooler: {pooler}",
            f"give the url of the server itself; {staged}",
        )
    row = connection.execute(
        "SELECT current_setting('max_prepared_transactions')::int,"
        " (SELECT count(*) FROM pg_prepared_xacts)"
    ).fetchone()
    most, used = row or (0, 0)
    if most - used < sink.tasks_max:
        raise Misconfigured(
            f"strategy='prepared' needs a prepared transaction for each of up to {sink.tasks_max} "
            f"tasks, and max_prepared_transactions on {sink.server.place} is {most}, {used} in use",
            f"ALTER SYSTEM SET max_prepared_transactions = {max(2 * sink.tasks_max, 64)} and a "
            f"restart of the server; {staged}",
        )
    if table is not None and table.kind == "foreign table":
        raise Misconfigured(f"strategy='prepared' on the foreign table {table}", staged)
    if table is not None and table.unique:
        one = table.unique[0]
        raise Misconfigured(
            f"strategy='prepared' on {table}, which has the "
            f"{'exclusion' if one.is_exclusion else 'unique'} constraint or index {one.name}: a "
            "task that is tried again would wait for its own first attempt",
            f"{staged}; or drop the constraint",
        )
