"""Connections: the driver's pool, over psycopg, and each task's own, over ADBC or psycopg.

Nothing relies on the state of a session, so that a transaction pooler may be in between: limits are
set for each transaction, and statements are not prepared under a name. Every connection requires a
server that takes writes, so that a proof is never read on a replica (I9).

A task's connection stays open in the reused Python worker. Columns are encoded by ADBC, which sends
nothing but Arrow; rows that arrive as bytes are sent as they are, by psycopg.
"""

from __future__ import annotations

import atexit
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar
from weakref import WeakKeyDictionary

import psycopg
import psycopg_pool
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from epochal.errors import Misconfigured, TryAgain
from epochal.kit.secrets import HeldSecret, Secret
from epochal.kit.sql.client import (
    Answer,
    DatabaseServer,
    IdleConnections,
    Session,
    SharedConnections,
)
from epochal.sinks.postgres.errors import ERRORS
from epochal.terms import Identity

if TYPE_CHECKING:
    import pyarrow as pa

BEGIN = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE"
_COPY_HEADER = b"PGCOPY\n\xff\r\n\0" + bytes(8)
"""The signature, and neither flags nor an extension."""
_COPY_TRAILER = b"\xff\xff"
_FRESH_S = 2.0
_SILENT_MAX_S = 1.0
"""How long after its last use a connection is taken to answer still."""
_DEFAULTS: Mapping[str, str] = {
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
    "tcp_user_timeout": "60000",
}
_SERVER_KEEPALIVES = "".join(
    f", set_config('tcp_keepalives_{name}', '{value}', true)"
    for name, value in {"idle": 30, "interval": 10, "count": 3}.items()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Server(DatabaseServer):
    """Where the server is."""

    parameters: tuple[tuple[str, str], ...]

    def parameter(self, name: str) -> str:
        return dict(self.parameters).get(name, "")

    @property
    def place(self) -> str:
        """For people: host, port and database."""
        host = self.parameter("host") or self.parameter("service") or "localhost"
        port = self.parameter("port")
        return f"{host}{':' + port if port else ''}/{self.parameter('dbname')}"

    def conninfo(self, application: str) -> str:
        """Everything libpq needs, secrets revealed: never kept, shown or pickled."""
        given = dict(self.parameters)
        if self.password is not None:
            given["password"] = self.password.reveal()
        return make_conninfo(
            **{
                **_DEFAULTS,
                **given,
                "application_name": application,
                # Rows are sent as UTF-8, whatever the database is kept in: without this the
                # server would take them for its own encoding.
                "client_encoding": "UTF8",
                "connect_timeout": str(max(2, round(self.connect_timeout_s))),
                "target_session_attrs": "read-write",
            }
        )

    def settings(
        self,
        *,
        lock_wait_s: float | None = None,
        idle_max_s: float | None = None,
        application: str = "",
    ) -> str:
        """
        Limits of this transaction, with this lock timeout, at most the declared one.

        A weaker synchronous_commit than `on` would forget what was reported as durable, and fewer
        digits of floats would be lost on their way through text.
        The server looks after its client, too: a machine that is gone keeps no locks.
        """
        declared = self.lock_timeout_s
        wait_s = declared if lock_wait_s is None else min(lock_wait_s, declared)
        return (
            f"SELECT set_config('statement_timeout', '{round(self.statement_timeout_s * 1000)}',"
            f" true), set_config('lock_timeout', '{max(1, round(wait_s * 1000))}', true),"
            " set_config('TimeZone', 'UTC', true), set_config('extra_float_digits', '1', true),"
            " set_config('synchronous_commit', CASE current_setting('synchronous_commit')"
            " WHEN 'off' THEN 'on'"
            " ELSE current_setting('synchronous_commit') END, true)"
            f"{_SERVER_KEEPALIVES}{_idle_settings(idle_max_s)}"
            + (f", set_config('application_name', '{application}', true)" if application else "")
        )


def _idle_settings(idle_max_s: float | None) -> str:
    """`transaction_timeout` came with version 17."""
    if idle_max_s is None:
        return ""
    return (
        f", set_config('idle_in_transaction_session_timeout', '{round(idle_max_s * 1000)}', true),"
        " CASE WHEN current_setting('transaction_timeout', true) IS NOT NULL"
        " THEN set_config('transaction_timeout', '0', true) END"
    )


def parse_url(kind: str, url: str, password: Secret | None) -> tuple[dict[str, str], Secret | None]:
    """The parameters in a URL or conninfo string, its password set apart."""
    try:
        parameters = {key: str(value) for key, value in conninfo_to_dict(url).items() if value}
    except psycopg.Error as error:
        # The message may quote a part of what was given, perhaps its password.
        raise Misconfigured(
            f"{kind}: the url can't be read ({type(error).__name__})",
            "postgresql://user@host:5432/database, or host=… dbname=… user=…",
        ) from None
    found = parameters.pop("password", None)
    if found is not None and password is not None:
        raise Misconfigured(
            f"{kind}: both the url and password= give a password", "leave it out of the url"
        )
    return parameters, HeldSecret(found) if found is not None else password


class PostgresSession(Session):
    """
    One connection of the pool, in autocommit until `begin`.

    What is deferred is sent in one message with the next statement: the server runs them in order
    up to the first that fails. A COMMIT is never part of one. It is a message of the simple
    protocol, not a pipeline: psycopg ends a pipeline with a Flush, and a server that hears anything
    after its last answer stops the clock of `idle_in_transaction_session_timeout`.
    """

    def __init__(
        self,
        connection: psycopg.Connection[Any],
        server: Server,
        shared: PostgresConnections,
        *,
        application: str,
        is_unasked: bool,
    ) -> None:
        """`application`: what its transactions are found by."""
        self.connection = connection
        self.is_unasked = is_unasked
        self._server = server
        self._shared = shared
        self._application = application
        self._deferred: list[str] = []

    def execute(self, statement: str) -> int:
        return self.run_all([statement])[0].rows_changed

    def query(self, statement: str) -> list[tuple[Any, ...]]:
        return self.run_all([statement])[0].rows

    def run_all(self, statements: Sequence[str]) -> list[Answer]:
        waiting, self._deferred = self._deferred, []
        answers = run_together(self.connection, [*waiting, *statements])
        if answers:
            self.is_unasked = False
        return answers[len(waiting) :]

    def execute_all(self, statements: Sequence[str]) -> list[int]:
        return [answer.rows_changed for answer in self.run_all(statements)]

    def query_all(self, statements: Sequence[str]) -> list[list[tuple[Any, ...]]]:
        return [answer.rows for answer in self.run_all(statements)]

    def defer(self, statement: str) -> None:
        self._deferred.append(statement)

    def flush(self) -> None:
        self.run_all([])

    def begin(self, *, lock_wait_s: float | None = None, idle_max_s: float | None = None) -> None:
        self.defer(BEGIN)
        settings = self._server.settings(
            lock_wait_s=lock_wait_s, idle_max_s=idle_max_s, application=self._application
        )
        self.defer(settings)

    def give_back(self) -> None:
        self._shared.give_back(self.connection)

    def wait_for_locks(self, seconds: float | None = None) -> None:
        self.defer(self._server.settings(lock_wait_s=seconds))

    def commit(self) -> None:
        self.flush()
        done = self.connection.execute("COMMIT").statusmessage
        if done != "COMMIT":
            raise TryAgain(f"COMMIT on {self._server.place}: the server answered {done}")

    def roll_back(self) -> None:
        self._deferred = []
        try:
            self.connection.execute("ROLLBACK")
        except psycopg.Error:
            with suppress(psycopg.Error):
                self.connection.close()


def run_together(connection: psycopg.Connection[Any], statements: Sequence[str]) -> list[Answer]:
    """Run statements in one round trip; the server stops at the first that fails."""
    if not statements:
        return []
    cursor = connection.execute(";\n".join(statements).encode())
    answers = [_answer(cursor)]
    while cursor.nextset():
        answers.append(_answer(cursor))
    return answers


def _answer(cursor: psycopg.Cursor[Any]) -> Answer:
    rows = cursor.fetchall() if cursor.description is not None else []
    return Answer(rows_changed=cursor.rowcount, rows=rows)


class PostgresPool:
    """One sink's door to the driver's connections."""

    def __init__(self, server: Server, identity: Identity) -> None:
        self._server = server
        self._identity = identity
        self._shared: PostgresConnections | None = None

    def take(self) -> PostgresSession:
        if self._shared is None:
            name = driver_name(self._identity)
            self._shared = _shared.join(
                self._identity, self._server, lambda: PostgresConnections(self._server, name)
            )
        name = driver_name(self._identity, self._identity.tag)
        return self._shared.take(name)

    def give_back(self, session: Session) -> None:
        if isinstance(session, PostgresSession):
            session.give_back()

    def act_for(self, identities: Sequence[Identity]) -> None:
        """Nothing to do: sessions are found by the uid in their application_name."""

    def close(self) -> None:
        if self._shared is not None:
            self._shared = None
            _shared.leave(self._identity, self._server)


class PostgresConnections:
    """
    The driver's connections to one server. Opened on first use; errors report why connecting
    failed.
    """

    def __init__(self, server: Server, application: str) -> None:
        self._server = server
        self._application = application
        self._opening = threading.Lock()
        self._used_s: WeakKeyDictionary[psycopg.Connection[Any], float] = WeakKeyDictionary()
        self._doubted_s = 0.0
        """When a connection was found broken: others may be, too, that were idle then."""
        self._pool: psycopg_pool.ConnectionPool[psycopg.Connection[Any]] | None = None
        self._size_max = server.pool_max

    def resize(self, members: int) -> None:
        with self._opening:
            self._size_max = self._server.pool_max + members - 1
            if self._pool is not None:
                self._pool.resize(self._server.pool_min, self._size_max)

    def take(self, application: str) -> PostgresSession:
        connection = self._connection(self._opened())
        is_unasked = self._used_s.pop(connection, 0.0) > self._doubted_s
        return PostgresSession(
            connection, self._server, self, application=application, is_unasked=is_unasked
        )

    def _connection(
        self, pool: psycopg_pool.ConnectionPool[psycopg.Connection[Any]]
    ) -> psycopg.Connection[Any]:
        """
        One of the pool's that answers. While a server can't be reached the pool connects again in
        silence until the time is over; so after a moment it is asked why, and the answer is raised.

        A pool that checks its connections itself waits for a second after two that were cut: all
        were, by a failover, and new ones may be cut meanwhile.
        """
        ends_s = time.monotonic() + self._server.connect_timeout_s
        while True:
            left_s = ends_s - time.monotonic()
            try:
                connection = pool.getconn(timeout=max(0.0, min(left_s, _SILENT_MAX_S)))
            except psycopg_pool.PoolTimeout as error:
                if left_s <= _SILENT_MAX_S:
                    raise self._reason(pool, error) from error
                if not _is_full(pool):
                    self._connect_once()
            else:
                if self._answers(connection):
                    return connection
                connection.close()
                pool.putconn(connection)  # which opens another one

    def give_back(self, connection: psycopg.Connection[Any]) -> None:
        if connection.closed:
            self._doubted_s = time.monotonic()
        self._used_s[connection] = time.monotonic()
        if self._pool is None:
            connection.close()
        else:
            self._pool.putconn(connection)

    def _answers(self, connection: psycopg.Connection[Any]) -> bool:
        """It is asked, unless it answered a moment ago: that costs a round trip."""
        used_s = self._used_s.get(connection, 0.0)
        if used_s > self._doubted_s and time.monotonic() - used_s <= _FRESH_S:
            return True
        self._used_s.pop(connection, None)
        try:
            psycopg_pool.ConnectionPool.check_connection(connection)
        except psycopg.Error:
            return False
        return True

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _opened(self) -> psycopg_pool.ConnectionPool[psycopg.Connection[Any]]:
        with self._opening:
            if self._pool is None:
                self._connect_once()
                self._pool = psycopg_pool.ConnectionPool(
                    lambda: self._server.conninfo(self._application),
                    kwargs={"autocommit": True, "prepare_threshold": None},
                    min_size=min(self._server.pool_min, self._size_max),
                    max_size=self._size_max,
                    timeout=self._server.connect_timeout_s,
                    max_idle=self._server.idle_max_s,
                    max_lifetime=self._server.lifetime_max_s,
                    configure=self._configure,
                    name=self._application,
                    open=True,
                )
            return self._pool

    def _connect_once(self) -> None:
        """A pool only times out: connect once without it, for the error that says why."""
        doing = f"can't connect to {self._server.place}"
        try:
            with psycopg.connect(
                self._server.conninfo(self._application), autocommit=True
            ) as connection:
                self._configure(connection)
        except psycopg.Error as error:
            raise connect_error(error, doing, self._server) from None

    def _configure(self, connection: psycopg.Connection[Any]) -> None:
        self._server.run_session_sql(lambda one: connection.execute(one.encode()), ERRORS)

    def _reason(
        self, pool: psycopg_pool.ConnectionPool[Any], error: psycopg_pool.PoolTimeout
    ) -> Exception:
        if _is_full(pool):
            return TryAgain(
                f"all {pool.max_size} connections to {self._server.place} are in use, for "
                f"{self._server.connect_timeout_s:.0f} s",
                "a larger pool_max, or find what holds them: pg_stat_activity, application_name "
                f"{self._application}",
            )
        self._connect_once()
        return ERRORS.classify(error, f"can't connect to {self._server.place}")


def driver_name(identity: Identity, tag: str = "") -> str:
    """
    The application_name of a driver's sessions; in a transaction, with the tag of its sink. The
    driver after it finds them by this.
    """
    sink = f"s{tag}-" if tag else ""
    return f"epochal-{identity.uid}-{sink}g{identity.generation}"


_shared: SharedConnections[PostgresConnections] = SharedConnections()


def _is_full(pool: psycopg_pool.ConnectionPool[Any]) -> bool:
    """All connections that it may have are there, and in use."""
    numbers = pool.get_stats()
    return numbers.get("pool_available", 0) == 0 and numbers.get("pool_size", 0) >= pool.max_size


def connect_error(error: Exception, doing: str, server: Server) -> Exception:
    """libpq gives no SQLSTATE when it can't connect; only some failures are transient."""
    from epochal.storage.postgres import connection_trouble  # noqa: PLC0415  workers seldom fail

    text = server.without_secret(connection_trouble(error))
    for mark, hint in _CONNECT_HINTS.items():
        if mark in text:
            return Misconfigured(f"{doing}: {text}", hint)
    known = (hint for mark, hint in _TRANSIENT_HINTS.items() if mark in text)
    return TryAgain(f"{doing}: {text}", next(known, _AWAY_HINT))


_FULL = (
    "all connections that the server or the role may have are in use: end some (pg_stat_activity "
    "shows whose), raise max_connections or the role's CONNECTION LIMIT, or a smaller pool_max"
)
_TRANSIENT_HINTS = {
    "too many clients": _FULL,
    "too many connections": _FULL,
    "remaining connection slots": _FULL,
    # Of a standby, too, which may be about to take over.
    "session is read-only": "either this is a standby, and the url must reach the primary, or the "
    "role or database is read-only: ALTER ROLE … SET default_transaction_read_only = off",
}
_CONNECT_HINTS = {
    "authentication failed": "check user and password: password=env(…) or file(…), or pgpass",
    "no password supplied": "password=env(…) or file(…), or a pgpass or service file",
    "fe_sendauth": "password=env(…) or file(…), or a pgpass or service file",
    "does not exist": "create it, or name another one in the url",
    "no pg_hba.conf entry": "the server does not let this host, user and database in: pg_hba.conf",
    "permission denied": "GRANT CONNECT ON DATABASE … TO the role of this sink",
    "is not permitted to log in": "ALTER ROLE … LOGIN",
    "definition of service": "pg_service.conf has no such service on this machine",
    "could not translate host name": "check the host in the url",
}
_AWAY_HINT = "check host and port in the url, and that the server is up"


C = TypeVar("C")


class TaskConnection(ABC, Generic[C]):
    """One connection of a task; `done` keeps it for the next task of this process."""

    _kept: ClassVar[IdleConnections[Any]]
    """Whether one still answers shows with its first statement, at no extra cost: see `renew`."""

    def __init__(self, server: Server, application: str) -> None:
        self._server = server
        self._application = application
        kept: C | None = self._kept.take_kept(
            self._key, idle_max_s=server.idle_max_s, lifetime_max_s=server.lifetime_max_s
        )
        self.is_reused = kept is not None
        self._connection: C = self._born() if kept is None else kept

    @property
    def _key(self) -> object:
        return self._server, self._application

    @property
    def _conninfo(self) -> str:
        return self._server.conninfo(self._application)

    @abstractmethod
    def _connect(self) -> C: ...

    @abstractmethod
    def _run(self, connection: C, statement: str) -> None: ...

    def execute(self, statement: str) -> None:
        self._run(self._connection, statement)

    @abstractmethod
    def ask(self, *statements: str) -> list[tuple[Any, ...]]:
        """Run statements, in one round trip where the library can; the rows of the last one."""

    def renew(self) -> None:
        """A kept connection turned out to be dead: open another one."""
        self._kept.close(self._connection)
        self._connection = self._born()
        self.is_reused = False

    def done(self) -> None:
        self._kept.keep(self._key, self._connection)

    def close(self) -> None:
        self._kept.close(self._connection)

    def _born(self) -> C:
        connection: C = self._kept.born(self._connect())
        try:
            self._server.run_session_sql(partial(self._run, connection), ERRORS)
        except BaseException:
            self._kept.close(connection)
            raise
        return connection

    def _unreachable(self, error: Exception) -> Exception:
        return connect_error(error, f"can't connect to {self._server.place}", self._server)


class AdbcSession:
    """
    A connection of ADBC's own interface, in autocommit, with the database object that it needs.

    Not of its `dbapi` module: that imports pyarrow's datasets and with them pandas, which cost a
    new worker more CPU than everything else it loads.
    """

    def __init__(self, conninfo: str) -> None:
        from adbc_driver_manager import AdbcConnection, Error  # noqa: PLC0415  for columns only
        from adbc_driver_postgresql import connect  # noqa: PLC0415

        self._database = connect(conninfo)
        try:
            self.connection = AdbcConnection(self._database)
        except Error:
            self._database.close()
            raise

    def close(self) -> None:
        self.connection.close()
        self._database.close()


class ArrowConnection(TaskConnection[AdbcSession]):
    _kept = IdleConnections(answers=lambda _: True)

    def ingest(self, schema: str, table: str, rows: pa.Table) -> None:
        from adbc_driver_manager import (  # noqa: PLC0415  for columns only
            INGEST_OPTION_MODE_APPEND,
            AdbcStatement,
            StatementOptions,
        )

        options = {
            StatementOptions.INGEST_TARGET_DB_SCHEMA.value: schema,
            StatementOptions.INGEST_TARGET_TABLE.value: table,
            StatementOptions.INGEST_MODE.value: INGEST_OPTION_MODE_APPEND,
        }
        with AdbcStatement(self._connection.connection) as running:
            running.set_options(**options)
            running.bind_stream(rows)
            running.execute_update()

    def _run(self, connection: AdbcSession, statement: str) -> None:
        from adbc_driver_manager import AdbcStatement  # noqa: PLC0415  for columns only

        with AdbcStatement(connection.connection) as running:
            running.set_sql_query(statement)
            running.execute_update()

    def ask(self, *statements: str) -> list[tuple[Any, ...]]:
        import pyarrow as pa  # noqa: PLC0415  for columns only
        from adbc_driver_manager import AdbcStatement  # noqa: PLC0415  for columns only

        for statement in statements[:-1]:
            self.execute(statement)
        with AdbcStatement(self._connection.connection) as running:
            # Else the query would be run inside a COPY.
            running.set_options(**{"adbc.postgresql.use_copy": "false"})
            running.set_sql_query(statements[-1])
            stream, _ = running.execute_query()
            found = pa.RecordBatchReader._import_from_c(stream.address).read_all()
        return list(zip(*(column.to_pylist() for column in found.columns), strict=True))

    def _connect(self) -> AdbcSession:
        from adbc_driver_manager import Error  # noqa: PLC0415  for columns only

        try:
            return AdbcSession(self._conninfo)
        except Error as error:
            raise self._unreachable(error) from None


class BytesConnection(TaskConnection["psycopg.Connection[Any]"]):
    _kept = IdleConnections(answers=lambda _: True)

    def copy(self, statement: str, rows: Iterable[memoryview]) -> None:
        with self._connection.cursor() as cursor, cursor.copy(statement.encode()) as sending:
            sending.write(_COPY_HEADER)
            for some in rows:
                sending.write(some)
            sending.write(_COPY_TRAILER)

    def _run(self, connection: psycopg.Connection[Any], statement: str) -> None:
        connection.execute(statement.encode())

    def ask(self, *statements: str) -> list[tuple[Any, ...]]:
        return run_together(self._connection, statements)[-1].rows

    def _connect(self) -> psycopg.Connection[Any]:
        try:
            return psycopg.connect(self._conninfo, autocommit=True, prepare_threshold=None)
        except psycopg.Error as error:
            raise self._unreachable(error) from None


for _kind in (ArrowConnection, BytesConnection):
    # The libraries warn of connections that nobody closed.
    atexit.register(_kind._kept.close_all)
