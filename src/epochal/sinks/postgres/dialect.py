"""PostgreSQL's SQL: a staged row's place is its ctid."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from epochal.kit.sql.apply import Apply, Source
from epochal.kit.sql.client import Session
from epochal.kit.sql.dialect import Dialect, Query
from epochal.kit.sql.names import NameRule, parse_staging_name, staging_prefix
from epochal.kit.sql.rejects import Rows
from epochal.sinks.postgres.errors import ALTERED, SHORT, PostgresErrors
from epochal.terms import (
    EpochNumber,
    Generation,
    Handle,
    Identity,
    InDoubt,
    SinkTag,
    Uid,
    handle_prefix,
)

NAMES = NameRule(database="PostgreSQL", length_max=63)
"""Nothing is folded to lower case: case is kept."""
AT = "epochal_at"
"""The column of a staging table that numbers its rows, where their order counts."""
_ENDING_WAITS_S = (0.002, 0.01, 0.05, 0.2, 0.5, 1.0)
"""How long a session that was told to end may take."""
_DRIVER_NAME = re.compile(
    r"epochal-[a-z2-7]{12}(-s(?P<sink>[0-9a-f]{8}))?-g(?P<generation>\d{1,10})"
)
_LEDGER = """
CREATE TABLE IF NOT EXISTS {ledger} (
  uid text NOT NULL,
  sink text NOT NULL,
  epoch bigint NOT NULL,
  part integer NOT NULL,
  generation bigint NOT NULL,
  attempt bigint NOT NULL,
  claim text NOT NULL,
  owner text NOT NULL,
  pipeline text NOT NULL,
  sink_name text NOT NULL,
  run text,
  row_count bigint NOT NULL,
  written_at timestamptz NOT NULL DEFAULT now(),
  PRIMARY KEY (uid, sink, epoch, part, generation, attempt, claim))
