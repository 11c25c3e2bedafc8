"""A store in a PostgreSQL table, for drivers that can't write to the checkpoint's own store.

    postgresql://etl@db/shop#orders

One table holds any number of stores; the part behind `#` names one. A put is one INSERT, durable
when it is answered, as `synchronous_commit` is never weaker than `on` here; reads go to the primary
only. Passwords come from the URL, which is never shown, or from where libpq looks: PGPASSWORD, a
pgpass or a service file. Nothing is created before the first put. The format of the table is in its
comment; a table without one has format 1.
"""

from __future__ import annotations

import hashlib
import os
import re
import select
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, LiteralString, TypeVar
from urllib.parse import unquote

from epochal.errors import (
    EpochalError,
    Misconfigured,
    OutcomeUnknown,
    TryAgain,
    not_installed,
    require_known_format,
)
from epochal.storage.store import Entry, checked, gone

try:
    import psycopg
    from psycopg import sql
    from psycopg.conninfo import conninfo_to_dict, make_conninfo
    from psycopg.errors import Diagnostic
except ImportError as error:
    raise not_installed("a store in PostgreSQL", error.name, "postgres") from error

T = TypeVar("T")

_SCHEMA = "epochal"
_TABLE = "store"
_FORMAT = 1
_FORMAT_COMMENT = re.compile(r"format (\d+)")
_CONNECT_TIMEOUT_S = 10
_STATEMENT_TIMEOUT_S = 30
_TRUSTED_S = 1.0
"""A connection that was used so recently is not asked whether it is alive."""
_DEAD_HOST_S = 10
_DEAD_HOST: Mapping[str, int] = {
    "tcp_keepalives_idle": 5,
    "tcp_keepalives_interval": 1,
    "tcp_keepalives_count": 5,
    "tcp_user_timeout": _DEAD_HOST_S * 1000,
}
"""By these the server notices that the machine of a session is gone."""
_MISSING = frozenset({"42P01", "3F000"})
_CREATE = """
SELECT pg_advisory_xact_lock(1701867363);
CREATE SCHEMA IF NOT EXISTS {schema};
CREATE TABLE IF NOT EXISTS {table} (
  store text COLLATE "C" NOT NULL, key text COLLATE "C" NOT NULL, content bytea NOT NULL,
  modified_at timestamptz NOT NULL DEFAULT clock_timestamp(), PRIMARY KEY (store, key))
"""
_COMMENT = """
SELECT obj_description(c.oid, 'pg_class') FROM pg_class c JOIN pg_namespace n
ON n.oid = c.relnamespace WHERE n.nspname = %s AND c.relname = %s
"""
_PUT = """
INSERT INTO {table} (store, key, content) VALUES (%s, %s, %s) ON CONFLICT (store, key)
DO UPDATE SET content = EXCLUDED.content, modified_at = EXCLUDED.modified_at
"""
_PUT_IF_ABSENT = """
INSERT INTO {table} (store, key, content) VALUES (%s, %s, %s) ON CONFLICT DO NOTHING
"""
_IN_FOLDER = """
FROM (SELECT *, substr(key, %s) AS rest FROM {table}
      WHERE store = %s AND key > %s AND starts_with(key, %s)) k
"""
_ENTRIES = """
SELECT rest, octet_length(content), extract(epoch FROM modified_at)::float8
"""
_ENTRY = """
SELECT octet_length(content), extract(epoch FROM modified_at)::float8
FROM {table} WHERE store = %s AND key = %s
"""

