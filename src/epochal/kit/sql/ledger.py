"""The ledger: the server's proof of what was committed, written in the rows' transaction (I9).

It has one row per handle, so that an attempt that lost never conflicts with the one that won (I6),
and one row for the epoch itself (partition -1). Of two drivers that carry out the same epoch, the
first to insert that row does it; the second waits for the first and then finds the epoch taken:

    driver A: BEGIN  claim(7) ok      apply rows  COMMIT
    driver B:        BEGIN  claim(7) … waits …    taken: by the same handles?

If the handles in the ledger are the very ones of B's decision, 7 is committed: A was an earlier
driver of the same log, or a later one. If they are others, two logs decided 7, as one is a copy of
the other; B's rows are not at the target, and B is refused. `owner` is the claim of an epoch's
handles: where rows become visible transaction by transaction (`prepared`), the epoch's row comes
before the first of them, when no handle's row can be read yet.

The newest epoch of a uid is never pruned, and a driver carries out no epoch but its log's newest;
so one that finds only later epochs was superseded, or a copy has gone past it. A later comparison
of the newest committed epoch with the epoch log reads `newest`, and `handles` which it was.
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

_WHOLE_EPOCH = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger(LedgerRows):
    """The ledger in one schema, as one sink of one pipeline sees it."""

    # Writing

    def claim_epoch(
        self, session: Session, epoch: EpochNumber, receipts: Sequence[Receipt]
    ) -> bool:
        """
        Insert the epoch's own row: False where it, or that of a later epoch, is there already.

        Waits for another transaction that has inserted the same row, until the lock timeout.
        """
        key = (self.identity.uid, self.identity.tag, epoch, _WHOLE_EPOCH, 0, 0, UNCLAIMED)
        values = self._row(
            key, owner_of(receipts, self.identity), sum(one.rows for one in receipts)
        )
        claim = (
            f"INSERT INTO {self.table} ({self._columns()}) SELECT {values}{self.dialect.dual}"
            f" WHERE NOT EXISTS (SELECT 1 FROM {self.table} l WHERE {self._mine('l')}"
            f" AND l.{self._name('epoch')} > {epoch}){self.dialect.on_ledger_conflict}"
        )
        try:
            return session.execute(claim) == 1
        except self.dialect.errors as error:
            if self.dialect.is_duplicate(error):
                return False
            raise

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
                f" AND {self._name('part')} = {_WHOLE_EPOCH}"
                f" AND {owner} = {self.dialect.literal(owner_now)}"
            )
            == 1
        )

    def prune(self, session: Session, below: EpochNumber) -> int:
        epoch = self._name("epoch")
        newest = f"SELECT MAX(n.{epoch}) FROM {self.table} n WHERE {self._mine('n')}"
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
        handles = frozenset(one for one in found if one.partition != _WHOLE_EPOCH)
        return handles if len(handles) < len(found) else None

    def owner(self, session: Session, epoch: EpochNumber) -> Claim | None:
        """The claim under which an epoch is carried out; None where it has no row (any more)."""
        rows = session.query(
            f"SELECT {self._name('owner')} FROM {self.table}"
            f" WHERE {self._mine()} AND {self._name('epoch')} = {epoch}"
            f" AND {self._name('part')} = {_WHOLE_EPOCH}"
        )
        return Claim(rows[0][0]) if rows else None

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

    # SQL

    def _mine(self, alias: str = "", *, uid: str = "", tag: str = "") -> str:
        dot = f"{alias}." if alias else ""
        literal = self.dialect.literal
        return (
            f"{dot}{self._name('uid')} = {literal(uid or self.identity.uid)}"
            f" AND {dot}{self._name('sink')} = {literal(tag or self.identity.tag)}"
        )
