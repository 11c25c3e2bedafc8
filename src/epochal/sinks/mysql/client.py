"""Connections: each strict, in UTC and utf8mb4, and with limits of its own.

Under MySQL's own settings a value that does not fit may be truncated silently, and a string that
looks like a number become one: so every session sets its own mode, whatever the server's is. A
read-only server is not used, nor is one that became read-only while a connection to it was kept: a
proof is never read on a replica (I9). It may be about to take over, so it is tried again.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import pymysql
from pymysql.connections import Connection
from pymysql.constants import CLIENT, COMMAND
from pymysql.protocol import OKPacketWrapper

from epochal.errors import EpochalError, Misconfigured, TryAgain
from epochal.kit.secrets import HeldSecret, Secret
from epochal.kit.sql.client import DatabaseServer
from epochal.sinks.mysql.errors import ERRORS

_MODE = (
    "STRICT_ALL_TABLES,NO_ZERO_DATE,NO_ZERO_IN_DATE,ERROR_FOR_DIVISION_BY_ZERO,"
    "NO_ENGINE_SUBSTITUTION,NO_AUTO_VALUE_ON_ZERO"
)
_SETTINGS: Mapping[str, str] = {
    "sql_mode": f"'{_MODE}'",
    "time_zone": "'+00:00'",
    # A decimal that is rounded is worth a note: without notes nothing would show it.
    "sql_notes": "1",
    # A warning gives the number of its row in English.
    "lc_messages": "'en_US'",
    "sql_safe_updates": "0",
    "sql_big_selects": "1",
    "sql_select_limit": "18446744073709551615",
}
"""Of every session, whatever the server's own are."""
_PIECE_BYTES = 256 * 1024
_PARAMETERS = frozenset(
    {
        *("unix_socket", "ssl_ca", "ssl_cert", "ssl_key", "ssl_disabled"),
        *("ssl_verify_cert", "ssl_verify_identity"),
    }
)
_SLACK_S = 10.0
"""How much longer than the server the client waits: the server's answer is more precise."""
_SLACK_MYSQL_S = 1.0
"""The same on MySQL, whose max_execution_time limits SELECT alone: the client limits the rest."""
_WRONG = frozenset({1044, 1045, 1049, 1130, 1251, 1698, 1862, 2054, 2059, 2061, 3118, 3955})
"""Numbers of failed connections that no waiting repairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server(DatabaseServer):
    """Where the server is."""

    host: str
    port: int
    user: str
    database: str
    parameters: tuple[tuple[str, str], ...]

    @property
    def place(self) -> str:
        """For people: host, port and database."""
        where = dict(self.parameters).get("unix_socket") or f"{self.host}:{self.port}"
        return f"{where}/{self.database}"

    def lock_settings(self, seconds: float | None = None) -> str:
        """Whole seconds, one at least: InnoDB knows no less."""
        wait_s = max(1, round(self.lock_timeout_s if seconds is None else seconds))
        return f"innodb_lock_wait_timeout = {wait_s}, lock_wait_timeout = {wait_s}"


def parse_url(url: str, password: Secret | None) -> tuple[dict[str, Any], Secret | None]:
    """The parts of a URL, its password apart."""
    try:
        parts = urlsplit(url)
        port = parts.port or 3306
    except ValueError:
        # The message may quote a part of what was given, perhaps its password.
        raise _bad_url("it can't be read") from None
    if parts.scheme not in {"mysql", "mariadb"}:
        raise _bad_url("it does not begin with mysql:// or mariadb://")
    parameters = dict(parse_qsl(parts.query))
    unknown = sorted(parameters.keys() - _PARAMETERS)
    if unknown:
        raise Misconfigured(
            f"MySQL: the url has unknown parameters: {', '.join(unknown)}",
            f"known ones are {', '.join(sorted(_PARAMETERS))}",
        )
    if not parts.path.strip("/"):
        raise _bad_url("it names no database")
    if parts.password is not None and password is not None:
        raise Misconfigured(
            "MySQL: both the url and password= give a password", "leave it out of the url"
        )
    found = None if parts.password is None else HeldSecret(unquote(parts.password))
    return {
        "host": parts.hostname or "localhost",
        "port": port,
        "user": unquote(parts.username or ""),
        "database": unquote(parts.path.strip("/")),
        "parameters": tuple(sorted(parameters.items())),
    }, found or password


def _bad_url(why: str) -> Misconfigured:
    return Misconfigured(f"MySQL: the url is not one: {why}", "mysql://user@host:3306/database")


class MySQLConnection(Connection):
    """
    A connection that loads rows from memory.

    The server may ask for a file only while `load` runs, and gets the pieces given to it, whatever
    name it asks for: a server that asks at any other time is refused, as `local_infile` is off.
    """

    is_mariadb: bool = False
    server: Server | None = None

    def limit_statements(self, server: Server) -> None:
        """From now on the client waits for an answer, too, and ends a session that gives none."""
        self.server = server
        slack_s = _SLACK_S if self.is_mariadb else _SLACK_MYSQL_S
        wire: Any = self  # the library's types leave its private attributes out
        wire._read_timeout = server.statement_timeout_s + slack_s

    def _read_bytes(self, num_bytes: int) -> bytes:
        """The server does not notice that a client gave up: its statement would run on."""
        try:
            data: bytes = Connection._read_bytes(self, num_bytes)  # type: ignore[attr-defined]
        except pymysql.err.OperationalError as error:
            if self.server is None or not isinstance(error.__context__, TimeoutError):
                raise
            _end_session(self.server, self.thread_id())  # type: ignore[no-untyped-call]
            raise pymysql.err.OperationalError(
                2013,
                f"no answer within statement_timeout_s ({self.server.statement_timeout_s} s); the "
                "session is ended",
            ) from error
        return data

    def _create_ssl_ctx(self, given: Any) -> ssl.SSLContext:
        """Without a CA nothing is verified: then reading the system's CAs anew costs 50 ms."""
        if given:
            context: ssl.SSLContext = Connection._create_ssl_ctx(self, given)  # type: ignore[attr-defined]
            return context
        return _unverified()

    def load(self, statement: str, data: memoryview) -> tuple[int, int]:
        """Run LOAD DATA LOCAL; how many rows arrived, and how many warnings there were."""
        wire: Any = self  # the library's types leave its private methods out
        wire._execute_command(COMMAND.COM_QUERY, statement.encode())
        first = wire._read_packet()
        if not first.is_load_local_packet():
            raise pymysql.err.OperationalError(2014, "the server asked for no rows")
        try:
            for piece in _pieces(data):
                self.write_packet(piece)
            self.write_packet(b"")
            answer = OKPacketWrapper(wire._read_packet())
        except OSError as error:
            wire._force_close()
            raise pymysql.err.OperationalError(2013, f"lost while loading: {error}") from error
        return answer.affected_rows, answer.warning_count


