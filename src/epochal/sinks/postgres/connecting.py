"""Servers, and the small pool of connections to one that the driver has.

Nothing relies on the state of a session, so that a transaction pooler may stand in between: limits
are set for each transaction, and statements are not prepared under a name. Every connection asks
for a server that takes writes, so that a proof is never read on a replica (I9).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import psycopg
import psycopg_pool
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from epochal.errors import Misconfigured, TryAgain
from epochal.kit.secrets import HeldSecret, Secret
from epochal.kit.sql.server import DatabaseServer
from epochal.sinks.postgres.sorting import sorted_error, sorting
from epochal.terms import Generation, Identity, SinkTag, Uid

_DRIVER_NAME = re.compile(r"epochal-[a-z2-7]{12}-s(?P<sink>[0-9a-f]{8})-g(?P<generation>\d{1,10})")
_DEFAULTS: Mapping[str, str] = {
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
    "tcp_user_timeout": "60000",
}


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

    def begin(self, *, lock_wait_s: float | None = None) -> sql.Composed:
        """BEGIN, with every setting that matters said aloud, for this transaction only."""
        return sql.SQL("BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; {}").format(
            self.settings(lock_wait_s=lock_wait_s)
        )

    def settings(self, *, lock_wait_s: float | None = None) -> sql.Composed:
        """
        Limits, with this patience for locks, at most the declared one.

        A weaker synchronous_commit than `on` would forget what was reported as durable.
        """
        declared = self.lock_timeout_s
        wait_s = declared if lock_wait_s is None else min(lock_wait_s, declared)
        return sql.SQL(
            "SELECT set_config('statement_timeout', {}, true),"
            " set_config('lock_timeout', {}, true), set_config('TimeZone', 'UTC', true),"
            " set_config('synchronous_commit', CASE current_setting('synchronous_commit')"
            " WHEN 'off' THEN 'on'"
            " ELSE current_setting('synchronous_commit') END, true)"
        ).format(
            sql.Literal(str(round(self.statement_timeout_s * 1000))),
            sql.Literal(str(max(1, round(wait_s * 1000)))),
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


def driver_name(identity: Identity) -> str:
    """By which the sessions of a driver are found again, also by the driver that follows it."""
    return f"{driver_prefix(identity.uid)}{identity.tag}-g{identity.generation}"


def driver_prefix(uid: Uid) -> str:
    return f"epochal-{uid}-s"


def parse_driver_name(name: str) -> tuple[SinkTag, Generation] | None:
    """The sink and the generation in a session's name; None where it is not a driver's."""
    found = _DRIVER_NAME.fullmatch(name)
    return None if found is None else (SinkTag(found["sink"]), Generation(int(found["generation"])))


class Pool:
    """The driver's connections. Opened on first use; an error says why, not that it waited."""

    def __init__(self, server: Server, application: str) -> None:
        self._server = server
        self._application = application
        self._opening = threading.Lock()
        self._pool: psycopg_pool.ConnectionPool[psycopg.Connection[Any]] | None = None

    def take(self) -> psycopg.Connection[Any]:
        pool = self._opened()
        try:
            return pool.getconn(timeout=self._server.connect_timeout_s)
        except psycopg_pool.PoolTimeout as error:
            raise self._reason(pool, error) from error

    def give_back(self, connection: psycopg.Connection[Any]) -> None:
        if self._pool is None:
            connection.close()
            return
        self._pool.putconn(connection)

    @contextmanager
    def connection(self) -> Iterator[psycopg.Connection[Any]]:
        connection = self.take()
        try:
            yield connection
        finally:
            self.give_back(connection)

    @contextmanager
    def transaction(
        self, doing: str, *, lock_wait_s: float | None = None
    ) -> Iterator[psycopg.Connection[Any]]:
        """A short transaction, committed at the end of the block."""
        with self.connection() as connection:
            with sorting(doing):
                connection.execute(self._server.begin(lock_wait_s=lock_wait_s))
                try:
                    yield connection
                except BaseException:
                    roll_back(connection)
                    raise
            with sorting(doing, is_commit=True):
                connection.execute("COMMIT")

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
                    min_size=self._server.pool_min,
                    max_size=self._server.pool_max,
                    timeout=self._server.connect_timeout_s,
                    max_idle=self._server.idle_max_s,
                    max_lifetime=self._server.lifetime_max_s,
                    check=psycopg_pool.ConnectionPool.check_connection,
                    name=self._application,
                    open=True,
                )
            return self._pool

    def _connect_once(self) -> None:
        """A pool waits and says nothing: whether one can connect at all is asked without it."""
        doing = f"can't connect to {self._server.place}"
        try:
            psycopg.connect(self._server.conninfo(self._application), autocommit=True).close()
        except psycopg.Error as error:
            raise connect_error(error, doing, self._server) from None

    def _reason(
        self, pool: psycopg_pool.ConnectionPool[Any], error: psycopg_pool.PoolTimeout
    ) -> Exception:
        numbers = pool.get_stats()
        if numbers.get("pool_available", 0) == 0 and numbers.get("pool_size", 0) >= pool.max_size:
            return TryAgain(
                f"all {pool.max_size} connections to {self._server.place} are in use, for "
                f"{self._server.connect_timeout_s:.0f} s",
                "a larger pool_max, or find what holds them: pg_stat_activity, application_name "
                f"{self._application}",
            )
        self._connect_once()
        return sorted_error(error, f"can't connect to {self._server.place}")


def connect_error(error: Exception, doing: str, server: Server) -> Exception:
    """libpq gives no SQLSTATE when it can't connect; only some failures pass by themselves."""
    words = server.without_secret(" ".join(str(error).split()))
    for mark, hint in _CONNECT_HINTS.items():
        if mark in words:
            return Misconfigured(f"{doing}: {words}", hint)
    return TryAgain(f"{doing}: {words}")


_CONNECT_HINTS = {
    "authentication failed": "check user and password: password=env(…) or file(…), or pgpass",
    "no password supplied": "password=env(…) or file(…), or a pgpass or service file",
    "fe_sendauth": "password=env(…) or file(…), or a pgpass or service file",
    "does not exist": "create it, or name another one in the url",
    "no pg_hba.conf entry": "the server does not let this host, user and database in: pg_hba.conf",
    "permission denied": "GRANT CONNECT ON DATABASE … TO the role of this sink",
    "is not permitted to log in": "ALTER ROLE … LOGIN",
    "session is read-only": "this is a standby: the url must reach the primary",
    "definition of service": "pg_service.conf has no such service on this machine",
    "could not translate host name": "check the host in the url",
}


def roll_back(connection: psycopg.Connection[Any]) -> None:
    """End a transaction, whatever its state; a connection that can't do it is closed."""
    try:
        connection.execute("ROLLBACK")
    except psycopg.Error:
        with suppress(psycopg.Error):
            connection.close()
