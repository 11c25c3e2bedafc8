"""A store in one SQLite file.

A rollback journal with synchronous=EXTRA. With FULL the deletion of the journal, which *is* the
commit, is not synced, and a power cut may undo a decision that was reported as durable. A
write-ahead log would be quicker, and be corrupted by two drivers on two machines that share a disk.

Every call opens the file anew. That costs a fraction of a sync, and a store may be used from any
thread and after a fork without rules. Nothing is created before the first put. The format of the
table is SQLite's `user_version`; 0, of a file that nobody has marked, stands for 1.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from epochal.errors import (
    CorruptRecord,
    EpochalError,
    Misconfigured,
    OutcomeUnknown,
    TryAgain,
    require_known_format,
)
from epochal.storage.leases import FileLease
from epochal.storage.local import create_private_file
from epochal.storage.store import Entry, checked, gone

_BUSY_TIMEOUT_S = 10.0
_FORMAT = 1
_CREATES = "rwc"
_CREATE = """
CREATE TABLE IF NOT EXISTS store (
  key TEXT PRIMARY KEY, content BLOB NOT NULL, modified_at REAL NOT NULL)
"""
_EXISTS = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'store'"
_PUT = """
INSERT INTO store VALUES (?, ?, ?)
ON CONFLICT DO UPDATE SET content = excluded.content, modified_at = excluded.modified_at
"""
_PUT_IF_ABSENT = "INSERT INTO store VALUES (?, ?, ?) ON CONFLICT DO NOTHING"
_IN_FOLDER = "FROM (SELECT *, substr(key, ?) AS rest FROM store WHERE substr(key, 1, ?) = ?)"

_ERRORS: Mapping[int, tuple[type[EpochalError], str]] = {
    sqlite3.SQLITE_BUSY: (TryAgain, "another process holds the file's lock"),
    sqlite3.SQLITE_LOCKED: (TryAgain, "another process holds the file's lock"),
    sqlite3.SQLITE_FULL: (TryAgain, "free some space; nothing was written"),
    sqlite3.SQLITE_IOERR: (TryAgain, ""),
    sqlite3.SQLITE_CORRUPT: (CorruptRecord, "restore the file from a backup"),
}
"""What an error means for the caller; every other one is for a person."""
_NOT_COMMITTED = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL})
_MISCONFIGURED_HINT = (
    "the file must be a SQLite database of its own, in a folder that this process can write to"
)


class SqliteStore:
    """Keys as rows of one table. Processes may race for them."""

    def __init__(self, file: Path, *, busy_timeout_s: float = _BUSY_TIMEOUT_S) -> None:
        self._file = Path(os.path.realpath(file))
        self._busy_timeout_s = busy_timeout_s

    @property
    def location(self) -> str:
        return f"sqlite://{self._file}"

    def put(self, key: str, content: bytes) -> None:
        self._insert(_PUT, key, content)

    def put_if_absent(self, key: str, content: bytes) -> bool:
        return self._insert(_PUT_IF_ABSENT, key, content) == 1

    def read(self, key: str) -> bytes | None:
        rows = self._select("SELECT content FROM store WHERE key = ?", checked(key))
        return rows[0][0] if rows else None

    def read_range(self, key: str, start: int, end: int) -> bytes:
        query = "SELECT substr(content, ?, ?) FROM store WHERE key = ?"
        rows = self._select(query, start + 1, end - start, checked(key))
        if not rows:
            raise gone(self.location, key)
        return bytes(rows[0][0])

    def names(self, folder: str = "", after: str = "") -> Sequence[str]:
        query = f"SELECT rest {_IN_FOLDER} WHERE instr(rest, '/') = 0 AND rest > ? ORDER BY key"
        return [name for (name,) in self._select(query, *_in(folder), after)]

    def folders(self, folder: str = "") -> Sequence[str]:
        query = (
            f"SELECT DISTINCT substr(rest, 1, instr(rest, '/') - 1) {_IN_FOLDER}"
            " WHERE instr(rest, '/') > 0 ORDER BY 1"
        )
        return [name for (name,) in self._select(query, *_in(folder))]

    def entries(self, folder: str = "") -> Sequence[Entry]:
        query = (
            f"SELECT rest, length(content), modified_at {_IN_FOLDER}"
            " WHERE instr(rest, '/') = 0 ORDER BY key"
        )
        return [_entry(*row) for row in self._select(query, *_in(folder))]

    def entry(self, key: str) -> Entry | None:
        query = "SELECT length(content), modified_at FROM store WHERE key = ?"
        rows = self._select(query, checked(key))
        return _entry(key.rpartition("/")[2], *rows[0]) if rows else None

    def delete(self, keys: Sequence[str]) -> None:
        rows = [(checked(key),) for key in keys]
        with self._errors("delete from"):
            if not self._file.exists():
                return
            with self._open("rw") as connection:
                connection.execute("BEGIN IMMEDIATE")
                if connection.execute(_EXISTS).fetchone():
                    connection.executemany("DELETE FROM store WHERE key = ?", rows)
                connection.execute("COMMIT")

    def beside(self, name: str) -> SqliteStore:
        """A file of its own: one file has one lock."""
        file = self._file.with_name(f"{self._file.name}.{name}")
        return SqliteStore(file, busy_timeout_s=self._busy_timeout_s)

    def lease(self) -> FileLease:
        """On one machine only."""
        return FileLease(self._file.with_name(f"{self._file.name}.lease"))

    def close(self) -> None:
        """Nothing is kept open."""

    def _insert(self, statement: str, key: str, content: bytes) -> int:
        row = (checked(key), content, time.time())
        with self._errors("write to"), self._open(_CREATES) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute(_CREATE)
            cursor = connection.execute(statement, row)
            with self._errors("write to", is_commit=True):
                connection.execute("COMMIT")
            return cursor.rowcount

    def _select(self, query: str, *values: str | int) -> list[tuple[Any, ...]]:
        with self._errors("read from"):
            if not self._file.exists():
                return []
            with self._open("rw") as connection:
                # A writer killed inside the first put leaves a file without the table.
                if connection.execute(_EXISTS).fetchone() is None:
                    return []
                return connection.execute(query, values).fetchall()

    @contextmanager
    def _open(self, mode: str) -> Iterator[sqlite3.Connection]:
        if mode == _CREATES and not self._file.exists() and self._file.parent.is_dir():
            create_private_file(self._file)
        connection = sqlite3.connect(
            f"{self._file.as_uri()}?mode={mode}",
            uri=True,
            timeout=self._busy_timeout_s,
            isolation_level=None,
        )
        with closing(connection):
            connection.execute("PRAGMA synchronous = EXTRA")
            connection.execute("PRAGMA fullfsync = ON")
            ((found,),) = connection.execute("PRAGMA user_version")
            require_known_format(self.location, found or _FORMAT, _FORMAT)
            yield connection

    @contextmanager
    def _errors(self, verb: str, *, is_commit: bool = False) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            kind, hint = _ERRORS.get(code, (Misconfigured, _MISCONFIGURED_HINT))
            if is_commit and code not in _NOT_COMMITTED:
                kind = OutcomeUnknown  # the journal may be gone, or not
            raise kind(f"cannot {verb} {self.location}: {error}", hint) from error


def _in(folder: str) -> tuple[int, int, str]:
    start = f"{folder}/" if folder else ""
    return len(start) + 1, len(start), start


def _entry(name: str, size: int, modified_at: float) -> Entry:
    return Entry(name=name, size=size, modified_at=modified_at)