"""


def literal(value: str | int | None) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, int):
        return str(value)
    quoted = "'" + value.replace("'", "''") + "'"
    return f" E{quoted}".replace("\\", "\\\\") if "\\" in value else quoted


class PostgresDialect(PostgresErrors, Dialect):
    names: ClassVar[NameRule] = NAMES
    dual: ClassVar[str] = ""
    place: ClassVar[str] = "ctid"
    own_columns: ClassVar[frozenset[str]] = frozenset(
        {"tableoid", "xmin", "cmin", "xmax", "cmax", "ctid", AT}
    )
    """Of every table, which can have no other column of such a name; and one of ours."""
    ddl_commits: ClassVar[bool] = False
    on_ledger_conflict: ClassVar[str] = " ON CONFLICT DO NOTHING"
    insert_alias: ClassVar[str] = " AS t"
    checks_keys_in_upsert: ClassVar[bool] = True

    def literal(self, value: str | int | None) -> str:
        return literal(value)

    def first(self, query: str, count: int) -> str:
        return f"{query} LIMIT {count}"

    server_sql: ClassVar[Mapping[str, str]] = {
        "server": "SELECT system_identifier::text FROM pg_control_system()",
        "timeline": "SELECT substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8)",
        "position": "SELECT (pg_current_wal_flush_lsn() - '0/0')::int8",
    }

    @property
    def clock(self) -> str:
        return "SELECT extract(epoch FROM clock_timestamp())"

    def create_ledger(self, schema: str) -> list[str]:
        ledger = self.quote(schema, self.ledger)
        return [
            _LEDGER.format(ledger=ledger),
            f"CREATE INDEX IF NOT EXISTS ledger_by_name ON {ledger}"
            " (pipeline, sink_name, uid, epoch)",
        ]

    moment: ClassVar[str] = "timestamptz NOT NULL DEFAULT now()"

    def add_columns(self, target: str, definitions: Sequence[str]) -> str:
        added = ", ".join(f"ADD COLUMN IF NOT EXISTS {one}" for one in definitions)
        return f"ALTER TABLE {target} {added}"

    def layout(self, query: Query, schema: str | None, table: str) -> str:
        ((digest,),) = query(self.layout_sql(schema, table))
        return str(digest)

    def layout_sql(self, schema: str | None, table: str) -> str:
        name = self.quote(*(part for part in (schema, table) if part is not None))
        return (
            "SELECT md5(string_agg(concat_ws(' ', attnum, attname, atttypid, atttypmod,"
            " attcollation), ',' ORDER BY attnum)) FROM pg_attribute"
            f" WHERE attrelid = to_regclass({literal(name)}) AND attnum > 0 AND NOT attisdropped"
        )

    def require_layout(self, layout: str, schema: str, table: str) -> str:
        """A statement that fails, to be tried again, where the table has other columns by now."""
        altered = literal(f"the columns of {schema}.{table} were altered while rows were written")
        body = (
            f"BEGIN IF ({self.layout_sql(schema, table)}) IS DISTINCT FROM {literal(layout)}"
            f" THEN RAISE EXCEPTION '%', {altered} USING ERRCODE = '{ALTERED}'; END IF; END"
        )
        return f"DO {literal(body)}"

    # Applying

    def as_text(self, expression: str) -> str:
        return f"{expression}::text"

    def first_per_key(self, rows: str, keys: str, order: str) -> str:
        return f"SELECT DISTINCT ON ({keys}) * FROM ({rows}) r ORDER BY {keys}, {order}"

    def upsert(self, apply: Apply) -> str:
        keys = ", ".join(self.quote(key.column) for key in apply.keys)
        changes = ", ".join(
            f"{self.quote(one.column)} = excluded.{self.quote(one.column)}" for one in apply.values
        )
        if not changes or apply.mode.mode == "insert_new":
            return f"{apply.insert()} ON CONFLICT ({keys}) DO NOTHING"
        changes = ", ".join([changes, *apply.live_marks()])
        unchanged = [self.differs(apply, "excluded")] if apply.mode.skip_unchanged else []
        which = " AND ".join([*apply.newer_condition("t", "excluded"), *unchanged])
        where = f" WHERE {which}" if which else ""
        return f"{apply.insert()} ON CONFLICT ({keys}) DO UPDATE SET {changes}{where}"

    def differs(self, apply: Apply, come: str) -> str:
        """By their bytes: some types have no equality, and that of others knows no case or sign."""
        columns = [self.quote(one.column) for one in apply.values]
        arrived = (
            [f"i.{apply.alias(one)}" for one in apply.values]
            if come == "i"
            else [f"{come}.{column}" for column in columns]
        )
        there = ", ".join(f"t.{column}" for column in columns)
        return f"pg_catalog.record_image_ne(ROW({there}), ROW({', '.join(arrived)}))"

    def update(self, apply: Apply, changes: Sequence[str], condition: str) -> str:
        return (
            f"UPDATE {apply.target} t SET {', '.join(changes)} FROM ({apply.winners()}) i"
            f" WHERE {apply.matches('t', 'i')} AND {condition}"
        )

    def delete(self, apply: Apply, condition: str) -> str:
        return (
            f"DELETE FROM {apply.target} t USING ({apply.winners()}) i"
            f" WHERE {apply.matches('t', 'i')} AND {condition}"
        )

    def bury(self, apply: Apply) -> str:
        columns, deletes = apply.buried()
        keys = ", ".join(self.quote(key.column) for key in apply.keys)
        version = self.quote(apply.newest[0].column)
        return (
            f"INSERT INTO {apply.tombstones} AS t ({columns}) {deletes} ON CONFLICT ({keys})"
            f" DO UPDATE SET {version} = excluded.{version}, deleted_at = DEFAULT"
            f" WHERE excluded.{version} > t.{version}"
        )

    now_constraints: ClassVar[str] = "SET CONSTRAINTS ALL IMMEDIATE"
    later_constraints: ClassVar[str] = "SET CONSTRAINTS ALL DEFERRED"

    def require_rows(self, changes: Sequence[tuple[str, int]]) -> str:
        each = " ".join(
            f"{change}; GET DIAGNOSTICS found = ROW_COUNT; IF found <> {rows} THEN"
            f" RAISE EXCEPTION '% of {rows} rows', found USING ERRCODE = '{SHORT}'; END IF;"
            for change, rows in changes
        )
        return f"DO {literal(f'DECLARE found bigint; BEGIN {each} END')}"

    # Staging tables: see `slots`

    present_sql: ClassVar[str] = (
        "SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE n.nspname = {schema} AND c.relname IN ({tables})"
    )
    columns_sql: ClassVar[str] = (
        "SELECT attname FROM pg_attribute"
        " WHERE attrelid = (quote_ident({schema}) || '.' || quote_ident({table}))::regclass"
        " AND attnum > 0 AND NOT attisdropped ORDER BY attnum"
    )

    # Single rows of staging tables

    def all_rows(self, session: Session, source: Source) -> Rows | None:
        """By blocks first: no index leads to a row, but a scan can be limited to blocks."""
        table = literal(self.quote(source.schema, source.table))
        ((blocks,),) = session.query(
            f"SELECT pg_relation_size({table}::regclass) / current_setting('block_size')::int"
        )
        return _Blocks(0, int(blocks)) if blocks else None

    def at_places(self, places: Sequence[str]) -> str:
        return f"ctid = ANY ({_tids(places)})"

    def row_text(self, session: Session, source: Source) -> str:
        names = self.fields_of(self.columns(session, source.schema, source.table))
        rows = session.query(
            f"SELECT row_to_json(q)::text FROM (SELECT {', '.join(map(self.quote, names))}"
            f" FROM {self.quote(source.schema, source.table)} s WHERE {source.condition}) q"
        )
        return str(rows[0][0]) if rows else ""

    def release_savepoint(self, session: Session, name: str) -> None:
        session.execute(f"RELEASE SAVEPOINT {name}")

    # Prepared transactions

    def transaction_name(self, handle: Handle) -> str:
        return str(handle)

    def prepared(self, session: Session, identity: Identity) -> list[InDoubt]:
        rows = session.query(
            "SELECT gid, EXTRACT(EPOCH FROM clock_timestamp() - prepared)::float8"
            " FROM pg_prepared_xacts WHERE database = current_database()"
            f" AND starts_with(gid, {literal(handle_prefix(identity.uid))}) ORDER BY gid"
        )
        listed = [
            InDoubt(
                name=gid,
                handle=Handle.parse(gid),
                age_s=age_s,
                blocks="vacuum in this database, and transactions that need the rows it has locked",
            )
            for gid, age_s in rows
        ]
        return [one for one in listed if one.handle is None or one.handle.sink == identity.tag]

    def prepared_names(self, session: Session) -> list[str]:
        rows = session.query(
            "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
        )
        return [name for (name,) in rows]

    def end_prepared(self, session: Session, name: str, *, is_commit: bool) -> None:
        session.execute(f"{'COMMIT' if is_commit else 'ROLLBACK'} PREPARED {literal(name)}")

    def end_tasks(
        self,
        session: Session,
        identity: Identity,
        epoch: EpochNumber,  # noqa: ARG002  sessions have the names of their attempts
        partitions: int,  # noqa: ARG002
        is_lost: Callable[[Handle], bool],
    ) -> None:
        prefix = literal(staging_prefix(identity))
        query = (
            "SELECT pid, application_name FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            f" AND starts_with(application_name, {prefix})"
        )
        for wait_s in _ENDING_WAITS_S:
            found = [(pid, parse_staging_name(name)) for pid, name in session.query(query)]
            lost = [pid for pid, handle in found if handle is not None and is_lost(handle)]
            if not lost:
                return
            for pid in lost:
                session.query(f"SELECT pg_terminate_backend({int(pid)})")
            time.sleep(wait_s)

    # Sessions of drivers that died

    def end_older_sessions(self, session: Session, identities: Sequence[Identity]) -> None:
        """
        A transaction has the name of the first of the sinks that share it, perhaps of one that is
        no longer declared: of other sinks only sessions of older generations are ended.
        """
        mine, tags = identities[0], {identity.tag for identity in identities}
        rows = session.query(
            "SELECT pid, application_name FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            f" AND starts_with(application_name, {literal(driver_prefix(mine.uid))})"
            " AND state IN ('active', 'idle in transaction', 'idle in transaction (aborted)')"
        )
        for pid, name in rows:
            if _is_older(name, mine.generation, tags):
                session.query(f"SELECT pg_terminate_backend({int(pid)})")


def driver_prefix(uid: Uid) -> str:
    """What the names of a pipeline's sessions begin with: see `client.driver_name`."""
    return f"epochal-{uid}-"


