"""Connections, in python-oracledb's thin mode: one per task, the library's pool on the driver."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

import oracledb

from epochal.errors import EpochalError, Misconfigured, TryAgain
from epochal.kit.secrets import HeldSecret, Secret
from epochal.kit.sql.client import DatabaseServer, Session
from epochal.sinks.oracle.dialect import XID_FORMAT
from epochal.sinks.oracle.errors import ERRORS
from epochal.terms import Identity

_WRONG = frozenset({1005, 1017, 1045, 12154, 12505, 12514, 28000, 28001})
"""Numbers of failed connections that no waiting repairs."""
_SESSION = (
    "ALTER SESSION SET TIME_ZONE = '+00:00' NLS_NUMERIC_CHARACTERS = '.,'"
    " NLS_DATE_FORMAT = 'YYYY-MM-DD HH24:MI:SS'"
    " NLS_TIMESTAMP_FORMAT = 'YYYY-MM-DD HH24:MI:SS.FF6'"
    " NLS_TIMESTAMP_TZ_FORMAT = 'YYYY-MM-DD HH24:MI:SS.FF6 TZH:TZM'"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Server(DatabaseServer):
    """Where the server is."""

    dsn: str
    user: str

    @property
    def place(self) -> str:
        return self.dsn


def parse_url(url: str, password: Secret | None) -> tuple[str, str, Secret | None]:
    """User, connect string and password of `oracle://user@host:1521/service`."""
    try:
        parts = urlsplit(url)
        port = parts.port or 1521
    except ValueError:
        # The message may quote a part of what was given, perhaps its password.
        raise _bad_url("it can't be read") from None
    service = unquote(parts.path.strip("/"))
    if parts.scheme != "oracle" or not parts.username or not service:
        raise _bad_url("it needs a user, a host and a service")
    if parts.password is not None and password is not None:
        raise Misconfigured(
            "Oracle: both the url and password= give a password", "leave it out of the url"
        )
    found = None if parts.password is None else HeldSecret(unquote(parts.password))
    return unquote(parts.username), f"{parts.hostname}:{port}/{service}", found or password


def _bad_url(why: str) -> Misconfigured:
    return Misconfigured(f"Oracle: the url is not one: {why}", "oracle://user@host:1521/service")


def connect(server: Server) -> Any:
    """A new connection with everything set that matters."""
    try:
        connection = oracledb.connect(
            user=server.user,
            password=server.secret(),
            dsn=server.dsn,
            tcp_connect_timeout=server.connect_timeout_s,
        )
        prepare_session(connection, server)
    except ERRORS.errors as error:
        raise connect_error(error, server) from None
    return connection


def prepare_session(connection: Any, server: Server) -> None:
    connection.autocommit = False
    connection.call_timeout = round(server.statement_timeout_s * 1000)
    with connection.cursor() as cursor:
        server.run_session_sql(cursor.execute, ERRORS)
        cursor.execute(_SESSION)


def connect_error(error: Exception, server: Server) -> EpochalError:
    fact = f"can't connect to {server.place}: {server.without_secret(ERRORS.text_of(error))}"
    if ERRORS.code_of(error) in _WRONG:
        return Misconfigured(fact, "check user, password and service: password=env(…) or file(…)")
    return TryAgain(fact, "check host and port in the url, and that the server is up")


def answers(connection: Any) -> bool:
    try:
        connection.ping()
    except ERRORS.errors:
        return False
    return True


class OracleSession(Session):
    """One connection of the pool. Oracle begins a transaction by itself."""

    def __init__(self, connection: Any, server: Server) -> None:
        self._connection = connection
        self._server = server
        self.is_dead = False

    def execute(self, statement: str) -> int:
        with self._connection.cursor() as cursor:
            cursor.execute(statement)
            return int(cursor.rowcount)

    def query(self, statement: str) -> list[tuple[Any, ...]]:
        with self._connection.cursor() as cursor:
            cursor.execute(statement)
            return list(cursor.fetchall())

    def begin(self, *, lock_wait_s: float | None = None, idle_max_s: float | None = None) -> None:  # noqa: ARG002  only a profile limits it
        self._connection.rollback()
        self.wait_for_locks(lock_wait_s)

    def wait_for_locks(self, seconds: float | None = None) -> None:
        """DML has no lock timeout: only the time of the whole call can be limited."""
        server = self._server
        limit_s = (
            server.statement_timeout_s if seconds is None else min(seconds, server.lock_timeout_s)
        )
        self._connection.call_timeout = round(limit_s * 1000)

    def commit(self) -> None:
        self._connection.commit()

    def roll_back(self) -> None:
        try:
            self.wait_for_locks()
            self._connection.rollback()
        except ERRORS.errors:
            self.is_dead = True

    def end_prepared(self, name: str, *, is_commit: bool) -> None:
        xid = self._connection.xid(XID_FORMAT, name, "")
        if is_commit:
            self._connection.tpc_commit(xid)
        else:
            self._connection.tpc_rollback(xid)


class OraclePool:
    """Opened on first use; a connection is checked each time it is taken."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._pool: Any = None

    def take(self) -> OracleSession:
        try:
            if self._pool is None:
                self._pool = self._open()
            connection = self._pool.acquire()
        except ERRORS.errors as error:
            raise self._reason(error) from None
        session = OracleSession(connection, self._server)
        session.wait_for_locks()
        return session

    def give_back(self, session: Session) -> None:
        if not isinstance(session, OracleSession):
            return
        with suppress(*ERRORS.errors):
            if session.is_dead:
                self._pool.drop(session._connection)
            else:
                self._pool.release(session._connection)

    def act_for(self, identities: Sequence[Identity]) -> None:
        """Nothing to do: an ordinary user may not end sessions, so none is searched for."""

    def close(self) -> None:
        if self._pool is not None:
            with suppress(*ERRORS.errors):
                self._pool.close(force=True)
            self._pool = None

    def _open(self) -> Any:
        server = self._server
        # A pool only times out: connect once without it, for the error that says why.
        connect(server).close()
        return oracledb.create_pool(
            user=server.user,
            password=server.secret(),
            dsn=server.dsn,
            min=min(server.pool_min, server.pool_max),
            max=server.pool_max,
            increment=1,
            getmode=oracledb.POOL_GETMODE_TIMEDWAIT,
            wait_timeout=round(server.connect_timeout_s * 1000),
            timeout=round(server.idle_max_s),
            max_lifetime_session=round(server.lifetime_max_s),
            ping_interval=0,
            tcp_connect_timeout=server.connect_timeout_s,
            session_callback=lambda connection, _: prepare_session(connection, server),
        )

    def _reason(self, error: Exception) -> Exception:
        if isinstance(error, EpochalError):
            return error
        if "DPY-4005" in str(error) or ERRORS.code_of(error) == 24457:
            return TryAgain(
                f"all {self._server.pool_max} connections to {self._server.place} are in use, for "
                f"{self._server.connect_timeout_s:.0f} s",
                "a larger pool_max, or find what holds them: V$SESSION",
            )
        return ERRORS.classify(error, f"can't connect to {self._server.place}")