@cache
def _unverified() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _pieces(data: memoryview) -> Iterator[memoryview]:
    return (data[at : at + _PIECE_BYTES] for at in range(0, len(data), _PIECE_BYTES))


def connect(server: Server, *, idle_max_s: float | None = None) -> MySQLConnection:
    """
    A new connection with everything set that matters; errors show whether waiting helps. For
    `idle_max_s` see `idle_limits`.
    """
    doing = f"can't connect to {server.place}"
    try:
        connection = MySQLConnection(
            host=server.host,
            port=server.port,
            user=server.user or None,
            password=server.secret(),
            database=server.database,
            charset="utf8mb4",
            autocommit=True,
            client_flag=CLIENT.LOCAL_FILES,
            connect_timeout=max(1, round(server.connect_timeout_s)),
            read_timeout=server.connect_timeout_s,
            write_timeout=server.statement_timeout_s + _SLACK_S,
            **_options(dict(server.parameters)),
        )
    except ERRORS.errors as error:
        raise _connect_error(error, doing, server) from None
    except RuntimeError as error:
        # A package that one way of logging in needs.
        raise Misconfigured(
            f"{doing}: {error}", "connect with TLS (ssl_ca=…), or pip install 'pymysql[rsa]'"
        ) from None
    try:
        _prepare_session(connection, server, idle_max_s)
    except ERRORS.errors as error:
        close(connection)
        raise _connect_error(error, doing, server) from None
    except BaseException:
        close(connection)
        raise
    return connection


