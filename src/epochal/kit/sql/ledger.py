"""The ledger: the server's own proof of what was committed, written with the rows (I9).

One row a handle, so that an attempt that lost never stands in the way of the one that won (I6), and
for staged epochs one row for the epoch itself (partition -1): whoever inserts that one applies the
epoch, whoever comes second waits for the first and then finds it done. The newest epoch of a uid is
never pruned, so "older than the newest" always means "settled long ago".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from epochal.errors import Misconfigured
from epochal.kit.sql.dialect import Dialect, Session
from epochal.terms import EpochNumber, Handle, Identity, Mark, Proof, Receipt, Uid

_WITHIN_SINK = ("epoch", "part", "generation", "attempt")
_KEY = ("uid", "sink", *_WITHIN_SINK)
_COLUMNS = (*_KEY, "pipeline", "sink_name", "run", "row_count")
NAME_CHARS_MAX = 255
_DELETED_MAX = 500
"""How many rows one statement deletes."""
_WHOLE_EPOCH = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The ledger in one schema, as one sink of one pipeline sees it."""

    schema: str
    identity: Identity
    dialect: Dialect

    def __post_init__(self) -> None:
        for what, name in (("pipeline", self.identity.pipeline), ("sink", self.identity.sink)):
            if len(name) > NAME_CHARS_MAX:
                raise Misconfigured(
                    f"the name of the {what} has {len(name)} characters: the ledger takes up to "
                    f"{NAME_CHARS_MAX}",
                    "name= gives a shorter one",
                )

    @property
    def table(self) -> str:
        return self.dialect.quote(self.schema, self.dialect.ledger)

    # Writing

    def claim_epoch(self, session: Session, epoch: EpochNumber, rows: int) -> bool:
        """
        Write the epoch's own row: False where the epoch is committed already.

        Waits for another transaction that is about to write the same row, until the lock timeout.
        """
        values = self._row((self.identity.uid, self.identity.tag, epoch, _WHOLE_EPOCH, 0, 0), rows)
        try:
            claimed = session.execute(
                f"INSERT INTO {self.table} ({self._columns()}) SELECT {values} FROM DUAL"
                f" WHERE NOT EXISTS (SELECT 1 FROM {self.table} l WHERE {self._mine('l')}"
                f" AND l.{self._name('epoch')} > {epoch})"
            )
        except self.dialect.errors as error:
            if self.dialect.is_duplicate(error):
                return False
            raise
        return claimed == 1

    def record(self, receipts: Sequence[Receipt]) -> list[str]:
        """One row for each handle, in the transaction that makes its rows visible."""
        return [
            f"INSERT INTO {self.table} ({self._columns()})"
            f" VALUES ({self._row(_key(receipt.handle), receipt.rows)})"
            for receipt in receipts
        ]

    def prune(self, session: Session, below: EpochNumber) -> int:
        epoch = self._name("epoch")
        newest = f"SELECT MAX(n.{epoch}) FROM {self.table} n WHERE {self._mine('n')}"
        return self._delete(session, f"{epoch} < {below} AND {epoch} < ({newest})")

    def forget(self, session: Session) -> int:
        """Every row, the newest too: of a pipeline that is dead for good."""
        return self._delete(session, "1 = 1")

    def _delete(self, session: Session, condition: str) -> int:
        """
        Delete rows of this sink, each by its whole key; how many it were.

        MySQL locks every row that a DELETE looks at, the first one behind the last that is meant
        too: that one may be another pipeline's, prepared, and locked until its decision.
        """
        names = [self._name(name) for name in _WITHIN_SINK]
        rows = session.query(
            f"SELECT {', '.join(names)} FROM {self.table} WHERE {self._mine()} AND {condition}"
        )
        keys = [
            " AND ".join(f"{name} = {int(value)}" for name, value in zip(names, row, strict=True))
            for row in rows
        ]
        for start in range(0, len(keys), _DELETED_MAX):
            listed = " OR ".join(f"({key})" for key in keys[start : start + _DELETED_MAX])
            session.execute(f"DELETE FROM {self.table} WHERE {self._mine()} AND ({listed})")
        return len(keys)

    # Reading

    def count(self, session: Session) -> int:
        ((found,),) = session.query(f"SELECT COUNT(*) FROM {self.table} WHERE {self._mine()}")
        return int(found)

    def proof(self, session: Session, handle: Handle) -> Proof:
        """What the ledger shows of a handle that is no longer prepared."""
        of_handle = " AND ".join(
            f"{self._name(name)} = {self.dialect.literal(value)}"
            for name, value in zip(_KEY, _key(handle), strict=True)
        )
        if session.query(f"SELECT {self._name('epoch')} FROM {self.table} WHERE {of_handle}"):
            return Proof.COMMITTED
        mine = self._mine(uid=handle.uid, tag=handle.sink)
        ((oldest,),) = session.query(
            f"SELECT MIN({self._name('epoch')}) FROM {self.table} WHERE {mine}"
        )
        is_forgotten = oldest is not None and handle.epoch < oldest
        return Proof.UNKNOWN if is_forgotten else Proof.ABORTED

    def holds(self, session: Session, epoch: EpochNumber) -> int | None:
        """The highest generation that committed this epoch or a later one; None where none did."""
        ((found,),) = session.query(
            f"SELECT MAX({self._name('generation')}) FROM {self.table}"
            f" WHERE {self._mine()} AND {self._name('epoch')} >= {epoch}"
        )
        return None if found is None else int(found)

    def newest(self, session: Session) -> list[Mark]:
        """Per uid that ever wrote under this pipeline's and this sink's name."""
        uid, epoch, run = (self._name(name) for name in ("uid", "epoch", "run"))
        who = self.identity
        rows = session.query(
            f"SELECT q.{uid}, q.{epoch}, q.{run} FROM (SELECT l.{uid}, l.{epoch}, l.{run},"
            f" ROW_NUMBER() OVER (PARTITION BY l.{uid} ORDER BY l.{epoch} DESC) place"
            f" FROM {self.table} l WHERE l.{self._name('pipeline')} ="
            f" {self.dialect.literal(who.pipeline)} AND l.{self._name('sink_name')} ="
            f" {self.dialect.literal(who.sink)}) q WHERE q.place = 1 ORDER BY q.{uid}"
        )
        return [
            Mark(uid=Uid(uid), epoch=EpochNumber(int(epoch)), run=run or None)
            for uid, epoch, run in rows
        ]

    # Words

    def _name(self, column: str) -> str:
        return self.dialect.quote(column)

    def _columns(self) -> str:
        return ", ".join(map(self._name, _COLUMNS))

    def _mine(self, alias: str = "", *, uid: str = "", tag: str = "") -> str:
        dot = f"{alias}." if alias else ""
        literal = self.dialect.literal
        return (
            f"{dot}{self._name('uid')} = {literal(uid or self.identity.uid)}"
            f" AND {dot}{self._name('sink')} = {literal(tag or self.identity.tag)}"
        )

    def _row(self, key: Sequence[str | int], rows: int) -> str:
        who = self.identity
        values = (*key, who.pipeline, who.sink, who.run, rows)
        return ", ".join(map(self.dialect.literal, values))


def _key(handle: Handle) -> tuple[str | int, ...]:
    numbers = (handle.epoch, handle.partition, handle.generation, handle.attempt)
    return (handle.uid, handle.sink, *numbers)
