"""An epoch log in one SQLite file.

A rollback journal with synchronous=EXTRA. With FULL the deletion of the journal, which *is* the
commit, is not synced, and a power cut may undo a decision that was reported as durable. A
write-ahead log would be quicker, and be corrupted by two drivers on two machines that share a disk.

Every call opens the file anew. That costs a fraction of a sync, and a log may be used from any
thread and after a fork without rules. Nothing is created before the first put.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from epochal.errors import CorruptRecord, EpochalError, Misconfigured, OutcomeUnknown, TryAgain

_BUSY_TIMEOUT_S = 10.0
_CREATE = "CREATE TABLE IF NOT EXISTS epoch_log (number INTEGER PRIMARY KEY, record BLOB NOT NULL)"
_EXISTS = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'epoch_log'"
_TRANSIENT = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR}


class SqliteLog:
    """Records as rows of one table. Processes may race for it; usable from any thread."""

    def __init__(self, file: Path, *, busy_timeout_s: float = _BUSY_TIMEOUT_S) -> None:
        self._file = file.absolute()
        self._busy_timeout_s = busy_timeout_s

    @property
    def place(self) -> str:
        return f"sqlite://{self._file}"

    def put_if_absent(self, number: int, record: bytes) -> bool:
        with self._sorting_errors("write to", is_put=True), self._open("rwc") as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute(_CREATE)
            cursor = connection.execute(
                "INSERT INTO epoch_log VALUES (?, ?) ON CONFLICT DO NOTHING", (number, record)
            )
            connection.execute("COMMIT")
            return cursor.rowcount == 1

    def numbers(self) -> Sequence[int]:
        return [
            number for (number,) in self._select("SELECT number FROM epoch_log ORDER BY number")
        ]

    def read(self, number: int) -> bytes | None:
        rows = self._select("SELECT record FROM epoch_log WHERE number = ?", number)
        return rows[0][0] if rows else None

    def delete(self, numbers: Sequence[int]) -> None:
        if not self._file.exists():
            return
        with self._sorting_errors("delete from"), self._open("rw") as connection:
            connection.execute("BEGIN IMMEDIATE")
            if connection.execute(_EXISTS).fetchone():
                connection.executemany(
                    "DELETE FROM epoch_log WHERE number = ?", [(number,) for number in numbers]
                )
            connection.execute("COMMIT")

    def close(self) -> None:
        """Nothing is kept open."""

    def _select(self, query: str, *values: int) -> list[tuple[Any, ...]]:
        with self._sorting_errors("read from"):
            if not self._file.exists():
                return []
            with self._open("rw") as connection:
                # A writer killed inside the first put leaves a file without the table.
                if connection.execute(_EXISTS).fetchone() is None:
                    return []
                return connection.execute(query, values).fetchall()

    @contextmanager
    def _open(self, mode: str) -> Iterator[sqlite3.Connection]:
        connection = sqlite3.connect(
            f"{self._file.as_uri()}?mode={mode}",
            uri=True,
            timeout=self._busy_timeout_s,
            isolation_level=None,
        )
        with closing(connection):
            connection.execute("PRAGMA synchronous = EXTRA")
            connection.execute("PRAGMA fullfsync = ON")
            yield connection

    @contextmanager
    def _sorting_errors(self, verb: str, *, is_put: bool = False) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise self._sorted(error, verb, is_put=is_put) from error

    def _sorted(self, error: Exception, verb: str, *, is_put: bool) -> EpochalError:
        """The same error, by what the caller may do next."""
        fact = f"cannot {verb} the epoch log {self.place}: {error}"
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_CORRUPT:
            return CorruptRecord(fact)
        if is_put and code == sqlite3.SQLITE_IOERR:
            return OutcomeUnknown(fact)
        if code in _TRANSIENT:
            return TryAgain(fact)
        return Misconfigured(
            fact, hint="the file must be a SQLite database of its own, in a folder one can write to"
        )
