"""
`Store`: what the receiver remembers. Every verb is one SQLite transaction.

    unknown ──part──► open ──seal──► prepared ──commit──► committed
       └───────abort─────┴──────abort────┴──► aborted

Aborted and committed are final. An aborted name is kept, so that a part which arrives late is
refused:

    driver   abort(txn)  → aborted
    task     part 3 of txn, delayed on the way → 409; without the kept name it would open txn again

Both are forgotten when their sink reports that their epoch is settled; names of such epochs are
refused from then on. After the last transaction of an epoch its mark is written, which proves the
whole epoch, also one without any transaction (I8).

The name of a transaction holds the claim of its driver, and a commit brings the claims under which
its epoch log decided the epoch. Where a machine is cloned, two logs decide the same epoch: the
transactions of the first stay, and the second, which does not have their claim, is refused.

`rows` and `whole_epochs` are for users' SQL; the other tables are the receiver's own. A write-ahead
log with synchronous=FULL: what was answered with 200 outlives a power cut, and readers don't wait.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from epochal.errors import require_known_format
from epochal.receiver.handlers import Handler, ReceivedCommit, without_transactions
from epochal.receiver.transactions import Refusal, Rows, State, Transaction, out_of_state
from epochal.storage.local import create_private_file
from epochal.terms import Handle

_PREFIX_END = "\U0010ffff"
_BUSY_TIMEOUT_S = 10.0
_FORMAT = 1
"""Of the tables: a later release that changes them raises it."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS transactions (
  txn TEXT PRIMARY KEY, uid TEXT NOT NULL, tag TEXT NOT NULL, epoch INTEGER NOT NULL,
  state TEXT NOT NULL CHECK (state IN ('open', 'prepared', 'committed', 'aborted')),
  rows INTEGER NOT NULL, since REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS transactions_by_owner ON transactions (uid, tag, epoch);