def _end_session(server: Server, number: int) -> None:
    """Where that fails, the server ends it when it next writes to it."""
    with suppress(EpochalError, *ERRORS.errors):
        other = connect(server)
        try:
            with other.cursor() as cursor:
                cursor.execute(f"KILL CONNECTION {number}")
        finally:
            close(other)


def _options(parameters: Mapping[str, str]) -> dict[str, Any]:
    flags = {"ssl_disabled", "ssl_verify_cert", "ssl_verify_identity"}
    return {
        name: value.lower() in {"1", "true", "yes"} if name in flags else value
        for name, value in parameters.items()
    }


def _prepare_session(connection: MySQLConnection, server: Server, idle_max_s: float | None) -> None:
    is_read_only, version = _state(connection)
    if is_read_only:
        raise TryAgain(
            f"{server.place} is read-only: a replica, or a server that was switched so",
            "the url must reach the primary",
        )
    with connection.cursor() as cursor:
        server.run_session_sql(cursor.execute, ERRORS)
    connection.is_mariadb = "mariadb" in version.lower()
    connection.limit_statements(server)
    limit = (
        f"max_statement_time = {server.statement_timeout_s}"
        if connection.is_mariadb
        else f"max_execution_time = {round(server.statement_timeout_s * 1000)}"
    )
    settings = ", ".join(f"{name} = {value}" for name, value in _SETTINGS.items())
    with connection.cursor() as cursor:
        cursor.execute(f"SET SESSION {settings}, {limit}, {server.lock_settings()}")
        cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        if idle_max_s is not None:
            cursor.execute(idle_limits(idle_max_s, is_mariadb=connection.is_mariadb))


def idle_limits(idle_max_s: float | None, *, is_mariadb: bool) -> str:
    """
    A statement that makes the server wait so long for the next one, in a transaction or not; None:
    as long as it does by itself.
    """
    limits = {"wait_timeout": "DEFAULT" if idle_max_s is None else str(max(1, round(idle_max_s)))}
    if is_mariadb:
        # They may be shorter than that of the session.
        own = ("idle_transaction_timeout", "idle_write_transaction_timeout")
        limits |= dict.fromkeys(own, "DEFAULT" if idle_max_s is None else "0")
    return "SET SESSION " + ", ".join(f"{name} = {seconds}" for name, seconds in limits.items())


def _state(connection: MySQLConnection) -> tuple[bool, str]:
    """Whether the server is read-only, and its version."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT @@global.read_only, VERSION()")
        ((is_read_only, version),) = cursor.fetchall()
    # A number on older servers, ON or OFF on the newest.
    return str(is_read_only).upper() not in {"0", "OFF"}, str(version)


def _connect_error(error: Exception, doing: str, server: Server) -> EpochalError:
    fact = f"{doing}: {server.without_secret(ERRORS.text_of(error))}"
    number = ERRORS.code_of(error)
    if number in _WRONG:
        return Misconfigured(fact, ERRORS.hint(error) or ERRORS.hints[1045])
    away = "check host and port in the url, and that the server is up"
    return TryAgain(fact, ERRORS.hint(error) or away)


def answers(connection: MySQLConnection) -> bool:
    """Whether it answers, and its server is still a primary: a switch closes no connection (I9)."""
    try:
        is_read_only, _ = _state(connection)
    except ERRORS.errors:
        return False
    return not is_read_only


def close(connection: MySQLConnection) -> None:
    with suppress(*ERRORS.errors):
        connection.close()
