"""A history in a table beside an epoch log in PostgreSQL: `epochal.epoch_history`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg import sql

from epochal.logs.postgres import PostgresLog

_MISSING = frozenset({"42P01", "3F000"})
_CREATE = """
SELECT pg_advisory_xact_lock(1701867363);
CREATE SCHEMA IF NOT EXISTS {schema};
CREATE TABLE IF NOT EXISTS {table} (
  log text NOT NULL, name text COLLATE "C" NOT NULL, content bytea NOT NULL,
  PRIMARY KEY (log, name))
"""
_PUT = """
INSERT INTO {table} VALUES (%s, %s, %s)
ON CONFLICT (log, name) DO UPDATE SET content = EXCLUDED.content
"""


class HistoryTable:
    """
    Pieces as rows, those of all logs of a database in one table.

    Each call has a connection of its own: they are seconds apart, and whoever reads pages has
    nothing to close.
    """

    def __init__(self, log: PostgresLog) -> None:
        self._log = log
        self._schema = sql.Identifier(log.schema)
        self._table = sql.Identifier(log.schema, "epoch_history")

    def put(self, name: str, content: bytes) -> None:
        def put(connection: psycopg.Connection[Any]) -> None:
            connection.execute(self._sql(_PUT), (self._log.name, name, content))

        def made_and_put(connection: psycopg.Connection[Any]) -> None:
            try:
                put(connection)
            except psycopg.Error as error:
                if error.sqlstate not in _MISSING:
                    raise
                with connection.transaction():
                    connection.execute(self._sql(_CREATE))
                put(connection)

        self._log.ask_beside(made_and_put, "write to the history beside")

    def names(self) -> Sequence[str]:
        return [
            name for (name,) in self._select("SELECT name FROM {table} WHERE log = %s ORDER BY 1")
        ]

    def read(self, name: str) -> bytes | None:
        found = self._select("SELECT content FROM {table} WHERE log = %s AND name = %s", name)
        return bytes(found[0][0]) if found else None

    def delete(self, names: Sequence[str]) -> None:
        self._select(
            "DELETE FROM {table} WHERE log = %s AND name = ANY(%s) RETURNING name", list(names)
        )

    def _select(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        def ask(connection: psycopg.Connection[Any]) -> list[tuple[Any, ...]]:
            try:
                return connection.execute(self._sql(query), (self._log.name, *values)).fetchall()
            except psycopg.Error as error:
                # Nobody has put anything yet.
                if error.sqlstate in _MISSING:
                    return []
                raise

        return self._log.ask_beside(ask, "read the history beside")

    def _sql(self, query: str) -> sql.Composed:
        return sql.SQL(query).format(table=self._table, schema=self._schema)
