"""Exactly-once rows in a table of a SQLite database."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import ClassVar

import pyarrow as pa

from epochal import kit

LEDGER = (
    "CREATE TABLE IF NOT EXISTS epochal_ledger (pipeline TEXT, sink TEXT, uid TEXT, run TEXT,"
    " epoch INTEGER, handles TEXT, PRIMARY KEY (pipeline, sink, uid, epoch))"
)


@dataclass(frozen=True, kw_only=True)
class SQLite(kit.SinkBase):
    """Rows in a table that is there already. Driver and tasks must share the file."""

    kind: ClassVar[str] = "sqlite"

    path: str
    """The database file."""
    table: str
    busy_timeout_s: float = 30.0
    """How long to wait for other connections that are writing."""

    @property
    def target(self) -> str:
        return f"{self.path}/{self.table}"

    def writer(self, task: kit.Task) -> SQLiteWriter:
        return SQLiteWriter(self, task)

    def committer(self, identity: kit.Identity, limits: kit.Limits) -> SQLiteCommitter:
        return SQLiteCommitter(self, identity, limits)

    def connect(self) -> sqlite3.Connection:
        """
        Open the file, which must be there. The verbs of a committer are called one at a time, but
        from several threads, and a rehearsal's connection lives until its commit.
        """
        return sqlite3.connect(
            f"file:{self.path}?mode=rw",
            uri=True,
            timeout=self.busy_timeout_s,
            isolation_level=None,
            check_same_thread=False,
        )


class SQLiteWriter:
    """Stages rows in a table that is named by the handle; every batch is durable at once."""

    def __init__(self, sink: SQLite, task: kit.Task) -> None:
        self._handle, self._sink, self._rows = task.handle, sink, 0
        columns, marks = names(task.schema), ", ".join("?" * len(task.schema))
        self._insert = f"INSERT INTO {quoted(str(task.handle))} VALUES ({marks})"
        self._execute(f"CREATE TABLE {quoted(str(task.handle))} ({columns})")

    def write(self, batch: pa.RecordBatch) -> None:
        rows = zip(*(column.to_pylist() for column in batch.columns), strict=True)
        with errors(), closing(self._sink.connect()) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(self._insert, rows)
            connection.commit()
        self._rows += batch.num_rows

    def prepare(self) -> kit.Receipt:
        return kit.Receipt(handle=self._handle, fingerprint=kit.Fingerprint(self._rows))

    def abort(self) -> None:
        self._execute(f"DROP TABLE IF EXISTS {quoted(str(self._handle))}")

    def _execute(self, statement: str) -> None:
        with errors(), closing(self._sink.connect()) as connection:
            connection.execute(statement)


class SQLiteCommitter(kit.StagedCommitter[sqlite3.Connection]):
    def __init__(self, sink: SQLite, identity: kit.Identity, limits: kit.Limits) -> None:
        super().__init__(identity, limits)
        self._sink = sink
        self._table = quoted(sink.table)
        self._key = (identity.pipeline, identity.sink)

    def check(self, schema: pa.Schema | None) -> Sequence[kit.Ability]:
        with errors(), closing(self._sink.connect()) as connection:
            there = connection.execute(f"SELECT * FROM {self._table} LIMIT 0").description
        missing = set(schema.names if schema else ()) - {column[0] for column in there}
        if missing:
            raise kit.Misconfigured(
                f"{self._sink.target} has no column {', '.join(sorted(missing))}",
                "add it to the table, or leave it out: select=[…]",
            )
        for field in schema or ():
            if not is_plain(field.type):
                raise kit.Misconfigured(
                    f"column {field.name} is {field.type}, which SQLite does not have",
                    "cast it to a number, text or binary: select=[…]",
                )
        because = "the rows of an epoch are inserted in one transaction"
        return [kit.Ability(name="whole epochs", granted=True, because=because)]

    def transaction(self, *, is_read: bool) -> sqlite3.Connection:
        connection = self._sink.connect()
        try:
            connection.execute("BEGIN" if is_read else "BEGIN IMMEDIATE")
            connection.execute("SELECT 1" if is_read else LEDGER)
        except BaseException:
            connection.close()
            raise
        return connection

    def staged(self, transaction: sqlite3.Connection, prefix: str) -> Sequence[str]:
        tables = "SELECT name FROM sqlite_master WHERE type = 'table' AND name GLOB ?"
        return [name for (name,) in transaction.execute(tables, (prefix + "*",))]

    def publish(self, transaction: sqlite3.Connection, receipts: Sequence[kit.Receipt]) -> None:
        for receipt in receipts:
            staging = quoted(str(receipt.handle))
            columns = transaction.execute(f"SELECT * FROM {staging} LIMIT 0").description
            into = ", ".join(quoted(column[0]) for column in columns)
            transaction.execute(f"INSERT INTO {self._table} ({into}) SELECT * FROM {staging}")

    def discard(self, transaction: sqlite3.Connection, handles: Sequence[str]) -> None:
        for handle in handles:
            transaction.execute(f"DROP TABLE {quoted(handle)}")

    def record(self, transaction: sqlite3.Connection, entry: kit.LedgerEntry) -> None:
        values = (*self._key, entry.uid, entry.run, entry.epoch, json.dumps(entry.handles))
        transaction.execute("INSERT INTO epochal_ledger VALUES (?, ?, ?, ?, ?, ?)", values)

    def recorded(self, transaction: sqlite3.Connection) -> Sequence[kit.LedgerEntry]:
        if not self.staged(transaction, "epochal_ledger"):
            return []
        found = transaction.execute(
            "SELECT uid, epoch, run, handles FROM epochal_ledger WHERE pipeline = ? AND sink = ?",
            self._key,
        )
        return [
            kit.LedgerEntry(uid=uid, epoch=epoch, run=run, handles=tuple(json.loads(handles)))
            for uid, epoch, run, handles in found
        ]

    def forget(self, transaction: sqlite3.Connection, epochs: Sequence[int]) -> None:
        one = "DELETE FROM epochal_ledger WHERE pipeline = ? AND sink = ? AND uid = ? AND epoch = ?"
        transaction.executemany(one, [(*self._key, self.identity.uid, each) for each in epochs])

    def recount(self) -> kit.Recount:
        with errors(), closing(self._sink.connect()) as connection:
            [(rows,)] = connection.execute(f"SELECT count(*) FROM {self._table}")
        return kit.Recount(rows=rows, because="rows of the table", is_alone=False)

    def meaning(self, error: Exception) -> kit.EpochalError | None:
        return meaning(error)


def meaning(error: Exception) -> kit.EpochalError | None:
    if not isinstance(error, sqlite3.DatabaseError) or isinstance(error, sqlite3.ProgrammingError):
        return None
    fact = f"SQLite: {error}"
    if isinstance(error, (sqlite3.IntegrityError, sqlite3.DataError)):
        return kit.RowRejected(fact, "change the rows, or the constraint that refuses them")
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_IOERR):
        return kit.TryAgain(fact, "another connection is writing: raise busy_timeout_s")
    return kit.Misconfigured(fact, "look at the path, its rights, and the table in it")


@contextmanager
def errors() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise meaning(error) or error from error


def is_plain(kind: pa.DataType) -> bool:
    tests = (pa.types.is_signed_integer, pa.types.is_floating, pa.types.is_boolean)
    texts = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary)
    return any(test(kind) for test in (*tests, *texts))


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def names(schema: pa.Schema) -> str:
    return ", ".join(quoted(name) for name in schema.names)
