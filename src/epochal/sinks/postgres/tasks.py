"""
A task's connection: rows in, binary COPY out. It lives on in the reused Python worker.

Columns are encoded by ADBC, which sends nothing but Arrow; rows that come as bytes are sent as they
are, by psycopg.
"""

from __future__ import annotations

import atexit
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeAlias, TypeVar

import psycopg
from psycopg import sql

from epochal.kit.sql.keeping import Kept
from epochal.sinks.postgres.connecting import Server, connect_error
from epochal.sinks.postgres.packing import HEADER, TRAILER

if TYPE_CHECKING:
    import pyarrow as pa
    from adbc_driver_manager import dbapi

C = TypeVar("C")
Place: TypeAlias = tuple[str | None, str]
"""Schema and table."""


class TaskConnection(ABC, Generic[C]):
    """One connection of a task; `done` keeps it for the next task of this process."""

    _kept: ClassVar[Kept[Any]]
    """Whether one still answers, its first statement tells at no cost: see `renew`."""

    def __init__(self, server: Server, application: str) -> None:
        self._server = server
        # The secret is part of the text, which stays in this process.
        self._conninfo = server.conninfo(application)
        kept: C | None = self._kept.take_kept(
            self._conninfo, idle_max_s=server.idle_max_s, lifetime_max_s=server.lifetime_max_s
        )
        self.is_reused = kept is not None
        self._use(self._born() if kept is None else kept)

    @abstractmethod
    def _connect(self) -> C: ...

    @abstractmethod
    def _use(self, connection: C) -> None:
        """Get ready to work with a connection, new or kept."""

    @abstractmethod
    def _let_go(self) -> C:
        """The end of that."""

    @abstractmethod
    def execute(self, statement: sql.Composable) -> None: ...

    def renew(self) -> None:
        """A kept connection turned out to be dead: open another one."""
        self._kept.close(self._let_go())
        self._use(self._born())
        self.is_reused = False

    def done(self) -> None:
        self._kept.keep(self._conninfo, self._let_go())

    def close(self) -> None:
        self._kept.close(self._let_go())

    def _born(self) -> C:
        connection: C = self._kept.born(self._connect())
        return connection

    def _unreachable(self, error: Exception) -> Exception:
        return connect_error(error, f"can't connect to {self._server.place}", self._server)


class ArrowConnection(TaskConnection["dbapi.Connection"]):
    _kept = Kept(answers=lambda _: True)

    def ingest(self, place: Place, rows: pa.Table) -> None:
        schema, table = place
        self._cursor.adbc_ingest(table, rows, mode="append", db_schema_name=schema)

    def execute(self, statement: sql.Composable) -> None:
        self._cursor.execute(statement.as_string(None))

    def _connect(self) -> dbapi.Connection:
        from adbc_driver_manager import dbapi as manager  # noqa: PLC0415  only where rows are sent
        from adbc_driver_postgresql import dbapi as driver  # noqa: PLC0415

        try:
            connection: dbapi.Connection = driver.connect(self._conninfo, autocommit=True)
        except manager.Error as error:
            raise self._unreachable(error) from None
        return connection

    def _use(self, connection: dbapi.Connection) -> None:
        self._connection = connection
        self._cursor = connection.cursor()

    def _let_go(self) -> dbapi.Connection:
        with suppress(Exception):
            self._cursor.close()
        return self._connection


class BytesConnection(TaskConnection["psycopg.Connection[Any]"]):
    _kept = Kept(answers=lambda _: True)

    def copy(self, place: Place, columns: Sequence[str], rows: Iterable[memoryview]) -> None:
        statement = sql.SQL("COPY {} ({}) FROM STDIN (FORMAT BINARY)").format(
            sql.Identifier(*(part for part in place if part is not None)),
            sql.SQL(", ").join(map(sql.Identifier, columns)),
        )
        with self._connection.cursor() as cursor, cursor.copy(statement) as sending:
            sending.write(HEADER)
            for some in rows:
                sending.write(some)
            sending.write(TRAILER)

    def execute(self, statement: sql.Composable) -> None:
        self._connection.execute(statement.as_string(None).encode())

    def _connect(self) -> psycopg.Connection[Any]:
        try:
            return psycopg.connect(self._conninfo, autocommit=True, prepare_threshold=None)
        except psycopg.Error as error:
            raise self._unreachable(error) from None

    def _use(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection

    def _let_go(self) -> psycopg.Connection[Any]:
        return self._connection


for _kind in (ArrowConnection, BytesConnection):
    # The libraries complain of connections that are left to them.
    atexit.register(_kind._kept.close_all)