CREATE TABLE IF NOT EXISTS parts (
  txn TEXT NOT NULL, part INTEGER NOT NULL, rows INTEGER NOT NULL, digest BLOB NOT NULL,
  body BLOB NOT NULL, PRIMARY KEY (txn, part)
);
CREATE TABLE IF NOT EXISTS marks (
  uid TEXT NOT NULL, tag TEXT NOT NULL, epoch INTEGER NOT NULL, pipeline TEXT NOT NULL,
  sink TEXT NOT NULL, run TEXT, txns TEXT NOT NULL, PRIMARY KEY (uid, tag, epoch)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS owners (
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
    One SQLite file. Usable from any thread; other processes may read and write it too.

    One connection writes and stays open: closing the last one would checkpoint the log.
    """

    def __init__(self, file: Path) -> None:
        self._file = file.absolute()
        # Rows that nobody has decided on: only this user reads them.
        self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not self._file.exists():
            create_private_file(self._file)
        self._lock = threading.Lock()
        self._writer = self._open()
        self._require_known_format()
        self._writer.execute("PRAGMA journal_mode = WAL")
        self._writer.executescript(_SCHEMA)
        self._writer.execute(f"PRAGMA user_version = {_FORMAT}")

    def _require_known_format(self) -> None:
        ((found,),) = self._writer.execute("PRAGMA user_version")
        # A new file has 0.
        require_known_format(str(self._file), found or _FORMAT, _FORMAT)

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction: committed and durable at the end of the block, or rolled back."""
        with self._transaction("COMMIT") as connection:
            yield connection

    @contextmanager
    def rolled_back(self) -> Iterator[sqlite3.Connection]:
        """A transaction that is rolled back at the end of the block."""
        with self._transaction("ROLLBACK") as connection:
            yield connection

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        with closing(self._open()) as connection:
            yield connection

    def close(self) -> None:
        self._writer.close()

    @contextmanager
    def _transaction(self, end: str) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
                self._writer.execute(end)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The owner of rows, by the names that people gave."""

    pipeline: str
    sink: str
    run: str | None
    claims: tuple[str, ...] = ()
    """Under which its epoch log decided the epoch. Without them a copy of the log goes unseen."""


class Store:
    def __init__(
        self, database: Database, *, handler: Handler | None = None, keeps_rows: bool = True
    ) -> None:
        self._database = database
        self._handler = handler
        self._keeps_rows = keeps_rows

    # Preparing

    def prepare(self, txn: str, rows: Rows) -> Transaction:
        """A whole transaction in one request: durable and invisible afterwards."""
        handle = _handle(txn)
        with self._database.writing() as db:
            self._take_part(db, handle, 0, rows)
            return self._seal(db, handle, 1)

    def take_part(self, txn: str, part: int, rows: Rows) -> Transaction:
        """Keep one part of a transaction. Sent again, it replaces the part."""
        handle = _handle(txn)
        with self._database.writing() as db:
            self._take_part(db, handle, part, rows)
            return _find(db, handle)

    def seal(self, txn: str, parts: int) -> Transaction:
        """All parts are there: prepared."""
        handle = _handle(txn)
        with self._database.writing() as db:
            return self._seal(db, handle, parts)

    def _take_part(self, db: sqlite3.Connection, handle: Handle, part: int, rows: Rows) -> None:
        txn, found = str(handle), _find(db, handle)
        digest = hashlib.sha256(rows.lines).digest()
        known = db.execute("SELECT digest FROM parts WHERE txn = ? AND part = ?", (txn, part))
        if found.state is State.PREPARED and known.fetchone() == (digest,):
            return
        if found.state not in (State.UNKNOWN, State.OPEN):
            raise out_of_state(txn, found.state, "prepared with other rows")
        if found.state is State.UNKNOWN:
            _put(db, handle, State.OPEN)
        db.execute(
            "INSERT OR REPLACE INTO parts VALUES (?, ?, ?, ?, ?)",
            (txn, part, rows.count, digest, zlib.compress(rows.lines, 1)),
        )

    def _seal(self, db: sqlite3.Connection, handle: Handle, parts: int) -> Transaction:
        txn, found = str(handle), _find(db, handle)
        if found.state is State.PREPARED:
            return found
        if found.state is not State.OPEN:
            raise out_of_state(txn, found.state, "sealed")
        held = db.execute("SELECT part, rows FROM parts WHERE txn = ? ORDER BY part", (txn,))
        counts = dict(held.fetchall())
        if len(counts) != parts or sorted(counts) != list(range(len(counts))):
            raise Refusal(409, f"{txn} has the parts {sorted(counts)}, not {parts}", State.OPEN)
        db.execute(
            "UPDATE transactions SET state = 'prepared', rows = ? WHERE txn = ?",
            (sum(counts.values()), txn),
        )
        return _find(db, handle)

    # Deciding

    def rehearse(self, txns: Sequence[str], owner: Owner) -> None:
        """Apply prepared transactions and roll back: what can fail fails now (I3)."""
        handles = [_handle(txn) for txn in txns]
        with self._database.rolled_back() as db:
            for handle in handles:
                found = _find(db, handle)
                if found.state is State.COMMITTED:
                    continue  # of a decided epoch, some rows of which are written again
                if found.state is not State.PREPARED:
                    raise out_of_state(found.txn, found.state, "rehearsed")
                try:
                    self._apply(db, handle, owner)
                except Exception as error:  # anything that a handler raises
                    reason = f"{type(error).__name__}: {error}"
                    raise Refusal(422, f"the handler refused {handle}: {reason}") from error

    def commit(self, txn: str, owner: Owner) -> Transaction:
        """Make a prepared transaction visible. May be repeated."""
        handle = _handle(txn)
        with self._database.writing() as db:
            found = _find(db, handle)
            if found.state is State.COMMITTED:
                return found
            if found.state is not State.PREPARED:
                raise out_of_state(txn, found.state, "committed")
            _require_own_epoch(db, handle, owner)
            self._apply(db, handle, owner)
            db.execute("DELETE FROM parts WHERE txn = ?", (txn,))
            _put(db, handle, State.COMMITTED, rows=found.rows)
            return _find(db, handle)

    def abort(self, txn: str) -> Transaction:
        """Abort a transaction for good. A committed one is refused with its state."""
        handle = _handle(txn)
        with self._database.writing() as db:
            found = _find(db, handle)
            if found.state is State.COMMITTED:
                raise out_of_state(txn, found.state, "aborted")
            if found.state not in (State.ABORTED, State.FORGOTTEN):
                db.execute("DELETE FROM parts WHERE txn = ?", (txn,))
                _put(db, handle, State.ABORTED)
            return _find(db, handle)

    def _apply(self, db: sqlite3.Connection, handle: Handle, owner: Owner) -> None:
        txn = str(handle)
        if self._keeps_rows:
            columns = (owner.pipeline, owner.sink, owner.run, handle.uid, handle.sink, handle.epoch)
            db.executemany(
                "INSERT INTO rows (pipeline, sink, run, uid, tag, epoch, txn, row)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                ((*columns, txn, line) for line in _lines(db, txn)),
            )
        if self._handler is not None:
            commit = ReceivedCommit(
                connection=db,
                txn=txn,
                pipeline=owner.pipeline,
                sink=owner.sink,
                run=owner.run,
                epoch=handle.epoch,
                rows=partial(_parsed, db, txn),
            )
            with without_transactions(db):
                self._handler(commit)

    # Reading

    def find(self, txn: str) -> Transaction:
        handle = _handle(txn)
        with self._database.reading() as db:
            found = _find(db, handle)
        if found.state in (State.UNKNOWN, State.FORGOTTEN):
            raise out_of_state(txn, found.state, "shown")
        return found

    def in_doubt(self, prefix: str, *, after: str, limit: int) -> Sequence[Transaction]:
        """Open and prepared transactions, sorted by name: at most `limit`, after `after`."""
        with self._database.reading() as db:
            rows = db.execute(
                "SELECT txn, state, rows, since FROM transactions"
                " WHERE state IN ('open', 'prepared') AND txn >= ? AND txn < ? AND txn > ?"
                " ORDER BY txn LIMIT ?",
                (prefix, prefix + _PREFIX_END, after, limit),
            ).fetchall()
        return [_transaction(row) for row in rows]

    def rows(
        self, *, after: int, limit: int, is_whole: bool, pipeline: str = "", sink: str = ""
    ) -> Sequence[Mapping[str, Any]]:
        """Visible rows in the order of their commits; of one pipeline or sink, if named."""
        table = "whole_epochs" if is_whole else "rows"
        with self._database.reading() as db:
            found = db.execute(
                f"SELECT seq, pipeline, sink, run, epoch, txn, row FROM {table}"  # noqa: S608
                " WHERE seq > ? AND ? IN ('', pipeline) AND ? IN ('', sink) ORDER BY seq LIMIT ?",
                (after, pipeline, sink, limit),
            ).fetchall()
        names = ("seq", "pipeline", "sink", "run", "epoch", "txn", "row")
        return [dict(zip(names, (*row[:-1], json.loads(row[-1])), strict=True)) for row in found]

    @property
    def counts(self) -> bool:
        """Whether rows are kept, so that they can be counted."""
        return self._keeps_rows

    def count(self, uid: str, tag: str) -> Sequence[Mapping[str, int]]:
        """How many rows of each epoch are visible, of one uid and sink."""
        with self._database.reading() as db:
            found = db.execute(
                "SELECT epoch, count(*) FROM rows WHERE uid = ? AND tag = ?"
                " GROUP BY epoch ORDER BY epoch",
                (uid, tag),
            ).fetchall()
        return [{"epoch": epoch, "rows": rows} for epoch, rows in found]

    # Proofs of epochs

    def mark(self, uid: str, tag: str, epoch: int, owner: Owner, txns: Sequence[str]) -> None:
        """An epoch is whole: all these transactions are committed, and there are no others (I2)."""
        names = json.dumps(sorted(txns))
        with self._database.writing() as db:
            if epoch < _settled_below(db, uid, tag):
                raise Refusal(410, f"epoch {epoch} of {uid} is settled", State.FORGOTTEN)
            known = db.execute(
                "SELECT txns FROM marks WHERE uid = ? AND tag = ? AND epoch = ?", (uid, tag, epoch)
            ).fetchone()
            if known is not None and known[0] != names:
                raise Refusal(409, f"epoch {epoch} of {uid} is marked with {known[0]}", State.TAKEN)
            states = {txn: _find(db, _handle(txn)).state for txn in txns}
            open_ = [txn for txn, state in states.items() if state is not State.COMMITTED]
            if open_:
                raise Refusal(409, f"epoch {epoch} of {uid} is not whole: {open_}")
            db.execute(
                "INSERT OR REPLACE INTO marks VALUES (?, ?, ?, ?, ?, ?, ?)",
                (uid, tag, epoch, owner.pipeline, owner.sink, owner.run, names),
            )

    def newest(self, pipeline: str, sink: str) -> Sequence[Mapping[str, Any]]:
        with self._database.reading() as db:
            found = db.execute(
                "SELECT uid, max(epoch), run FROM marks WHERE pipeline = ? AND sink = ?"
                " GROUP BY uid, tag",
                (pipeline, sink),
            ).fetchall()
        return [{"uid": uid, "epoch": epoch, "run": run} for uid, epoch, run in found]

    def forget(self, uid: str, tag: str, below: int) -> int:
        """Forget proofs of epochs below `below` and below the newest; returns the new limit."""
        with self._database.writing() as db:
            (newest,) = db.execute(
                "SELECT max(epoch) FROM marks WHERE uid = ? AND tag = ?", (uid, tag)
            ).fetchone()
            limit = max(_settled_below(db, uid, tag), min(below, newest or 0))
            db.execute("INSERT OR REPLACE INTO owners VALUES (?, ?, ?)", (uid, tag, limit))
            old = (uid, tag, limit)
            db.execute("DELETE FROM marks WHERE uid = ? AND tag = ? AND epoch < ?", old)
            db.execute(
                "DELETE FROM transactions WHERE uid = ? AND tag = ? AND epoch < ?"
                " AND state IN ('committed', 'aborted')",
                old,
            )
        return limit


def _handle(txn: str) -> Handle:
    handle = Handle.parse(txn)
    if handle is None:
        raise Refusal(400, f"{txn!r} is not the name of a transaction")
    return handle


def _find(db: sqlite3.Connection, handle: Handle) -> Transaction:
    row = db.execute(
        "SELECT txn, state, rows, since FROM transactions WHERE txn = ?", (str(handle),)
    ).fetchone()
    if row is not None:
        return _transaction(row)
    is_old = handle.epoch < _settled_below(db, handle.uid, handle.sink)
    return Transaction(txn=str(handle), state=State.FORGOTTEN if is_old else State.UNKNOWN)


def _require_own_epoch(db: sqlite3.Connection, handle: Handle, owner: Owner) -> None:
    """An epoch that is marked is whole; before that, transactions of one epoch log make it up."""
    if not owner.claims:
        return
    of_epoch = (handle.uid, handle.sink, handle.epoch)
    is_marked = db.execute(
        "SELECT 1 FROM marks WHERE uid = ? AND tag = ? AND epoch >= ?", of_epoch
    ).fetchone()
    committed = db.execute(
        "SELECT txn FROM transactions WHERE uid = ? AND tag = ? AND epoch = ?"
        " AND state = 'committed'",
        of_epoch,
    )
    others = {_handle(txn).claim for (txn,) in committed} - {*owner.claims}
    if is_marked or others:
        raise Refusal(
            409,
            f"epoch {handle.epoch} of {handle.uid} was committed from another epoch log",
            State.TAKEN,
        )


def _transaction(row: tuple[str, str, int, float]) -> Transaction:
    txn, state, rows, since = row
    return Transaction(txn=txn, state=State(state), rows=rows, age_s=max(0.0, time.time() - since))


def _put(db: sqlite3.Connection, handle: Handle, state: State, *, rows: int = 0) -> None:
    db.execute(
        "INSERT OR REPLACE INTO transactions VALUES (?, ?, ?, ?, ?, ?, ?)",
        (str(handle), handle.uid, handle.sink, handle.epoch, state.value, rows, time.time()),
    )


def _settled_below(db: sqlite3.Connection, uid: str, tag: str) -> int:
    row = db.execute(
        "SELECT settled_below FROM owners WHERE uid = ? AND tag = ?", (uid, tag)
    ).fetchone()
    return 0 if row is None else int(row[0])


def _lines(db: sqlite3.Connection, txn: str) -> Iterator[str]:
    parts = db.execute("SELECT part FROM parts WHERE txn = ? ORDER BY part", (txn,)).fetchall()
    for (part,) in parts:
        query = "SELECT body FROM parts WHERE txn = ? AND part = ?"
        (body,) = db.execute(query, (txn, part)).fetchone()
        lines = zlib.decompress(body)
        # Only at newlines: `splitlines` also splits at other characters that text may hold.
        yield from (line.decode() for line in lines.split(b"\n") if line)


def _parsed(db: sqlite3.Connection, txn: str) -> Iterator[dict[str, Any]]:
    return (json.loads(line) for line in _lines(db, txn))