def _is_older(session: str, generation: Generation, tags: Collection[SinkTag]) -> bool:
    found = _DRIVER_NAME.fullmatch(session)
    if found is None:
        return False
    at = int(found["generation"])
    return at < generation or (at == generation and found["sink"] in tags)


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Rows of a staging table by the blocks of its file."""

    first: int
    end: int
    only: ClassVar[None] = None

    @property
    def condition(self) -> str:
        return f"s.ctid >= '({self.first},0)'::tid AND s.ctid < '({self.end},0)'::tid"

    def halves(self, session: Session, source: Source) -> Sequence[Rows]:
        if self.end - self.first > 1:
            middle = (self.first + self.end) // 2
            return _Blocks(self.first, middle), _Blocks(middle, self.end)
        table = DIALECT.quote(source.schema, source.table)
        rows = session.query(f"SELECT s.ctid::text FROM {table} s WHERE {source.condition}")
        return (_Places(tuple(place for (place,) in rows)),) if rows else ()


@dataclass(frozen=True, slots=True)
class _Places:
    """Rows of one block, each by its place."""

    places: tuple[str, ...]

    @property
    def condition(self) -> str:
        return f"s.ctid = ANY ({_tids(self.places)})"

    @property
    def only(self) -> str | None:
        return self.places[0] if len(self.places) == 1 else None

    def halves(self, session: Session, source: Source) -> Sequence[Rows]:  # noqa: ARG002
        middle = len(self.places) // 2
        return _Places(self.places[:middle]), _Places(self.places[middle:])


def _tids(places: Sequence[str]) -> str:
    listed = ", ".join(f'"{place}"' for place in places)
    return f"'{{{listed}}}'::tid[]"


DIALECT = PostgresDialect()
