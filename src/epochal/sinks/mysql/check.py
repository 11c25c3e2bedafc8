"""The checks before the first row, what is created before the first epoch, and grants."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from epochal.errors import Misconfigured, Problems
from epochal.kit.sql.check import (
    Checker,
    ExpectedColumns,
    abilities,
    exact_values,
    must_not_collide,
    written_once,
)
from epochal.kit.sql.client import Session
from epochal.kit.sql.modes import WriteMode
from epochal.kit.sql.names import TableName
from epochal.kit.sql.staging_tables import Missing
from epochal.kit.sql.types import Sent
from epochal.sinks.mysql.dialect import DETACH_AT_PREPARE, DIALECT
from epochal.sinks.mysql.slots import REGISTRY, Slots, create_registry, missing_slots, pool_of
from epochal.sinks.mysql.types import Column, Planned, Table, plan, require_key, sent_fields
from epochal.terms import Ability, Identity, Json

if TYPE_CHECKING:
    from epochal.sinks.mysql.sink import MySQL

_DENIED = frozenset({1044, 1142, 1143, 1227})
_XA_REFUSED = 1401
"""What MySQL answers to XA RECOVER without the right to it."""
_KEY_CHARS = 255
_NAMED_IN_FULL = re.compile(r"`((?:[^`]|``)+)`\.`((?:[^`]|``)+)`")
_TABLES_WITH_ENGINES = (
    "SELECT table_schema, table_name, table_type, t.engine,"
    " COALESCE(e.transactions = 'YES' AND e.xa = 'YES', 0) FROM information_schema.tables t"
    " LEFT JOIN information_schema.engines e ON e.engine = t.engine"
)
"""Only engines with both commit together with another one; FEDERATED has transactions alone."""
_ROW_RIGHTS = "SELECT, INSERT, UPDATE, DELETE"
_META_RIGHTS = f"CREATE, {_ROW_RIGHTS}"
_STAGING_RIGHTS = f"{_META_RIGHTS}, DROP"


class MySQLChecker(Checker[Table, Sent]):
    def __init__(self, sink: MySQL, identity: Identity) -> None:
        super().__init__(sink, identity, DIALECT)
        self._sink = sink
        self._has_slots = False

    # Asking

    def check(self, session: Session, schema: pa.Schema | None) -> list[Ability]:
        sink = self._sink
        about = _About(session)
        about.require_loading(sink)
        expected = self.expect(schema)
        there = self.read_table(session)
        table = self.table_to_be(session, there)
        if there is not None:
            _require_transactional(session, there)
            self._require_sight(session, there)
        planned: Sequence[Planned] = ()
        if table is not None and expected is not None:
            planned = plan(expected.sent, table, sink)
            if there is not None:
                self._require_rights(session, there, expected)
        self.require_delete_when(session)
        if sink.strategy == "prepared":
            about.require_detachable(sink)
            if about.is_mariadb:
                self._require_detaching(session)
            else:
                self._require_listing(session)
            self._require_slots(about, there)
        if sink.is_fixed:
            about.require_skipping(sink)
            self.require_made(session)
        once = written_once(
            sink,
            may_collide=self._may_collide(there),
            obstacle="" if about.detaches else "needs a newer server",
            needed=about.right_to_prepare,
        )
        return [*self._abilities(about), once, *exact_values(planned)]

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

    def _require_sight(self, session: Session, table: Table) -> None:
        """
        An upsert goes by every unique index. MariaDB's catalog hides one with a column that
        an account may not read, MySQL's hides the column.
        """
        if self._sink.write_mode.needs_unique_key:
            self._require_allowed(session, f"SELECT * FROM {table.quoted}")

    def _require_rights(
        self, session: Session, table: Table, expected: ExpectedColumns[Sent]
    ) -> None:
        mode, target = self._sink.write_mode, table.quoted
        written, keys = expected.written(table.columns), expected.keys
        columns = [column for column in table.columns if column in written]
        listed = ", ".join(map(DIALECT.quote, columns))
        nothing = ", ".join(["NULL"] * len(columns))
        insert = f"INSERT INTO {target} ({listed}) SELECT {nothing} FROM DUAL WHERE 1 = 0"
        changed = [column for column in columns if column not in keys] or columns
        changed = [*changed, *mode.delete_as] if mode.updates else list(keys)
        sets = ", ".join(f"{DIALECT.quote(one)} = {DIALECT.quote(one)}" for one in changed)
        asked = [insert] if mode.mode != "update" else [f"UPDATE {target} SET {sets} WHERE 1 = 0"]
        if mode.needs_unique_key:
            asked = [f"{insert} ON DUPLICATE KEY UPDATE {sets}"]
        if mode.deletes:
            asked.append(f"DELETE FROM {target} WHERE 1 = 0")
        for statement in asked:
            self._require_allowed(session, statement)

    def _require_allowed(self, session: Session, statement: str) -> None:
        """EXPLAIN needs the rights of what it explains, and does nothing."""
        try:
            # MySQL draws no tree, its default, of a write to a view.
            session.query(f"EXPLAIN FORMAT=TRADITIONAL {statement}")
        except DIALECT.errors as error:
            if DIALECT.code_of(error) not in _DENIED:
                raise
            raise Misconfigured(DIALECT.text_of(error), "; ".join(self._sink.grants())) from error

    def _require_detaching(self, session: Session) -> None:
        try:
            session.execute(DETACH_AT_PREPARE)
            session.execute("SET SESSION pseudo_slave_mode = 0")
        except DIALECT.errors as error:
            if DIALECT.code_of(error) not in _DENIED:
                raise
            raise Misconfigured(
                f"strategy='prepared' needs {DETACH_AT_PREPARE}: {DIALECT.text_of(error)}",
                f"GRANT BINLOG REPLAY ON *.* TO {self._sink.account}; strategy='staged' (the "
                "default) needs none of this",
            ) from error

    def _require_listing(self, session: Session) -> None:
        """MySQL lists prepared transactions only to accounts with a right of its own."""
        detaching = session.query("SHOW GLOBAL VARIABLES LIKE 'xa_detach_on_prepare'")
        if any(value == "OFF" for _, value in detaching):
            raise Misconfigured(
                f"strategy='prepared' on {self._sink.place}, where xa_detach_on_prepare is OFF: a "
                "prepared transaction stays with its session",
                "SET PERSIST xa_detach_on_prepare = ON; strategy='staged' (the default) needs none "
                "of this",
            )
        try:
            DIALECT.prepared_names(session)
        except DIALECT.errors as error:
            if DIALECT.code_of(error) not in {*_DENIED, _XA_REFUSED}:
                raise
            raise Misconfigured(
                f"strategy='prepared' needs XA RECOVER: {DIALECT.text_of(error)}",
                f"{self._sink.grants()[-1]}; strategy='staged' (the default) needs none of this",
            ) from error

    def _may_collide(self, table: Table | None) -> bool:
        if table is None:
            return False
        expected, there = self._expected, table.columns
        written = frozenset(there) if expected is None else expected.written(there)
        return table.may_collide(written)

    def _require_slots(self, about: _About, table: Table | None) -> None:
        """A server without SKIP LOCKED has no slots, where attempts that are late would wait."""
        if table is not None and self._may_collide(table) and not about.skips_locked:
            hit = next(iter(table.unique), "key below this view")
            raise must_not_collide(table, f"unique index {hit}")

    # What rows need

    def sent_fields(self, schema: pa.Schema) -> dict[str, Sent]:
        return sent_fields(schema, self._sink)

    def read_table(self, session: Session) -> Table | None:
        return self.read_named(session, self._sink.table_name)

    def read_named(self, session: Session, name: TableName) -> Table | None:
        return read_table(session, name)

    def kept_as(self, column: Column) -> str:
        return column.ddl

    def layout(self, session: Session) -> str:
        """With unique indexes, where upserts go by them: ON DUPLICATE KEY takes what it finds."""
        columns = super().layout(session)
        if not self._sink.write_mode.needs_unique_key:
            return columns
        return f"{columns} {_unique(session, _which(self._sink.table_name))}"

    def must_read(self, session: Session) -> Table:
        table = super().must_read(session)
        _require_transactional(session, table)
        return table

    def require_key(self, table: Table, columns: Mapping[str, str]) -> None:
        problems = Problems()
        require_key(table, columns, self._sink.write_mode, problems)
        problems.raise_if_any(f"{table.kind} {table}")

    def read_staging(self, session: Session, schema: str, table: str) -> Mapping[str, Column]:
        return _columns(session, _which(TableName(schema, table)))

    def new_table(self, expected: ExpectedColumns[Sent]) -> Table:
        sink = self._sink
        return Table(
            schema=sink.table_name.schema or sink.server.database,
            name=sink.table_name.table,
            kind="new table",
            is_transactional=True,
            engine="InnoDB",
            columns=self.new_columns(expected),
            unique={"PRIMARY": expected.keys} if expected.keys else {},
        )

    def new_ddl(self, sent: Sent, *, is_key: bool) -> str:
        """A key needs a length."""
        if is_key and sent.ddl in {"longtext", "longblob"}:
            return f"{'varchar' if sent.ddl == 'longtext' else 'varbinary'}({_KEY_CHARS})"
        return sent.ddl

    def new_column(self, name: str, sent: Sent, *, is_key: bool) -> Column:
        ddl = self.new_ddl(sent, is_key=is_key)
        return Column(
            name=name,
            data_type=re.split(r"[( ]", ddl, maxsplit=1)[0],
            ddl=ddl,
            scale=6 if ddl.endswith("(6)") else sent.scale,
            is_not_null=is_key,
        )

    def no_table(self, session: Session) -> Misconfigured:
        sink = self._sink
        rows = session.query(
            "SELECT table_schema, table_name FROM information_schema.tables"
            f" WHERE LOWER(table_name) = {DIALECT.literal(sink.table_name.table.lower())}"
            " ORDER BY 1, 2 LIMIT 3"
        )
        return self.no_such_table(rows)

    def _meta_tables(self) -> dict[tuple[str, str], list[str]]:
        """Our own tables by database and name, with the statements that make them."""
        meta, staging = self._sink.meta, self._sink.staging_schema
        return {
            (meta, DIALECT.ledger): DIALECT.create_ledger(meta),
            (staging, REGISTRY): [create_registry(staging)],
        }

    def missing(self, session: Session) -> Sequence[Missing]:
        sink, expected = self._sink, self._expected
        found = {
            table: Missing(
                what=f"table {DIALECT.quote(schema, table)} that this account sees",
                ddl=[f"CREATE DATABASE IF NOT EXISTS {DIALECT.quote(schema)}", *statements],
            )
            for (schema, table), statements in self._meta_tables().items()
            if not DIALECT.present(session, schema, [table])
        }
        grant = f"GRANT {{rights}} ON {{table}} TO {sink.account}"
        tombstones = self.missing_tombstones(session, grant)
        if expected is None or not sink.uses_slots:
            return [*found.values(), *tombstones]
        pool = pool_of(sink, plan(expected.sent, self.must_read(session), sink))
        slots = missing_slots(session, sink, pool, may_read=REGISTRY not in found)
        return [*found.values(), *tombstones, *slots]

    def make_meta(self, session: Session) -> None:
        """Only where it is missing: an account without the right to make it may still use it."""
        try:
            for (schema, table), statements in self._meta_tables().items():
                self._make_in(session, schema, table, statements)
            Slots(self._sink).remove_idle(session)
            self._has_slots = _About(session).skips_locked
        except DIALECT.errors as error:
            if DIALECT.code_of(error) not in _DENIED:
                raise
            raise Misconfigured(DIALECT.text_of(error), "; ".join(self._sink.grants())) from error

    def _make_in(
        self, session: Session, schema: str, table: str, statements: Sequence[str]
    ) -> None:
        if DIALECT.present(session, schema, [table]):
            return
        made = session.query(
            "SELECT 1 FROM information_schema.schemata"
            f" WHERE schema_name = {DIALECT.literal(schema)}"
        )
        if not made:
            session.execute(f"CREATE DATABASE IF NOT EXISTS {DIALECT.quote(schema)}")
        for statement in statements:
            session.execute(statement)

    def handout(self, session: Session, known: Mapping[str, Json] | None) -> Mapping[str, Json]:
        return {**super().handout(session, known), "slots": self._has_slots}


class _About:
    """The settings of the server."""

    def __init__(self, session: Session) -> None:
        ((version, self._loads, self.flushes, log, form),) = session.query(
            "SELECT VERSION(), @@global.local_infile, @@global.innodb_flush_log_at_trx_commit,"
            " @@global.log_bin, @@global.binlog_format"
        )
        self._version = str(version)
        self.is_mariadb = "mariadb" in self._version.lower()
        # Some MariaDB servers report 5.5.5 first, for clients that know no number above 5.
        numbers = re.findall(r"(\d+)\.(\d+)\.(\d+)", self._version.removeprefix("5.5.5-"))
        self._number = tuple(int(number) for number in numbers[0]) if numbers else ()
        self._by_statement = bool(log) and form == "STATEMENT"

    @property
    def skips_locked(self) -> bool:
        """Whether SELECT … FOR UPDATE knows SKIP LOCKED."""
        return self._number >= ((10, 6, 0) if self.is_mariadb else (8, 0, 1))

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

    def require_skipping(self, sink: MySQL) -> None:
        if not self.skips_locked:
            raise Misconfigured(
                f"staging='fixed' on {sink.place}, version {self._version}, which knows no SKIP "
                "LOCKED: tasks would wait for each other's slots",
                "MariaDB 10.6 or MySQL 8.0 or newer",
            )

    @property
    def _detaching_since(self) -> tuple[int, int, int]:
        return (10, 5, 2) if self.is_mariadb else (8, 0, 29)

    @property
    def detaches(self) -> bool:
        """Whether a prepared XA transaction outlives its connection."""
        return self._number >= self._detaching_since

    @property
    def right_to_prepare(self) -> str:
        return f"it needs {'BINLOG REPLAY' if self.is_mariadb else 'XA_RECOVER_ADMIN'}"

    def require_detachable(self, sink: MySQL) -> None:
        if not self.detaches:
            needed = ".".join(map(str, self._detaching_since))
            raise Misconfigured(
                f"strategy='prepared' on {sink.place}, version {self._version}: there a prepared "
                "XA transaction ends with its connection",
                f"version {needed} or newer; strategy='staged' (the default) needs none of this",
            )


def _require_transactional(session: Session, table: Table) -> None:
    if table.kind == "view":
        for schema, name, engine in _tables_below(session, table):
            raise Misconfigured(
                f"view {table} leads to {schema}.{name}, a table of the engine {engine}, whose "
                "rows do not commit together with the ledger",
                f"ALTER TABLE {DIALECT.quote(schema, name)} ENGINE=InnoDB",
            )
    elif not table.is_transactional:
        raise Misconfigured(
            f"{table} is a table of the engine {table.engine}, whose rows do not commit together "
            "with the ledger",
            f"ALTER TABLE {table.quoted} ENGINE=InnoDB",
        )


def _tables_below(session: Session, view: Table) -> list[tuple[str, str, str]]:
    """
    The tables that are not transactional and that a view names, also by other views.

    The server keeps a view's definition with every table named in full; who may not see it gets
    an empty one, and nothing is found.
    """
    views = [(view.schema, view.name)]
    seen: set[tuple[str, str]] = set()
    found: list[tuple[str, str, str]] = []
    while views:
        schema, name = views.pop()
        rows = session.query(
            "SELECT view_definition FROM information_schema.views WHERE table_schema ="
            f" {DIALECT.literal(schema)} AND table_name = {DIALECT.literal(name)}"
        )
        named = {pair for (text,) in rows for pair in _NAMED_IN_FULL.findall(text or "")} - seen
        seen |= named
        pairs = ", ".join(f"({DIALECT.literal(one)}, {DIALECT.literal(two)})" for one, two in named)
        listed = (
            session.query(f"{_TABLES_WITH_ENGINES} WHERE (table_schema, table_name) IN ({pairs})")
            if named
            else []
        )
        for in_schema, table, kind, engine, is_transactional in listed:
            if "VIEW" in kind:
                views.append((in_schema, table))
            elif not is_transactional:
                found.append((in_schema, table, engine))
    return found


# The server's catalog


def read_table(session: Session, name: TableName) -> Table | None:
    """The table of this name, in the connection's own database where none is named."""
    which = _which(name)
    found = session.query(f"{_TABLES_WITH_ENGINES} WHERE {which}")
    if not found:
        return None
    in_schema, table, kind, engine, is_transactional = found[0]
    return Table(
        schema=in_schema,
        name=table,
        kind="view" if "VIEW" in kind else "table",
        is_transactional=bool(is_transactional),
        engine=engine or "",
        columns=_columns(session, which),
        unique=_unique(session, which),
    )


