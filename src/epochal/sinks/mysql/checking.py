"""What is asked of a server before the first row, and made on it before the first epoch."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa

from epochal.errors import Misconfigured
from epochal.kit.sql.committing import Checker, abilities, handout
from epochal.kit.sql.dialect import Session
from epochal.kit.sql.incoming import Incoming
from epochal.sinks.mysql.catalog import Column, Table, read_table, to_json
from epochal.sinks.mysql.dialect import DETACH_AT_PREPARE, DIALECT
from epochal.sinks.mysql.plan import plan, require_table, sent_fields
from epochal.sinks.mysql.types import Sent
from epochal.terms import Ability, Identity, Json

if TYPE_CHECKING:
    from epochal.sinks.mysql.sink import MySQL

_DENIED = frozenset({1044, 1142, 1143, 1227})
_KEY_CHARS = 255


class MySQLChecker(Checker):
    """Remembers what rows will come, so that what they need can be made once the start is sure."""

    def __init__(self, sink: MySQL, identity: Identity) -> None:
        self._sink = sink
        self._identity = identity
        self._incoming: Incoming[Sent] | None = None

    # Asking

    def check(self, session: Session, schema: pa.Schema | None) -> list[Ability]:
        sink = self._sink
        self.is_ready = False
        about = _About(session)
        about.require_loading(sink)
        self._incoming = incoming = (
            None if schema is None else Incoming(sent=sent_fields(schema, sink), sink=sink)
        )
        there = read_table(session, sink.table_name)
        table = self._expected(session, there)
        if there is not None:
            _require_transactional(there)
        if table is not None and incoming is not None:
            plan(incoming.sent, table, sink)
            if there is not None:
                self._require_rights(session, there, incoming)
        if sink.strategy == "prepared":
            about.require_detachable(sink)
            if about.is_mariadb:
                self._require_detaching(session)
            if there is not None:
                self._require_no_unique(there)
        return self._abilities(about)

    def _abilities(self, about: _About) -> list[Ability]:
        return [
            *abilities(self._sink),
            Ability(
                name="durable commits",
                granted=about.flushes == 1,
                because=f"innodb_flush_log_at_trx_commit is {about.flushes}"
                + ("" if about.flushes == 1 else ": a crash may forget what was reported as done"),
            ),
        ]

    def _expected(self, session: Session, table: Table | None) -> Table | None:
        """The table as it will be at the first epoch."""
        sink, incoming = self._sink, self._incoming
        if table is None:
            if sink.create_table == "never":
                raise _no_table(session, sink)
            return None if incoming is None else _imagined(sink, incoming)
        if incoming is None or sink.evolve == "never":
            return table
        added = {
            name: _new_column(name, how, is_key=False)
            for name, how in incoming.missing(table.columns).items()
        }
        return replace(table, columns={**table.columns, **added})

    def _require_rights(self, session: Session, table: Table, incoming: Incoming[Sent]) -> None:
        """EXPLAIN needs the rights of what it explains, and does nothing."""
        mode, target = self._sink.write_mode, DIALECT.quote(table.schema, table.name)
        written, keys = incoming.written(table.columns), incoming.keys
        columns = [column for column in table.columns if column in written]
        listed = ", ".join(map(DIALECT.quote, columns))
        nothing = ", ".join(["NULL"] * len(columns))
        insert = f"INSERT INTO {target} ({listed}) SELECT {nothing} FROM DUAL WHERE 1 = 0"
        changed = [column for column in columns if column not in keys] or columns
        asked = [insert]
        if mode.mode == "upsert":
            sets = ", ".join(
                f"{DIALECT.quote(one)} = VALUES({DIALECT.quote(one)})" for one in changed
            )
            asked = [f"{insert} ON DUPLICATE KEY UPDATE {sets}"]
        if mode.mode == "replace" or mode.delete_when is not None:
            asked.append(f"DELETE FROM {target} WHERE {DIALECT.quote(keys[0])} IS NULL")
        for statement in asked:
            try:
                session.query(f"EXPLAIN {statement}")
            except DIALECT.errors as error:
                if DIALECT.number_of(error) not in _DENIED:
                    raise
                raise Misconfigured(DIALECT.told(error), "; ".join(self._sink.grants())) from error

    def _require_detaching(self, session: Session) -> None:
        try:
            session.execute(DETACH_AT_PREPARE)
            session.execute("SET SESSION pseudo_slave_mode = 0")
        except DIALECT.errors as error:
            if DIALECT.number_of(error) not in _DENIED:
                raise
            raise Misconfigured(
                f"strategy='prepared' needs {DETACH_AT_PREPARE}: {DIALECT.told(error)}",
                "GRANT BINLOG REPLAY ON *.*; strategy='staged' (the default) needs none of this",
            ) from error

    def _require_no_unique(self, table: Table) -> None:
        incoming, there = self._incoming, table.columns
        written = frozenset(there) if incoming is None else incoming.written(there)
        hit = table.unique_hit_by(written)
        if hit:
            raise Misconfigured(
                f"strategy='prepared' on {table}, which has the unique index {next(iter(hit))}: a "
                "task that is tried again would wait for its own first attempt",
                "strategy='staged' (the default) needs none of this; or drop the index",
            )

    # Making

    def make_ready(self, session: Session) -> None:
        self._make_meta(session)
        sink, incoming = self._sink, self._incoming
        if incoming is None:
            return
        table = read_table(session, sink.table_name)
        if table is None and sink.create_table == "if_missing":
            session.execute(_create(sink, incoming))
        elif table is not None and sink.evolve == "add_columns":
            added = [
                f"ADD COLUMN {DIALECT.quote(name)} {_new_column(name, how, is_key=False).ddl}"
                for name, how in incoming.missing(table.columns).items()
            ]
            if added:
                target = DIALECT.quote(table.schema, table.name)
                session.execute(f"ALTER TABLE {target} {', '.join(added)}")

    def _make_meta(self, session: Session) -> None:
        """Only where it is missing: an account without the right to make it may still use it."""
        meta = self._sink.meta
        try:
            if DIALECT.present(session, meta, [DIALECT.ledger]):
                return
            made = session.query(
                "SELECT 1 FROM information_schema.schemata"
                f" WHERE schema_name = {DIALECT.literal(meta)}"
            )
            if not made:
                session.execute(f"CREATE DATABASE IF NOT EXISTS {DIALECT.quote(meta)}")
            for statement in DIALECT.create_ledger(meta):
                session.execute(statement)
        except DIALECT.errors as error:
            if DIALECT.number_of(error) not in _DENIED:
                raise
            raise Misconfigured(DIALECT.told(error), "; ".join(self._sink.grants())) from error

    # What the apply and the tasks need

    def handout(self, session: Session) -> Json:
        table = require_table(read_table(session, self._sink.table_name), self._sink)
        return handout(to_json(table), self._identity)

    def columns(self, session: Session) -> dict[str, bool]:
        table = require_table(read_table(session, self._sink.table_name), self._sink)
        return {column.name: column.is_not_null for column in table.columns.values()}


class _About:
    """What the server says of itself."""

    def __init__(self, session: Session) -> None:
        ((version, self._loads, self.flushes, log, form),) = session.query(
            "SELECT VERSION(), @@global.local_infile, @@global.innodb_flush_log_at_trx_commit,"
            " @@global.log_bin, @@global.binlog_format"
        )
        self._version = str(version)
        self.is_mariadb = "mariadb" in self._version.lower()
        self._by_statement = bool(log) and form == "STATEMENT"

    def require_loading(self, sink: MySQL) -> None:
        if not self._loads:
            raise Misconfigured(
                f"{sink.place} takes no LOAD DATA LOCAL: local_infile is off",
                "SET GLOBAL local_infile = 1, and local_infile=1 in the server's configuration",
            )
        if self._by_statement:
            raise Misconfigured(
                f"{sink.place} writes its binary log by statements, which READ COMMITTED forbids",
                "binlog_format=ROW or MIXED",
            )

    def require_detachable(self, sink: MySQL) -> None:
        """Whether a prepared XA transaction outlives its connection."""
        needed = (10, 5, 2) if self.is_mariadb else (8, 0, 29)
        # Some MariaDB says 5.5.5 first, for clients that know no number above 5.
        words = re.findall(r"(\d+)\.(\d+)\.(\d+)", self._version.removeprefix("5.5.5-"))
        found = tuple(int(number) for number in words[0]) if words else ()
        if found < needed:
            raise Misconfigured(
                f"strategy='prepared' on {sink.place}, version {self._version}: there a prepared "
                "XA transaction ends with its connection",
                f"version {'.'.join(map(str, needed))} or newer; strategy='staged' (the default) "
                "needs none of this",
            )


def _new_columns(incoming: Incoming[Sent]) -> list[Column]:
    return [
        _new_column(name, how, is_key=name in incoming.keys)
        for name, how in incoming.created().items()
    ]


def _imagined(sink: MySQL, incoming: Incoming[Sent]) -> Table:
    return Table(
        schema=sink.table_name.schema or sink.server.database,
        name=sink.table_name.table,
        kind="new table",
        is_transactional=True,
        engine="InnoDB",
        columns={column.name: column for column in _new_columns(incoming)},
        unique={"PRIMARY": incoming.keys} if incoming.keys else {},
    )


def _create(sink: MySQL, incoming: Incoming[Sent]) -> str:
    parts = [
        f"{DIALECT.quote(column.name)} {column.ddl}{' NOT NULL' if column.is_not_null else ''}"
        for column in _new_columns(incoming)
    ]
    if incoming.keys:
        parts.append(f"PRIMARY KEY ({', '.join(map(DIALECT.quote, incoming.keys))})")
    return (
        f"CREATE TABLE IF NOT EXISTS {DIALECT.quote(*sink.table_name.parts)}"
        f" ({', '.join(parts)}) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4"
    )


def _new_column(name: str, sent: Sent, *, is_key: bool) -> Column:
    ddl = sent.ddl
    if is_key and ddl in {"longtext", "longblob"}:
        # A key needs a length.
        ddl = f"{'varchar' if ddl == 'longtext' else 'varbinary'}({_KEY_CHARS})"
    return Column(
        name=name,
        data_type=re.split(r"[( ]", ddl, maxsplit=1)[0],
        ddl=ddl,
        scale=6 if ddl.endswith("(6)") else sent.scale,
        is_not_null=is_key,
    )


def _require_transactional(table: Table) -> None:
    if table.kind == "table" and not table.is_transactional:
        raise Misconfigured(
            f"{table} is a table of the engine {table.engine}, which knows no transactions",
            f"ALTER TABLE {DIALECT.quote(table.schema, table.name)} ENGINE=InnoDB",
        )


def _no_table(session: Session, sink: MySQL) -> Misconfigured:
    rows = session.query(
        "SELECT table_schema, table_name FROM information_schema.tables"
        f" WHERE LOWER(table_name) = {DIALECT.literal(sink.table_name.table.lower())}"
        " ORDER BY 1, 2 LIMIT 3"
    )
    alike = ", ".join(f"{schema}.{name}" for schema, name in rows)
    return Misconfigured(
        f"there is no table {sink.table} on {sink.place}",
        f"names are taken exactly as they are written; there is {alike}"
        if alike
        else "create it, or create_table='if_missing'",
    )
