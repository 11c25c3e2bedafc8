"""
The receiver's tables, and how they are opened.

`rows` and `whole_epochs` are for everybody's SQL; the rest is the receiver's own. A write-ahead log
with synchronous=FULL: what was answered with 200 outlives a power cut, and readers don't wait.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

_BUSY_TIMEOUT_S = 10.0
_SCHEMA = """
CREATE TABLE IF NOT EXISTS transactions (
  txn TEXT PRIMARY KEY, uid TEXT NOT NULL, tag TEXT NOT NULL, epoch INTEGER NOT NULL,
  state TEXT NOT NULL CHECK (state IN ('open', 'prepared', 'committed', 'aborted')),
  rows INTEGER NOT NULL, since REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS transactions_by_life ON transactions (uid, tag, epoch);
CREATE TABLE IF NOT EXISTS parts (
  txn TEXT NOT NULL, part INTEGER NOT NULL, rows INTEGER NOT NULL, digest BLOB NOT NULL,
  body BLOB NOT NULL, PRIMARY KEY (txn, part)
);
CREATE TABLE IF NOT EXISTS marks (
  uid TEXT NOT NULL, tag TEXT NOT NULL, epoch INTEGER NOT NULL, pipeline TEXT NOT NULL,
  sink TEXT NOT NULL, run TEXT, txns TEXT NOT NULL, PRIMARY KEY (uid, tag, epoch)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS lives (
  uid TEXT NOT NULL, tag TEXT NOT NULL, settled_below INTEGER NOT NULL, PRIMARY KEY (uid, tag)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS rows (
  seq INTEGER PRIMARY KEY AUTOINCREMENT, pipeline TEXT NOT NULL, sink TEXT NOT NULL,
  run TEXT, uid TEXT NOT NULL, tag TEXT NOT NULL, epoch INTEGER NOT NULL, txn TEXT NOT NULL,
  row TEXT NOT NULL
);
CREATE VIEW IF NOT EXISTS whole_epochs AS
  SELECT seq, pipeline, sink, run, rows.uid, epoch, txn, row FROM rows JOIN (
    SELECT uid, tag, max(epoch) AS newest FROM marks GROUP BY uid, tag
  ) AS marked ON rows.uid = marked.uid AND rows.tag = marked.tag AND epoch <= newest;
"""


class Database:
    """
    One SQLite file. Usable from any thread; other processes may read it, and write to it too.

    One connection writes, and stays open: closing the last one would fold the log into the file.
    """

    def __init__(self, file: Path) -> None:
        self._file = file.absolute()
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._writer = self._open()
        self._writer.execute("PRAGMA journal_mode = WAL")
        self._writer.executescript(_SCHEMA)

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction: committed and durable when the block ends, nothing where it raises."""
        with self._transaction("COMMIT") as connection:
            yield connection

    @contextmanager
    def trying(self) -> Iterator[sqlite3.Connection]:
        """A transaction of which nothing stays."""
        with self._transaction("ROLLBACK") as connection:
            yield connection

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        with closing(self._open()) as connection:
            yield connection

    def close(self) -> None:
        self._writer.close()

    @contextmanager
    def _transaction(self, ending: str) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
                self._writer.execute(ending)
            finally:
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")

    def _open(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self._file, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA fullfsync = ON")
        return connection
