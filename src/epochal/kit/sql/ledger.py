"""The ledger: the server's proof of what was committed, written in the rows' transaction (I9).

It has one row per handle, so that an attempt that lost never conflicts with the one that won (I6),
and two for the epoch itself: that it is taken (partition -1), and that all of it is committed (-2).
Of two drivers that carry out the same epoch, the first to insert the row "taken" does it; the
second waits for the first and then finds the epoch taken:

    driver A: BEGIN  claim(7) ok      apply rows  COMMIT
    driver B:        BEGIN  claim(7) … waits …    taken: by the same handles?

If the handles in the ledger are the very ones of B's decision, 7 is committed: A was an earlier
driver of the same log, or a later one. If they are others, two logs decided 7, as one is a copy of
the other; B's rows are not at the target, and B is refused. `owner` is the claim of an epoch's
handles: where rows become visible transaction by transaction (`prepared`), the row "taken" comes
before the first of them, when no handle's row can be read yet, and the row "all" after the last.
Elsewhere both are in the transaction of the rows.

The newest epoch of a uid is never pruned, and a driver carries out no epoch but its log's newest;
so one that finds only later epochs was superseded, or a copy has gone past it.

A server that was restored, or replaced by a replica that lagged, has lost the newest rows of its
ledger. So an epoch is only taken where the one that was committed before it is there:

    ledger           log: 7 is committed
    … 6 7            taken(8) ok
    … 6              taken(8) refused: the server went back in time, 7 is not there
    … 6 7 8          these very handles are 8: committed, the reply was lost

A release that writes rows which this one would read wrongly marks the table by a row of no
pipeline: uid and sink are "format", and the epoch is its number. Without such a row it is 1. Every
start asks, before it claims.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from epochal.kit.sql.client import Session
from epochal.kit.sql.ledger_rows import KEY, WITHIN_SINK, LedgerRows, key_of
from epochal.terms import (
    UNCLAIMED,
    Claim,
    EpochNumber,
    Generation,
    Handle,
    Mark,
    Proof,
    Receipt,
    Uid,
    claims_of,
    owner_of,
)

_TAKEN = -1
_ALL = -2
FORMAT = 1
_OF_FORMAT = "format"
"""Uid and sink of the row that holds the format's number; shorter than those of any pipeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger(LedgerRows):
    """The ledger in one schema, as one sink of one pipeline sees it."""

    # Writing

    def claim_epoch(
        self,
        session: Session,
        epoch: EpochNumber,
        receipts: Sequence[Receipt],
        *,
        after: EpochNumber | None,
    ) -> bool:
        """
        Insert the row that an epoch is taken: False where it, or that of a later epoch, is there
        already, or the epoch `after` which it comes is not committed here.

        Waits for another transaction that has inserted the same row, until the lock timeout.
        """
        try:
            return session.execute(self.claim(epoch, receipts, after=after)) == 1
        except self.dialect.errors as error:
            if self.dialect.is_duplicate(error):
                return False
            raise

    def claim(
        self, epoch: EpochNumber, receipts: Sequence[Receipt], *, after: EpochNumber | None
    ) -> str:
        """The statement of it, which inserts one row or none."""
        epochs = self._name("epoch")
        unless = (
            f"NOT EXISTS (SELECT 1 FROM {self.table} l WHERE {self._mine('l')}"
            f" AND l.{epochs} > {epoch})"
        )
        if after is not None:
            unless += (
                f" AND EXISTS (SELECT 1 FROM {self.table} b WHERE {self._mine('b')}"
                f" AND b.{epochs} >= {after} AND b.{self._name('part')} = {_ALL})"
            )
        return self._insert(self._of_epoch(epoch, _TAKEN, receipts), unless)

    def record_epoch(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> list[str]:
        """Statements for the rows of these handles, and for the row that they are all."""
        handles = [self._of_handle(receipt) for receipt in receipts]
        return self._inserts([*handles, self._of_epoch(epoch, _ALL, receipts)])

    def record_all(self, session: Session, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        """Insert the row that all of an epoch is committed. May be repeated."""
        statement = self._insert(self._of_epoch(epoch, _ALL, receipts), "1 = 1")
        try:
            session.execute(statement)
        except self.dialect.errors as error:
            if not self.dialect.is_duplicate(error):
                raise

    def _of_epoch(self, epoch: EpochNumber, part: int, receipts: Sequence[Receipt]) -> str:
        key = (self.identity.uid, self.identity.tag, epoch, part, 0, 0, UNCLAIMED)
        rows = sum(receipt.rows for receipt in receipts)
        return self._row(key, owner_of(receipts, self.identity), rows)

    def _insert(self, values: str, condition: str) -> str:
        """Inserts one row; none where the condition is false, or its key is there already."""
        return (
            f"INSERT INTO {self.table} ({self._columns()}) SELECT {values}{self.dialect.dual}"
            f" WHERE {condition}{self.dialect.on_ledger_conflict}"
        )

    def take_over_epoch(
        self, session: Session, epoch: EpochNumber, receipts: Sequence[Receipt]
    ) -> bool:
        """
        Make these receipts' claim the owner of an epoch whose row is there, after their rows were
        written again. False where a driver of a copy was first, or the epoch is long past.
        """
        owner_now, mine = self.owner(session, epoch), owner_of(receipts, self.identity)
        if not receipts or owner_now == mine:
            return True
        if owner_now not in claims_of(receipts):
            return False
        owner = self._name("owner")
        return (
            session.execute(
                f"UPDATE {self.table} SET {owner} = {self.dialect.literal(mine)}"
                f" WHERE {self._mine()} AND {self._name('epoch')} = {epoch}"
                f" AND {self._name('part')} = {_TAKEN}"
                f" AND {owner} = {self.dialect.literal(owner_now)}"
            )
            == 1
        )

    def prune(self, session: Session, below: EpochNumber) -> int:
        epoch = self._name("epoch")
        newest = (
            f"SELECT MAX(n.{epoch}) FROM {self.table} n WHERE {self._mine('n')}"
            f" AND n.{self._name('part')} = {_ALL}"
        )
        return self._delete(session, f"{epoch} < {below} AND {epoch} < ({newest})")

    def forget(self, session: Session) -> int:
        """Delete every row, the newest too: of a pipeline that will never run again."""
        return self._delete(session, "1 = 1")

    def _delete(self, session: Session, condition: str) -> int:
        """
        Delete rows of this sink; the number of rows.

        MySQL also locks the first row behind the last one that is deleted. That row may belong to a
        prepared transaction of another pipeline and stay locked until its decision; so there rows
        are deleted by their whole keys, which locks nothing else, and one by one: for a list of
        keys the optimizer may scan the table, and a scan waits for every locked row.
        """
        if not self.dialect.deletes_lock_beyond:
            return session.execute(f"DELETE FROM {self.table} WHERE {self._mine()} AND {condition}")
        names = [self._name(name) for name in WITHIN_SINK]
        rows = session.query(
            f"SELECT {', '.join(names)} FROM {self.table} WHERE {self._mine()} AND {condition}"
        )
        keys = [
            " AND ".join(
                f"{name} = {self.dialect.literal(value)}"
                for name, value in zip(names, row, strict=True)
            )
            for row in rows
        ]
        for key in keys:
            session.execute(f"DELETE FROM {self.table} WHERE {self._mine()} AND {key}")
        return len(keys)

    # Reading

    def format(self, session: Session) -> int:
        """The number of the format that the ledger is marked with."""
        whole = self._mine(uid=_OF_FORMAT, tag=_OF_FORMAT)
        ((found,),) = session.query(
            f"SELECT MAX({self._name('epoch')}) FROM {self.table} WHERE {whole}"
        )
        return FORMAT if found is None else int(found)

    def count(self, session: Session) -> int:
        ((found,),) = session.query(f"SELECT COUNT(*) FROM {self.table} WHERE {self._mine()}")
        return int(found)

    def proof(self, session: Session, handle: Handle) -> Proof:
        """What the ledger proves of a handle that the server no longer lists."""
        of_handle = " AND ".join(
            f"{self._name(name)} = {self.dialect.literal(value)}"
            for name, value in zip(KEY, key_of(handle), strict=True)
        )
        if session.query(f"SELECT {self._name('epoch')} FROM {self.table} WHERE {of_handle}"):
            return Proof.COMMITTED
        mine = self._mine(uid=handle.uid, tag=handle.sink)
        ((oldest,),) = session.query(
            f"SELECT MIN({self._name('epoch')}) FROM {self.table} WHERE {mine}"
        )
        is_forgotten = oldest is not None and handle.epoch < oldest
        return Proof.UNKNOWN if is_forgotten else Proof.ABORTED

    def handles(self, session: Session, epoch: EpochNumber) -> frozenset[Handle] | None:
        """The handles that an epoch was committed under; None where it has no row of its own."""
        names = ("part", "generation", "claim", "attempt")
        rows = session.query(
            f"SELECT {', '.join(map(self._name, names))} FROM {self.table}"
            f" WHERE {self._mine()} AND {self._name('epoch')} = {epoch}"
        )
        found = [
            Handle(
                uid=self.identity.uid,
                generation=Generation(int(generation)),
                claim=Claim(claim),
                epoch=epoch,
                sink=self.identity.tag,
                partition=int(part),
                attempt=int(attempt),
            )
            for part, generation, claim, attempt in rows
        ]
        handles = frozenset(one for one in found if one.partition >= 0)
        return handles if len(handles) < len(found) else None

    def owner(self, session: Session, epoch: EpochNumber) -> Claim | None:
        """The claim under which an epoch is carried out; None where it has no row (any more)."""
        rows = session.query(
            f"SELECT {self._name('owner')} FROM {self.table}"
            f" WHERE {self._mine()} AND {self._name('epoch')} = {epoch}"
            f" AND {self._name('part')} = {_TAKEN}"
        )
        return Claim(rows[0][0]) if rows else None

    def newest_epoch(self, session: Session) -> EpochNumber | None:
        """The newest epoch of this sink of this uid that is committed as a whole."""
        ((newest,),) = session.query(
            f"SELECT MAX({self._name('epoch')}) FROM {self.table} WHERE {self._mine()}"
            f" AND {self._name('part')} = {_ALL}"
        )
        return None if newest is None else EpochNumber(int(newest))

    def newest(self, session: Session) -> list[Mark]:
        """
        Of each uid that ever wrote under this pipeline's and this sink's name, the newest epoch
        that is committed as a whole.
        """
        uid, epoch, run = (self._name(name) for name in ("uid", "epoch", "run"))
        who = self.identity
        rows = session.query(
            f"SELECT q.{uid}, q.{epoch}, q.{run} FROM (SELECT l.{uid}, l.{epoch}, l.{run},"
            f" ROW_NUMBER() OVER (PARTITION BY l.{uid} ORDER BY l.{epoch} DESC) place"
            f" FROM {self.table} l WHERE l.{self._name('pipeline')} ="
            f" {self.dialect.literal(who.pipeline)} AND l.{self._name('sink_name')} ="
            f" {self.dialect.literal(who.sink)} AND l.{self._name('part')} = {_ALL}) q"
            f" WHERE q.place = 1 ORDER BY q.{uid}"
        )
        return [
            Mark(uid=Uid(uid), epoch=EpochNumber(int(epoch)), run=run or None)
            for uid, epoch, run in rows
        ]

    # SQL

    def _mine(self, alias: str = "", *, uid: str = "", tag: str = "") -> str:
        dot = f"{alias}." if alias else ""
        literal = self.dialect.literal
        return (
            f"{dot}{self._name('uid')} = {literal(uid or self.identity.uid)}"
            f" AND {dot}{self._name('sink')} = {literal(tag or self.identity.tag)}"
        )
