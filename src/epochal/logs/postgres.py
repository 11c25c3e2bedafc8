"""An epoch log in a PostgreSQL table, for drivers that can't write to the checkpoint's own store.

    postgresql://etl@db/shop#orders

One table holds any number of logs; the part behind `#` says which. A put is one INSERT, durable
when it is answered, as `synchronous_commit` is never weaker than `on` here; reads go to the primary
only. Passwords come from the URL, which is never shown, or from where libpq looks: PGPASSWORD, a
pgpass or a service file. Nothing is created before the first put.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import unquote

from epochal.errors import EpochalError, Misconfigured, OutcomeUnknown, TryAgain

try:
    import psycopg
    from psycopg import sql
    from psycopg.conninfo import conninfo_to_dict, make_conninfo
except ImportError as error:
    raise Misconfigured(
        f"an epoch log in PostgreSQL needs a package that is not installed: {error.name}",
        "pip install 'epochal[postgres]'",
    ) from error

T = TypeVar("T")

_SCHEMA = "epochal"
_CONNECT_TIMEOUT_S = 10
_STATEMENT_TIMEOUT_S = 30
_MISSING = frozenset({"42P01", "3F000"})
_PASSES_BY_ITSELF = ("08", "53", "57", "40", "55")
_CREATE = """
SELECT pg_advisory_xact_lock(1701867363);
CREATE SCHEMA IF NOT EXISTS {schema};
CREATE TABLE IF NOT EXISTS {table} (
  log text NOT NULL, number bigint NOT NULL, record bytea NOT NULL, PRIMARY KEY (log, number))