_LATER: tuple[type[EpochalError], str] = (TryAgain, "")
_ERRORS: Mapping[str | None, tuple[type[EpochalError], str]] = {
    None: _LATER,  # no answer at all
    "08": _LATER,  # connections
    "53": _LATER,  # too little of something: disk, memory, connections
    "57": _LATER,  # an operator intervenes
    "40": _LATER,  # rolled back
    "55": _LATER,  # locked, or not in the state that is needed
}
"""What a class of SQLSTATEs means for the caller; every other one is for a person."""
_SYNC_REPLICATION = "syncrep.c"
"""The part of the server that a warning is of."""
_REPLY_LOST = frozenset({None, "08", "57"})
_RIGHTS = (
    "at the first start the role needs CREATE on the database, or another makes it: afterwards "
    "GRANT USAGE ON SCHEMA {0}, and GRANT SELECT, INSERT, UPDATE, DELETE ON {0}.{1}"
)
_UNREACHABLE_FOR_A_PERSON = (
    "authentication failed",
    "does not exist",
    "no password",
    "pg_hba.conf",
)


class PostgresStore:
    """Keys as rows of one table. Processes may race for them."""

    def __init__(
        self,
        url: str,
        *,
        schema: str = _SCHEMA,
        table: str = _TABLE,
        keeps_connection: bool = True,
    ) -> None:
        address, mark, name = url.partition("#")
        if not mark or not name:
            raise Misconfigured(
                "a store in PostgreSQL needs a name of its own in the database",
                "postgresql://user@host/database#name-of-the-pipeline",
            )
        self._url = url
        self._name = unquote(name)
        self._keeps_connection = keeps_connection
        self._parameters = _parsed(address)
        self._schema_name, self._table_name = schema, table
        self._schema = sql.Identifier(schema)
        self._table = sql.Identifier(schema, table)
        self._lock = threading.Lock()
        self._connection: psycopg.Connection[Any] | None = None
        self._used_s = 0.0
        self._queries: dict[str, bytes] = {}
        self._process = os.getpid()

    @property
    def location(self) -> str:
        given = self._parameters
        host = given.get("host") or given.get("service") or "localhost"
        port = f":{given['port']}" if "port" in given else ""
        part = self._table_name.removeprefix(_TABLE).replace("_", "/")
        return f"postgresql://{host}{port}/{given.get('dbname', '')}#{self._name}{part}"

    def put(self, key: str, content: bytes) -> None:
        self._insert(_PUT, key, content)

    def put_if_absent(self, key: str, content: bytes) -> bool:
        return self._insert(_PUT_IF_ABSENT, key, content) == 1

    def read(self, key: str) -> bytes | None:
        query = "SELECT content FROM {table} WHERE store = %s AND key = %s"
        rows = self._select(query, self._name, checked(key))
        return bytes(rows[0][0]) if rows else None

    def read_range(self, key: str, start: int, end: int) -> bytes:
        query = (
            "SELECT substring(content FROM %s FOR %s) FROM {table} WHERE store = %s AND key = %s"
        )
        rows = self._select(query, start + 1, end - start, self._name, checked(key))
        if not rows:
            raise gone(self.location, key)
        return bytes(rows[0][0])

    def names(self, folder: str = "", after: str = "") -> Sequence[str]:
        query = f"SELECT rest {_IN_FOLDER} WHERE strpos(rest, '/') = 0 ORDER BY key"
        return [name for (name,) in self._select(query, *self._in(folder, after))]

    def read_after(self, folder: str, after: str, most: int) -> Mapping[str, bytes]:
        query = (
            f"SELECT rest, content {_IN_FOLDER} WHERE strpos(rest, '/') = 0 ORDER BY key LIMIT %s"
        )
        rows = self._select(query, *self._in(folder, after), most)
        return {name: bytes(content) for name, content in rows}

    def folders(self, folder: str = "") -> Sequence[str]:
        query = (
            f"SELECT DISTINCT substr(rest, 1, strpos(rest, '/') - 1) {_IN_FOLDER}"
            " WHERE strpos(rest, '/') > 0 ORDER BY 1"
        )
        return [name for (name,) in self._select(query, *self._in(folder))]

    def entries(self, folder: str = "") -> Sequence[Entry]:
        query = f"{_ENTRIES} {_IN_FOLDER} WHERE strpos(rest, '/') = 0 ORDER BY key"
        return [_entry(*row) for row in self._select(query, *self._in(folder))]

    def entry(self, key: str) -> Entry | None:
        rows = self._select(_ENTRY, self._name, checked(key))
        return _entry(key.rpartition("/")[2], *rows[0]) if rows else None

    def delete(self, keys: Sequence[str]) -> None:
        query = "DELETE FROM {table} WHERE store = %s AND key = ANY(%s) RETURNING 1"
        self._select(query, self._name, [checked(key) for key in keys])

    def beside(self, name: str) -> PostgresStore:
        """A table of its own, and a connection for each call."""
        table = f"{self._table_name}_{name}"
        return PostgresStore(
            self._url, schema=self._schema_name, table=table, keeps_connection=False
        )

    def lease(self) -> PostgresLease:
        return PostgresLease(self._parameters, self._name, self.location)

    def close(self) -> None:
        with self._lock:
            self._hang_up()

    def _in(self, folder: str, after: str = "") -> tuple[int, str, str, str]:
        start = f"{folder}/" if folder else ""
        return len(start) + 1, self._name, start + after, start

    def _insert(self, statement: str, key: str, content: bytes) -> int:
        values = (self._name, checked(key), content)

        def insert(connection: psycopg.Connection[Any]) -> int:
            return connection.execute(self._sql(statement), values).rowcount

        def create_and_insert(connection: psycopg.Connection[Any]) -> int:
            try:
                return insert(connection)
            except psycopg.Error as error:
                if error.sqlstate not in _MISSING:
                    raise
            with connection.transaction():
                connection.execute(self._sql(_CREATE))
            return insert(connection)

        def put(connection: psycopg.Connection[Any]) -> int:
            with self._replicated(connection, key):
                count = create_and_insert(connection)
                if not count:
                    _commit_something(connection)
                return count

        return self._ask(put, "write to", is_put=True)

    @contextmanager
    def _replicated(self, connection: psycopg.Connection[Any], key: str) -> Iterator[None]:
        """
        Where standbys are synchronous, a commit waits for them. Somebody may cancel that wait: the
        server then reports success, with a warning, and what was put is lost if a standby takes
        over. A key that is there already may be such a one, so a put that finds it waits, too.
        """
        warnings: list[str] = []

        def note(found: Diagnostic) -> None:
            # It has no code of its own, and its text goes by the server's language.
            if found.source_file == _SYNC_REPLICATION:
                warnings.append(found.message_primary or "")

        connection.add_notice_handler(note)
        try:
            yield
        finally:
            connection.remove_notice_handler(note)
        if warnings:
            raise OutcomeUnknown(f"{key} of {self.location} may be lost: {warnings[0]}")

    def _select(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        def ask(connection: psycopg.Connection[Any]) -> list[tuple[Any, ...]]:
            try:
                return connection.execute(self._sql(query), values, binary=True).fetchall()
            except psycopg.Error as error:
                # Nobody has put anything yet.
                if error.sqlstate in _MISSING:
                    return []
                raise

        return self._ask(ask, "read from")

    def _sql(self, query: str) -> bytes:
        found = self._queries.get(query)
        if found is None:
            made = sql.SQL(query).format(table=self._table, schema=self._schema)
            found = self._queries[query] = made.as_bytes(None)
        return found

    def _ask(
        self, ask: Callable[[psycopg.Connection[Any]], T], verb: str, *, is_put: bool = False
    ) -> T:
        with self._connected() as connection:
            try:
                return ask(connection)
            except psycopg.Error as error:
                if connection.closed or error.sqlstate is None:
                    connection.close()
                raise self._error(error, verb, is_put=is_put) from error

    @contextmanager
    def _connected(self) -> Iterator[psycopg.Connection[Any]]:
        """The kept connection, under its lock, or one for this call only."""
        if self._keeps_connection:
            with self._lock:
                yield self._kept()
            return
        connection = self._connect()
        try:
            yield connection
        finally:
            connection.close()

    def _kept(self) -> psycopg.Connection[Any]:
        """A forked child must not use the connection of its parent."""
        if self._process != os.getpid():
            self._connection, self._process = None, os.getpid()
        is_idle = time.monotonic() - self._used_s > _TRUSTED_S
        if self._connection is None or not _is_alive(self._connection, is_idle=is_idle):
            self._hang_up()
            self._connection = self._connect()
        self._used_s = time.monotonic()
        return self._connection

    def _connect(self) -> psycopg.Connection[Any]:
        try:
            connection = self._opened()
        except psycopg.Error as error:
            raise unreachable(error, self.location, self._parameters) from None
        try:
            self._require_format(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _require_format(self, connection: psycopg.Connection[Any]) -> None:
        """From the catalog, which every role may read."""
        try:
            rows = connection.execute(_COMMENT, [self._schema_name, self._table_name]).fetchall()
        except psycopg.Error as error:
            raise self._error(error, "read from", is_put=False) from error
        found = _FORMAT_COMMENT.search(rows[0][0] or "") if rows else None
        require_known_format(self.location, int(found[1]) if found else _FORMAT, _FORMAT)

    def _opened(self) -> psycopg.Connection[Any]:
        connection = psycopg.connect(
            make_conninfo(
                **{
                    "keepalives_idle": "30",
                    "tcp_user_timeout": "60000",
                    **self._parameters,
                    "application_name": "epochal-store",
                    "connect_timeout": str(_CONNECT_TIMEOUT_S),
                    "target_session_attrs": "read-write",
                }
            ),
            autocommit=True,
            prepare_threshold=None,
        )
        connection.execute(f"SET statement_timeout = '{_STATEMENT_TIMEOUT_S}s'")
        connection.execute(
            "SELECT set_config('synchronous_commit', 'on', false)"
            " WHERE current_setting('synchronous_commit') IN ('off', 'local')"
        )
        return connection

    def _hang_up(self) -> None:
        if self._connection is not None:
            with suppress(psycopg.Error):
                self._connection.close()
            self._connection = None

    def _error(self, error: psycopg.Error, verb: str, *, is_put: bool) -> EpochalError:
        reason = " ".join((error.diag.message_primary or str(error)).split())
        fact = f"cannot {verb} {self.location}: {reason}"
        state_class = None if error.sqlstate is None else error.sqlstate[:2]
        if is_put and state_class in _REPLY_LOST:
            return OutcomeUnknown(fact)
        if state_class not in _ERRORS:
            hint = _RIGHTS.format(self._schema_name, self._table_name)
            return Misconfigured(f"{fact} [{error.sqlstate}]", hint)
        kind, hint = _ERRORS[state_class]
        return kind(fact, hint)


class PostgresLease:
    """
    An advisory lock of a session. The server gives it up as soon as it learns that the session has
    ended: at once where the process died, after `_DEAD_HOST_S` where the whole machine did.
    """

    look_every_s = 0.5
    renew_every_s = 2.0

    def __init__(self, parameters: Mapping[str, str], name: str, location: str) -> None:
        self._parameters = parameters
        self.location = location
        digest = hashlib.sha256(f"epochal lease {name}".encode()).digest()
        self._key = int.from_bytes(digest[:8], "big", signed=True)
        self._connection: psycopg.Connection[Any] | None = None
        self._is_held = False

    def acquire(self, holder: str) -> bool:
        del holder
        self._is_held = bool(self._ask("SELECT pg_try_advisory_lock(%s)"))
        return self._is_held

    def renew(self) -> bool:
        if self._is_held:
            # Of this session: where the connection was lost, the next one holds nothing.
            self._is_held = self._connection is not None and bool(
                self._ask(
                    "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted"
                    " AND pid = pg_backend_pid() AND (classid::bigint << 32 | objid::bigint) = %s"
                )
            )
        return self._is_held

    def release(self) -> None:
        self._is_held = False
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(psycopg.Error):
                connection.close()

    def close(self) -> None:
        self.release()

    def _ask(self, query: LiteralString) -> int:
        try:
            if self._connection is None:
                self._connection = self._opened()
            row = self._connection.execute(query, (self._key,)).fetchone()
        except psycopg.Error as error:
            # A session that is lost has lost its lock, and so has its holder.
            if self._connection is not None:
                self._connection.close()
            self._connection = None
            raise unreachable(error, self.location, self._parameters) from None
        return 0 if row is None else int(row[0])

    def _opened(self) -> psycopg.Connection[Any]:
        connection = psycopg.connect(
            make_conninfo(
                **{
                    "keepalives_idle": "5",
                    "tcp_user_timeout": str(_DEAD_HOST_S * 1000),
                    **self._parameters,
                    "application_name": "epochal-lease",
                    "connect_timeout": str(_CONNECT_TIMEOUT_S),
                    "target_session_attrs": "read-write",
                }
            ),
            autocommit=True,
            prepare_threshold=None,
        )
        (pid,) = connection.execute("SELECT pg_backend_pid()").fetchone() or (0,)
        if pid != connection.info.backend_pid:
            connection.close()
            raise Misconfigured(
                f"{self.location}: a pooler is in between, where a lock of a session is nobody's",
                "give the lease the address of the server itself: standby='postgresql://…#name'",
            )
        for setting, value in _DEAD_HOST.items():
            connection.execute(sql.SQL("SET {} = {}").format(sql.Identifier(setting), value))
        return connection


_LIBPQ_NAMES_HOST = re.compile(
    r'(?:connection failed: )?connection to server at "[^"]*"(?: \([^)]*\))?, port \d+ failed: '
    r"(?:FATAL: )?"
)
_LIBPQ_ASKS = " Is the server running on that host and accepting TCP/IP connections?"


def connection_trouble(error: Exception) -> str:
    """Why libpq can't connect, on one line, and without the host where it names only one."""
    text = " ".join(str(error).split()).replace(_LIBPQ_ASKS, "")
    return _LIBPQ_NAMES_HOST.sub("", text) if len(_LIBPQ_NAMES_HOST.findall(text)) == 1 else text


def unreachable(error: psycopg.Error, location: str, parameters: Mapping[str, str]) -> EpochalError:
    """What a connection that can't be opened means for the caller, without its password."""
    reason = connection_trouble(error)
    password = parameters.get("password")
    reason = reason.replace(password, "…") if password else reason
    fact = f"cannot reach {location}: {reason}"
    if any(sign in reason for sign in _UNREACHABLE_FOR_A_PERSON):
        return Misconfigured(fact, "check user, password and database of the store's URL")
    return TryAgain(fact, "check host and port of the store's URL, and that the server is up")


def _commit_something(connection: psycopg.Connection[Any]) -> None:
    """A commit, which waits for all before it; none where the server does not let us write so."""
    with suppress(psycopg.errors.UndefinedFunction, psycopg.errors.InsufficientPrivilege):
        connection.execute("SELECT pg_logical_emit_message(true, 'epochal', '')")


def _is_alive(connection: psycopg.Connection[Any], *, is_idle: bool) -> bool:
    """
    A connection that died since the last epoch must not make a put's outcome unknown. One that the
    server has ended can be read: nothing else comes unasked. One that is cut without a sign, as
    firewalls do with idle ones, is found by asking, which costs a round trip.
    """
    try:
        poll = select.poll()
        poll.register(connection.fileno(), select.POLLIN)
        if poll.poll(0):
            return False
        if is_idle:
            connection.execute("")
    except (psycopg.Error, OSError):
        return False
    return True


def _entry(name: str, size: int, modified_at: float) -> Entry:
    return Entry(name=name, size=size, modified_at=modified_at)


def _parsed(url: str) -> dict[str, str]:
    try:
        return {key: str(value) for key, value in conninfo_to_dict(url).items() if value}
    except psycopg.Error:
        # The message may quote a part of the URL, perhaps its password.
        raise Misconfigured(
            "the URL of the store can't be read", "postgresql://user@host:5432/database#name"
        ) from None
