"""The checks before the first row, what is created before the first epoch, and grants."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import pyarrow as pa

from epochal.errors import Misconfigured
from epochal.kit.sql.check import (
    Checker,
    ExpectedColumns,
    StagedLayout,
    abilities,
    exact_values,
    written_once,
)
from epochal.kit.sql.client import Session
from epochal.kit.sql.dialect import UNFIT
from epochal.kit.sql.errors import GRANTS
from epochal.kit.sql.modes import WriteMode
from epochal.kit.sql.names import TableName
from epochal.kit.sql.staging_tables import Missing
from epochal.sinks.postgres.catalog import (
    BASIS,
    BELOW,
    KINDS_WRITTEN,
    SEQUENCES,
    read_table,
    read_with_staged,
)
from epochal.sinks.postgres.client import PostgresSession
from epochal.sinks.postgres.dialect import AT, DIALECT
from epochal.sinks.postgres.slots import (
    REGISTRY,
    REGISTRY_RIGHTS,
    Shape,
    Slots,
    column_shape,
    missing_slots,
    pool_of,
    shape_of,
)
from epochal.sinks.postgres.types import (
    Column,
    Planned,
    Sent,
    Table,
    UniqueIndex,
    create_as,
    may_go_direct,
    plan,
    sent_fields,
)
from epochal.terms import Ability, Identity

if TYPE_CHECKING:
    from epochal.sinks.postgres.sink import Postgres

_VERSION_MIN = 120000
_LEDGER_RIGHTS = ("SELECT", "INSERT", "UPDATE", "DELETE")
_CREATING = 0x65706F63
"""The advisory lock under which our schema is created: one driver at a time."""


class PostgresChecker(Checker[Table, Sent]):
    def __init__(self, sink: Postgres, identity: Identity) -> None:
        super().__init__(sink, identity, DIALECT)
        self._sink = sink

    # Asking

    def check(self, session: Session, schema: pa.Schema | None) -> list[Ability]:
        sink = self._sink
        version = cast("PostgresSession", session).connection.info.server_version
        if version < _VERSION_MIN:
            raise Misconfigured(
                f"{sink.server.place} is PostgreSQL {version // 10000}", "12 or newer is needed"
            )
        if not sink.is_fixed:
            self._require_own_meta(session)
            _require_meta_rights(session, (sink.meta_schema, sink.staging_schema))
        expected = self.expect(schema)
        there = self.read_table(session)
        table = self.table_to_be(session, there)
        unlogged: Sequence[str] = ()
        if there is not None:
            unlogged = self._require_writable(session, there)
            self._require_rights(session, there)
        planned: Sequence[Planned] = ()
        if table is not None and expected is not None:
            fields = {name: one.type for name, one in expected.sent.items()}
            planned = plan(fields, table, sink)
        self.require_delete_when(session)
        if sink.is_fixed:
            self.require_made(session)
        pooler = _pooler(session)
        if pooler and sink.session_sql:
            raise Misconfigured(
                f"session_sql on {sink.place}, and {pooler}: what a session sets would be lost "
                "between two transactions, or reach other clients",
                "a url past the pooler, or ALTER ROLE … SET …, which needs no session",
            )
        once = _written_once(session, sink, table, pooler)
        found = [*self._abilities(pooler, unlogged), *exact_values(planned)]
        return [*found, once, _unpublished(session, sink)]

    def _require_own_meta(self, session: Session) -> None:
        """What another role has made in our schemas belongs to it, and so do its slots."""
        for schema, table in self._meta_tables():
            within, name = DIALECT.quote(schema), DIALECT.quote(schema, table)
            is_there = bool(DIALECT.present(session, schema, [table]))
            if is_there and not _may_use(session, within, name, _LEDGER_RIGHTS):
                ((role,),) = session.query("SELECT current_user")
                raise Misconfigured(
                    f'role "{role}" may not use {name}, which another role has made',
                    f'meta_schema="{self._sink.meta_schema}_{role}", a schema of its own for each '
                    "role; or one role for all pipelines, by session_sql=['SET ROLE …']",
                )

    def _abilities(self, pooler: str, unlogged: Sequence[str]) -> list[Ability]:
        return [
            *abilities(self._sink),
            Ability(
                name="durable rows",
                granted=not unlogged,
                because=f"UNLOGGED: {', '.join(unlogged)}; a crash of the server empties it, and "
                "the ledger still shows the epochs as committed"
                if unlogged
                else "the server logs the rows before it reports a commit",
            ),
            Ability(
                name="direct connection",
                granted=not pooler,
                because=pooler or "the session is the server's own",
            ),
            *(_TRUNCATING if self._sink.truncate else ()),
        ]

    def _require_writable(self, session: Session, table: Table) -> list[str]:
        """Whether rows can be written, in our transaction; which tables a crash would empty."""
        mode, kinds = self._sink.write_mode, KINDS_WRITTEN
        if table.kind not in kinds.values():
            raise Misconfigured(f"{table} is a {table.kind}", "name a table or an updatable view")
        has_children = mode.is_keyed or mode.deletes
        below = session.query(BELOW.format(table=table.oid, children=str(has_children).lower()))
        foreign = [name for name, kind, _ in below if kinds.get(kind) == "foreign table"]
        if foreign:
            raise Misconfigured(
                f"{table.kind} {table} leads to {', '.join(foreign)} on another server, whose "
                "commit is not part of ours: a crash between the two would write rows twice",
                "write to that server itself, with a sink of its own",
            )
        if table.kind == "view":
            self._require_updatable(session, table)
        if mode.is_truncating:
            _require_truncatable(session, table)
        return [name for name, _, persistence in below if persistence == "u"]

    def _require_updatable(self, session: Session, view: Table) -> None:
        mode, expected = self._sink.write_mode, self._expected
        events = {"INSERT": 8} if mode.mode != "update" else {}
        if mode.updates:
            events["UPDATE"] = 4
        if mode.deletes:
            events["DELETE"] = 16
        written = frozenset() if expected is None else expected.written(view.columns)
        ((taken, computed),) = session.query(
            f"SELECT pg_relation_is_updatable({view.oid}, true), ARRAY(SELECT attname::text FROM"
            f" pg_attribute WHERE attrelid = {view.oid} AND attnum > 0 AND NOT attisdropped"
            f" AND NOT pg_column_is_updatable({view.oid}, attnum, true))"
        )
        lacking = [event for event, bit in events.items() if not taken & bit]
        lacking += ["TRUNCATE"] if mode.is_truncating else []
        fixed = sorted(set[str](computed) & written)
        if lacking or fixed:
            because = (
                f"takes no {' and no '.join(lacking)}"
                if lacking
                else "computes " + ", ".join(fixed)
            )
            raise Misconfigured(
                f"view {view} {because}",
                "INSTEAD OF triggers on the view, or name the table below it",
            )

    def _require_rights(self, session: Session, table: Table) -> None:
        expected = self._expected or ExpectedColumns(sent={}, sink=self._sink)
        columns = [name for name in expected.created() if name in table.columns]
        lacking = [
            f"{right} on {column}" if column else right
            for right, column in needs(self._sink.write_mode, columns, expected.keys)
            if (not column or column in table.columns)
            and not _may(session, table.oid, right, column)
        ]
        lacking += [
            f"USAGE on the sequence {name}"
            for name, column in session.query(SEQUENCES.format(table=table.oid))
            if column not in columns
        ]
        if lacking:
            ((role,),) = session.query("SELECT current_user")
            raise Misconfigured(
                f'role "{role}" lacks {", ".join(lacking)} for {table}',
                "; ".join(self._sink.grants(role)),
            )

    # What rows need

    def sent_fields(self, schema: pa.Schema) -> dict[str, Sent]:
        return sent_fields(schema, self._sink)

    def read_table(self, session: Session) -> Table | None:
        return self.read_named(session, self._sink.table_name)

    def read_named(self, session: Session, name: TableName) -> Table | None:
        return read_table(session, name)

    def kept_as(self, column: Column) -> str:
        return column.type.full

    def no_table(self, session: Session) -> Misconfigured:
        table = DIALECT.literal(self._sink.table_name.table)
        return self.no_such_table(
            session.query(
                "SELECT n.nspname, c.relname FROM pg_class c"
                " JOIN pg_namespace n ON n.oid = c.relnamespace"
                f" WHERE lower(c.relname) = lower({table})"
                " AND c.relkind IN ('r', 'p', 'v', 'f') ORDER BY 1, 2 LIMIT 3"
            )
        )

    def require_may_create(self, session: Session) -> None:
        _require_may_create(session, self._sink)

    def require_may_add(self, session: Session, table: Table, added: Collection[str]) -> None:
        _require_owner(session, table, added)

    def new_table(self, expected: ExpectedColumns[Sent]) -> Table:
        key = UniqueIndex(
            name="the primary key",
            columns=expected.keys,
            is_exclusion=False,
            is_immediate=True,
            is_plain=True,
        )
        return Table(
            oid=0,
            schema=self._sink.table_name.schema or "",
            name=self._sink.table_name.table,
            kind="new table",
            takes_copies=True,
            columns=self.new_columns(expected),
            unique=(key,) if expected.keys else (),
        )

    def no_row(self, fields: Mapping[str, Sent]) -> str:
        nulls = [
            f"CAST(NULL AS {one.ddl}) AS {DIALECT.quote(name)}" for name, one in fields.items()
        ]
        return f"SELECT {', '.join(nulls)}"

    def new_ddl(self, sent: Sent, *, is_key: bool) -> str:  # noqa: ARG002
        return create_as(sent)

    def new_column(self, name: str, sent: Sent, *, is_key: bool) -> Column:
        written, type_ = create_as(sent), sent.type
        if written == "jsonb":
            type_ = replace(type_, written=written, full=written, base=written)
        return Column(name=name, type=type_, is_not_null=is_key)

    def _meta_tables(self) -> dict[tuple[str, str], list[str]]:
        """Our own tables by schema and name, with the statements that make them."""
        staging = pool_of(self._sink)
        return {
            (self._sink.meta_schema, DIALECT.ledger): DIALECT.create_ledger(self._sink.meta_schema),
            (staging.schema, REGISTRY): [staging.create()],
        }

    def missing(self, session: Session) -> Sequence[Missing]:
        sink, role = self._sink, self._sink.server.parameter("user") or "epochal"
        to = DIALECT.quote(role)
        found: dict[str, Missing] = {}
        for (schema, table), statements in self._meta_tables().items():
            name, within = DIALECT.quote(schema, table), DIALECT.quote(schema)
            rights = REGISTRY_RIGHTS if table == REGISTRY else _LEDGER_RIGHTS
            if not _may_use(session, within, name, rights):
                ddl = [
                    f"CREATE SCHEMA IF NOT EXISTS {within}",
                    f"GRANT USAGE ON SCHEMA {within} TO {to}",
                    *(" ".join(one.split()) for one in statements),
                    f"GRANT {', '.join(rights)} ON {name} TO {to}",
                ]
                found[table] = Missing(what=f"table {name} that this role may use", ddl=ddl)
        tombstones = self.missing_tombstones(session, "GRANT {rights} ON {table} TO " + to)
        if self._expected is None:
            return [*found.values(), *tombstones]
        shape = self._shape(session, self._expected)
        slots = missing_slots(session, sink, shape, role, may_read=REGISTRY not in found)
        return [*found.values(), *tombstones, *slots]

    def _shape(self, session: Session, expected: ExpectedColumns[Sent]) -> Shape:
        """Of the slots that tasks of this sink claim."""
        sink = self._sink
        if sink.strategy == "prepared":
            fields = {name: one.type for name, one in expected.sent.items()}
            table = self.must_read(session)
            planned = plan(fields, table, sink)
            if may_go_direct(planned, table):
                return column_shape(planned)
        return shape_of(expected.sent, sink)

    def make_meta(self, session: Session) -> None:
        for (schema, table), statements in self._meta_tables().items():
            if DIALECT.present(session, schema, [table]):
                continue
            session.query(f"SELECT pg_advisory_xact_lock({_CREATING})")
            # Another driver may have created it meanwhile and prepared rows: CREATE INDEX IF NOT
            # EXISTS would wait for those, even where the index exists.
            if DIALECT.present(session, schema, [table]):
                continue
            if not _has_schema(session, schema):
                session.execute(f"CREATE SCHEMA {DIALECT.quote(schema)}")
            session.execute_all(statements)

    def make_ready(self, session: Session) -> None:
        super().make_ready(session)
        if self._sink.is_fixed:
            return
        sent = None if self._expected is None else self._expected.sent
        shape = None if sent is None else shape_of(sent, self._sink)
        Slots(self._sink).remove_idle(session, shape)

    @property
    def hands_out(self) -> bool:
        """Staged rows need nothing: their columns have the types of what arrives."""
        return self._sink.strategy == "prepared"

    def basis(self, session: Session) -> str:
        rows = session.query(self.basis_sql)
        return str(rows[0][0]) if rows else ""

    @property
    def basis_sql(self) -> str:
        oid = f"to_regclass({DIALECT.literal(DIALECT.quote(*self._sink.table_name.parts))})"
        return " ".join(BASIS.format(table=oid).split())

    def staged_layout(self, session: Session, schema: str, staging: str) -> StagedLayout:
        """With the casts from what arrived to what the table has now."""
        sink = self._sink
        table, staged = read_with_staged(session, sink.table_name, DIALECT.quote(schema, staging))
        if table is None:
            raise self.no_table(session)
        self._require_writable(session, table)
        fields = {name: staged[name].type for name in DIALECT.fields_of(staged)}
        return StagedLayout(
            mapped=[one.mapped for one in plan(fields, table, sink)],
            keeps_unfit=UNFIT[0] in staged,
            # Rows without numbers were staged for a sink whose keys come once in an epoch.
            arrived=DIALECT.quote(AT) if AT in staged else DIALECT.place,
        )


def _may(session: Session, oid: int, right: str, column: str) -> bool:
    asked = (
        f"has_column_privilege({oid}::oid, {DIALECT.literal(column)}, '{right}')"
        if column
        else f"has_table_privilege({oid}::oid, '{right}')"
    )
    ((may,),) = session.query(f"SELECT {asked}")
    return bool(may)


def _may_use(session: Session, schema: str, table: str, rights: Sequence[str]) -> bool:
    """Whether a table is there, and this role has these rights on it. Both names are quoted."""
    namespace = f"to_regnamespace({DIALECT.literal(schema)})"
    ((may_look,),) = session.query(f"SELECT has_schema_privilege({namespace}, 'USAGE')")
    oid = f"to_regclass({DIALECT.literal(table)})"
    asked = " AND ".join(f"has_table_privilege({oid}, '{right}')" for right in rights)
    return bool(may_look and session.query(f"SELECT {asked}")[0][0])


def _has_schema(session: Session, schema: str) -> bool:
    return bool(
        session.query(f"SELECT 1 FROM pg_namespace WHERE nspname = {DIALECT.literal(schema)}")
    )


def _require_meta_rights(session: Session, schemas: Sequence[str]) -> None:
    ((role,),) = session.query("SELECT current_user")
    lacking, ways_out = [], []
    for schema in schemas:
        if _has_schema(session, schema):
            name = DIALECT.literal(schema)
            asked = " AND ".join(
                f"has_schema_privilege({name}, '{right}')" for right in ("CREATE", "USAGE")
            )
            what = f'make tables in the schema "{schema}"'
            way_out = f'GRANT CREATE, USAGE ON SCHEMA "{schema}" TO "{role}"'
        else:
            asked = "has_database_privilege(current_database(), 'CREATE')"
            what = f'make the schema "{schema}", which is not there yet'
            way_out = f'CREATE SCHEMA "{schema}" AUTHORIZATION "{role}"'
        ((may,),) = session.query(f"SELECT {asked}")
        if not may:
            lacking.append(what)
            ways_out.append(way_out)
    if lacking:
        raise Misconfigured(
            f'role "{role}" may not {", and not ".join(lacking)}', "; ".join((*ways_out, GRANTS))
        )


def _pooler(session: Session) -> str:
    """A pooler reports a backend pid of its own in the handshake."""
    ((pid,),) = session.query("SELECT pg_backend_pid()")
    reported = cast("PostgresSession", session).connection.info.backend_pid
    if pid == reported:
        return ""
    return f"a pooler is in between: it calls the session {reported}, the server {pid}"


def _unpublished(session: Session, sink: Postgres) -> Ability:
    """A publication of all tables includes staging, whose rows are not decided yet."""
    rows = session.query("SELECT pubname FROM pg_publication WHERE puballtables ORDER BY 1")
    named = ", ".join(name for (name,) in rows)
    return Ability(
        name="unpublished staging",
        granted=not rows,
        because=f'FOR ALL TABLES, {named} sends rows of "{sink.staging_schema}" to its subscribers '
        "before they are decided: FOR TABLES IN SCHEMA names the schemas to publish"
        if rows
        else "no publication is for all tables",
    )


_TRUNCATING = (
    Ability(
        name="readers at any time",
        granted=False,
        because="TRUNCATE makes readers wait from the rehearsal to the COMMIT, and transactions "
        "with an older snapshot see an empty table; without truncate=True rows are deleted",
    ),
)


def _require_truncatable(session: Session, table: Table) -> None:
    rows = session.query(
        "SELECT DISTINCT conrelid::regclass::text FROM pg_constraint WHERE contype = 'f'"
        f" AND confrelid = {table.oid} AND conrelid <> {table.oid} ORDER BY 1"
    )
    if rows:
        named = ", ".join(name for (name,) in rows)
        raise Misconfigured(
            f"truncate=True on {table}, which foreign keys of {named} refer to: no TRUNCATE is "
            "allowed there",
            "truncate=False deletes the rows",
        )


def _require_may_create(session: Session, sink: Postgres) -> None:
    named = DIALECT.literal(sink.table_name.schema)
    ((schema, role, may),) = session.query(
        "SELECT s.name, current_user,"
        " CASE WHEN to_regnamespace(quote_ident(s.name)) IS NULL THEN NULL"
        " ELSE has_schema_privilege(s.name, 'CREATE') END"
        f" FROM (SELECT COALESCE({named}, current_schema())::text AS name) s"
    )
    if not may:
        fact = "is not there" if may is None else f'does not let role "{role}" make tables'
        raise Misconfigured(
            f'{sink.table} is to be created, and the schema "{schema}" {fact}',
            f'CREATE SCHEMA "{schema}"'
            if may is None
            else f'GRANT CREATE ON SCHEMA "{schema}" TO "{role}"',
        )


def _require_owner(session: Session, table: Table, added: Collection[str]) -> None:
    ((may, role, owner),) = session.query(
        "SELECT pg_has_role(c.relowner, 'USAGE'), current_user, c.relowner::regrole::text"
        f" FROM pg_class c WHERE c.oid = {table.oid}"
    )
    if not may:
        raise Misconfigured(
            f"{table} lacks the columns {', '.join(added)}, and only its owner {owner} "
            f'may add them, not role "{role}"',
            "add them by hand, or let the owner's role run this pipeline",
        )


def _written_once(session: Session, sink: Postgres, table: Table | None, pooler: str) -> Ability:
    """Which strategy fits; `Misconfigured` where it is "prepared" and the server does not allow."""
    ((most, used),) = session.query(
        "SELECT current_setting('max_prepared_transactions')::int,"
        " (SELECT count(*) FROM pg_prepared_xacts)"
    )
    staged = "strategy='staged' (the default) needs none of this"
    fact = hint = ""
    if pooler:
        fact, hint = f"through a pooler: {pooler}", f"give the url of the server itself; {staged}"
    elif most - used < sink.tasks_max:
        fact = (
            f"needs a prepared transaction for each of up to {sink.tasks_max} tasks, and "
            f"max_prepared_transactions on {sink.server.place} is {most}, {used} in use"
        )
        hint = (
            f"ALTER SYSTEM SET max_prepared_transactions = {max(2 * sink.tasks_max, 64)} and a "
            f"restart of the server; {staged}"
        )
    if fact and sink.strategy == "prepared":
        raise Misconfigured(f"strategy='prepared' {fact}", hint)
    return written_once(sink, may_collide=bool(table and table.may_collide), obstacle=fact)


# The least privileges, as statements that a DBA can read and run

_GRANT_SEQUENCES = """
DO $$ DECLARE number regclass; BEGIN FOR number IN
SELECT d.refobjid FROM pg_attrdef v
JOIN pg_depend d ON d.classid = 'pg_attrdef'::regclass AND d.objid = v.oid
JOIN pg_class c ON c.oid = d.refobjid AND c.relkind = 'S'
AND d.refclassid = 'pg_class'::regclass WHERE v.adrelid = {table}::regclass
LOOP EXECUTE format('GRANT USAGE ON SEQUENCE %s TO %s', number, {role}); END LOOP; END $$
"""


def needs(mode: WriteMode, columns: Sequence[str], keys: Sequence[str]) -> list[tuple[str, str]]:
    """Rights on the table, each with its column, or none where it is a right on the whole."""
    every = list(columns) or [""]
    marks = list(mode.delete_as) if columns else []
    rights = [("INSERT", column) for column in every if mode.mode != "update"]
    if mode.updates:
        # Columns of `excluded` count as read.
        rights += [("UPDATE", column) for column in (*every, *marks) if column not in keys]
        rights += [("SELECT", column) for column in every]
    elif mode.is_keyed:
        rights += [("SELECT", key) for key in keys]
    if mode.deletes:
        rights.append(("TRUNCATE" if mode.is_truncating else "DELETE", ""))
    return rights


def grants(sink: Postgres, role: str) -> list[str]:
    """
    Statements for the owner of the table and for a role that may create schemas.

    Without `columns=` the columns are not known yet: rights are on the whole table.
    """
    to = DIALECT.quote(role)
    schemas = [DIALECT.quote(schema) for schema in (sink.meta_schema, sink.staging_schema)]
    name = sink.table_name
    table = DIALECT.quote(*name.parts)
    # What is in them, where a DBA makes it, is granted by the statements that make it.
    in_schema = "USAGE" if sink.is_fixed else "USAGE, CREATE"
    statements = [
        statement
        for schema in schemas
        for statement in (
            f"CREATE SCHEMA IF NOT EXISTS {schema}",
            f"GRANT {in_schema} ON SCHEMA {schema} TO {to}",
        )
    ]
    if name.schema:
        schema = DIALECT.quote(name.schema)
        right = "USAGE, CREATE" if sink.create_table == "if_missing" else "USAGE"
        statements.append(f"GRANT {right} ON SCHEMA {schema} TO {to}")
    buried = sink.write_mode.tombstones
    if buried is not None:
        within = DIALECT.quote(buried.schema or "public")
        statements.append(f"GRANT {in_schema} ON SCHEMA {within} TO {to}")
    if sink.create_table == "if_missing":
        return statements
    columns, keys = sink.named_columns()
    by_right: dict[str, list[str]] = {}
    for right, column in needs(sink.write_mode, columns, keys):
        by_right.setdefault(right, []).append(column)
    rights = ", ".join(_right(right, which) for right, which in by_right.items())
    statements.append(f"GRANT {rights} ON {table} TO {to}")
    numbered = _GRANT_SEQUENCES.format(table=DIALECT.literal(table), role=DIALECT.literal(to))
    return [*statements, " ".join(numbered.split())]


def _right(right: str, columns: Sequence[str]) -> str:
    quoted = [DIALECT.quote(column) for column in columns if column]
    return f"{right} ({', '.join(quoted)})" if quoted else right