def _which(name: TableName) -> str:
    schema = "DATABASE()" if name.schema is None else DIALECT.literal(name.schema)
    return f"table_schema = {schema} AND table_name = {DIALECT.literal(name.table)}"


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
        is_numbered="AUTO_INCREMENT" in extras,
        is_generated="GENERATED" in extras.replace("DEFAULT_GENERATED", ""),
    )


def _unique(session: Session, which: str) -> dict[str, tuple[str, ...]]:
    rows = session.query(
        "SELECT index_name, CASE WHEN sub_part IS NULL THEN column_name END"
        " FROM information_schema.statistics"
        f" WHERE {which} AND non_unique = 0 ORDER BY index_name <> 'PRIMARY', index_name,"
        " seq_in_index"
    )
    indexes: dict[str, tuple[str, ...]] = {}
    for index, column in rows:
        indexes[index] = (*indexes.get(index, ()), column or "")
    return indexes


# The least privileges, as statements that a DBA can read and run


def grants(sink: MySQL, account: str) -> list[str]:
    """
    Statements for an account that may grant; `account` is `'user'@'host'`.

    Without `columns=` the columns are not known yet: rights are on the whole table.
    """
    name = sink.table_name
    table = DIALECT.quote(name.schema or sink.server.database, name.table)
    meta, staging = map(DIALECT.quote, (sink.meta, sink.staging_schema))
    in_meta, in_staging = (
        (_ROW_RIGHTS, _ROW_RIGHTS) if sink.is_fixed else (_META_RIGHTS, _STAGING_RIGHTS)
    )
    statements = [
        f"CREATE DATABASE IF NOT EXISTS {meta}",
        f"GRANT {in_meta} ON {meta}.* TO {account}",
        f"CREATE DATABASE IF NOT EXISTS {staging}",
        f"GRANT {in_staging} ON {staging}.* TO {account}",
        f"GRANT {rights_on_table(sink)} ON {table} TO {account}",
    ]
    buried = sink.write_mode.tombstones
    if buried is not None and not sink.is_fixed:
        named = DIALECT.quote(buried.schema or sink.server.database, buried.table)
        statements.append(f"GRANT {_META_RIGHTS} ON {named} TO {account}")
    if sink.strategy == "prepared":
        statements.append(f"GRANT XA_RECOVER_ADMIN ON *.* TO {account} /* MySQL, not MariaDB */")
    return statements


def rights_on_table(sink: MySQL) -> str:
    mode = sink.write_mode
    columns, keys = sink.named_columns()
    rights = [_right("SELECT", _read(mode, columns, keys))]
    rights += [_right("INSERT", columns)] if mode.mode != "update" else []
    if mode.updates or mode.needs_unique_key:
        # The server asks for it on the keys too, though none is changed.
        rights.append(_right("UPDATE", [*columns, *mode.delete_as] if columns else ()))
    if mode.deletes:
        rights.append("DELETE")
    if sink.create_table == "if_missing":
        rights.append("CREATE")
    if sink.evolve == "add_columns":
        rights.append("ALTER")
    return ", ".join(rights)


def _read(mode: WriteMode, columns: Sequence[str], keys: Sequence[str]) -> Sequence[str]:
    """Without SELECT on a column the catalog does not show it, nor a unique index on it."""
    if mode.needs_unique_key:
        return ()
    return [*columns, *mode.delete_as] if columns else (keys if not mode.is_keyed else ())


def _right(right: str, columns: Sequence[str]) -> str:
    return f"{right} ({', '.join(map(DIALECT.quote, columns))})" if columns else right