"""


class PostgresLog:
    """Records as rows of one table. Processes may race for it; usable from any thread."""

    def __init__(self, url: str, *, schema: str = _SCHEMA) -> None:
        address, mark, name = url.partition("#")
        if not mark or not name:
            raise Misconfigured(
                "an epoch log in PostgreSQL needs a name of its own in the database",
                "postgresql://user@host/database#name-of-the-pipeline",
            )
        self._name = unquote(name)
        self._parameters = _parsed(address)
        self._schema_name = schema
        self._schema = sql.Identifier(schema)
        self._table = sql.Identifier(schema, "epoch_log")
        self._lock = threading.Lock()
        self._connection: psycopg.Connection[Any] | None = None
        self._process = os.getpid()

    @property
    def place(self) -> str:
        given = self._parameters
        host = given.get("host") or given.get("service") or "localhost"
        port = f":{given['port']}" if "port" in given else ""
        return f"postgresql://{host}{port}/{given.get('dbname', '')}#{self._name}"

    def put_if_absent(self, number: int, record: bytes) -> bool:
        def put(connection: psycopg.Connection[Any]) -> bool:
            statement = sql.SQL("INSERT INTO {} VALUES (%s, %s, %s) ON CONFLICT DO NOTHING")
            values = (self._name, number, record)
            return connection.execute(statement.format(self._table), values).rowcount == 1

        def made_and_put(connection: psycopg.Connection[Any]) -> bool:
            try:
                return put(connection)
            except psycopg.Error as error:
                if error.sqlstate not in _MISSING:
                    raise
            with connection.transaction():
                connection.execute(sql.SQL(_CREATE).format(schema=self._schema, table=self._table))
            return put(connection)

        return self._ask(made_and_put, "write to", is_put=True)

    def numbers(self) -> Sequence[int]:
        rows = self._select("SELECT number FROM {} WHERE log = %s ORDER BY 1")
        return [number for (number,) in rows]

    def read(self, number: int) -> bytes | None:
        rows = self._select("SELECT record FROM {} WHERE log = %s AND number = %s", number)
        return bytes(rows[0][0]) if rows else None

    def delete(self, numbers: Sequence[int]) -> None:
        query = "DELETE FROM {} WHERE log = %s AND number = ANY(%s) RETURNING 1"
        self._select(query, list(numbers))

    def close(self) -> None:
        with self._lock:
            self._hang_up()

    @property
    def name(self) -> str:
        """Which of the logs of one database this is."""
        return self._name

    @property
    def schema(self) -> str:
        """Where the log's table is, and what lies beside it."""
        return self._schema_name

    def ask_beside(self, ask: Callable[[psycopg.Connection[Any]], T], verb: str) -> T:
        """
        Ask something of the log's database on a connection of its own, closed afterwards.

        No epoch waits for it: what hangs here does not hold the connection that decides.
        """
        try:
            connection = self._connect()
        except psycopg.Error as error:
            raise self._unreachable(error) from None
        try:
            return ask(connection)
        except psycopg.Error as error:
            raise self._sorted(error, verb, is_put=False) from error
        finally:
            connection.close()

    def _select(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        def ask(connection: psycopg.Connection[Any]) -> list[tuple[Any, ...]]:
            statement = sql.SQL(query).format(self._table)
            try:
                return connection.execute(statement, (self._name, *values)).fetchall()
            except psycopg.Error as error:
                # Nobody has put anything yet.
                if error.sqlstate in _MISSING:
                    return []
                raise

        return self._ask(ask, "read from")

    def _ask(
        self, ask: Callable[[psycopg.Connection[Any]], T], verb: str, *, is_put: bool = False
    ) -> T:
        with self._lock:
            try:
                connection = self._connected()
            except psycopg.Error as error:
                raise self._unreachable(error) from None
            try:
                return ask(connection)
            except psycopg.Error as error:
                if connection.closed or error.sqlstate is None:
                    self._hang_up()
                raise self._sorted(error, verb, is_put=is_put) from error

    def _connected(self) -> psycopg.Connection[Any]:
        """The kept connection, or a new one: a forked child must not speak on its parent's."""
        if self._process != os.getpid():
            self._connection, self._process = None, os.getpid()
        if self._connection is not None and self._is_alive(self._connection):
            return self._connection
        self._hang_up()
        self._connection = self._connect()
        return self._connection

    def _connect(self) -> psycopg.Connection[Any]:
        connection = psycopg.connect(
            make_conninfo(
                **{
                    "keepalives_idle": "30",
                    "tcp_user_timeout": "60000",
                    **self._parameters,
                    "application_name": "epochal-log",
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

    def _is_alive(self, connection: psycopg.Connection[Any]) -> bool:
        """A connection that died since the last epoch must not make a put's outcome unknown."""
        try:
            connection.execute("")
        except psycopg.Error:
            return False
        return True

    def _hang_up(self) -> None:
        if self._connection is not None:
            with suppress(psycopg.Error):
                self._connection.close()
            self._connection = None

    def _sorted(self, error: psycopg.Error, verb: str, *, is_put: bool) -> EpochalError:
        """The same error, by what the caller may do next."""
        words = " ".join((error.diag.message_primary or str(error)).split())
        fact = f"cannot {verb} the epoch log {self.place}: {words}"
        state = error.sqlstate
        if is_put and (state is None or state[:2] in {"08", "57"}):
            return OutcomeUnknown(fact)
        if state is None or state[:2] in _PASSES_BY_ITSELF:
            return TryAgain(fact)
        return Misconfigured(
            f"{fact} [{state}]",
            "the role needs CREATE on the database at the first start, then SELECT, INSERT and "
            "DELETE on the table epochal.epoch_log; the same and UPDATE on epochal.epoch_history",
        )

    def _unreachable(self, error: psycopg.Error) -> EpochalError:
        words = " ".join(str(error).split())
        password = self._parameters.get("password")
        words = words.replace(password, "…") if password else words
        fact = f"cannot reach the epoch log {self.place}: {words}"
        for mark in ("authentication failed", "does not exist", "no password", "pg_hba.conf"):
            if mark in words:
                return Misconfigured(fact, "check user, password and database of the log's url")
        return TryAgain(fact)


def _parsed(url: str) -> dict[str, str]:
    try:
        return {key: str(value) for key, value in conninfo_to_dict(url).items() if value}
    except psycopg.Error:
        # The message may quote a part of the URL, perhaps its password.
        raise Misconfigured(
            "the url of the epoch log can't be read", "postgresql://user@host:5432/database#name"
        ) from None
