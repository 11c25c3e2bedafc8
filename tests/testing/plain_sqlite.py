"""The SQLite sink without the engine, in the plain verbs of the contract, and mutants of it."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import dataclass

from epochal_sqlite import LEDGER, SQLite, SQLiteCommitter, SQLiteWriter, errors, quoted

from epochal import kit


@dataclass(frozen=True, kw_only=True)
class PlainSQLite(SQLite):
    """The writer is the example's; the committer has no base class but the defaults."""

    def committer(self, identity, limits):
        return PlainCommitter(self, identity, limits)


class PlainCommitter(kit.CommitterBase):
    def __init__(self, sink, identity, limits):
        self.sink, self.identity = sink, identity
        self.key = (identity.pipeline, identity.sink, identity.uid)
        self.prefix = kit.handle_prefix(identity.uid)
        self.example = SQLiteCommitter(sink, identity, limits)
        self.after = None

    def begin(self, begin):
        self.after = begin.newest_committed

    def check(self, schema):
        return self.example.check(schema)

    def rehearse(self, epoch, receipts):
        """Apply and take back: what is refused is refused here."""
        with errors(), closing(self.begun()) as db:
            self.require_not_back(db)
            self.publish(db, self.handles(receipts))
            db.rollback()

    def commit(self, epoch, receipts):
        handles = self.handles(receipts)
        with errors(), closing(self.begun()) as db:
            if self.is_recorded(db, epoch, handles):
                return
            self.require_not_back(db)
            self.require_staged(db, epoch, handles)
            self.publish(db, handles)
            self.discard(db, handles)
            self.record(db, epoch, handles)
            db.commit()

    def abort(self, epoch, receipts):
        with errors(), closing(self.begun()) as db:
            self.discard(db, set(self.handles(receipts)) & set(self.staged(db)))
            db.commit()

    def in_doubt(self):
        with errors(), closing(self.begun()) as db:
            found = [kit.InDoubt(name=one, handle=kit.Handle.parse(one)) for one in self.staged(db)]
        return [one for one in found if self.is_ours(one.handle)]

    def outcome(self, epoch, receipt):
        with errors(), closing(self.begun()) as db:
            if str(receipt.handle) in self.staged(db):
                return self.proof_of_staged()
            if str(receipt.handle) in self.ledger(db).get(epoch, ()):
                return kit.Proof.COMMITTED
            is_pruned = epoch < min(self.ledger(db), default=0)
        return kit.Proof.UNKNOWN if is_pruned else kit.Proof.ABORTED

    def newest(self):
        query = (
            "SELECT uid, max(epoch), run FROM epochal_ledger WHERE pipeline = ? AND sink = ?"
            " GROUP BY uid"
        )
        with errors(), closing(self.begun()) as db:
            found = db.execute(query, self.key[:2]).fetchall()
        return [kit.Mark(uid=uid, epoch=epoch, run=run) for uid, epoch, run in found]

    def prune(self, below):
        with errors(), closing(self.begun()) as db:
            kept = min(below, max(self.ledger(db), default=0))
            query = (
                "DELETE FROM epochal_ledger WHERE (pipeline, sink, uid) = (?, ?, ?) AND epoch < ?"
            )
            db.execute(query, (*self.key, kept))
            db.commit()

    # Statements

    def begun(self):
        db = self.sink.connect()
        try:
            db.execute("BEGIN IMMEDIATE")
            db.execute(LEDGER)
        except BaseException:
            db.close()
            raise
        return db

    def handles(self, receipts):
        return [str(receipt.handle) for receipt in receipts]

    def is_ours(self, handle):
        return handle is None or handle.sink == self.identity.tag

    def is_recorded(self, db, epoch, handles):
        ledger = self.ledger(db)
        if epoch > max(ledger, default=-1):
            return False
        if set(ledger.get(epoch, ["pruned"])) != set(handles):
            raise kit.copy_at_work(f"epoch {epoch} is recorded under other handles")
        return True

    def require_not_back(self, db):
        newest = max(self.ledger(db), default=None)
        kit.require_still_committed(self.identity.sink, self.after, proven=newest)

    def require_staged(self, db, epoch, handles):
        lost = tuple(handle for handle in handles if handle not in self.staged(db))
        if lost:
            raise self.lost(f"epoch {epoch}: {len(lost)} attempts are not staged", lost)

    def lost(self, fact, handles):
        return kit.PreparedLost(fact, handles=handles)

    def proof_of_staged(self):
        return kit.Proof.UNKNOWN

    def staged(self, db):
        query = "SELECT name FROM sqlite_master WHERE type = 'table' AND name GLOB ?"
        return [name for (name,) in db.execute(query, (self.prefix + "*",))]

    def publish(self, db, handles):
        for handle in handles:
            db.execute(f"INSERT INTO {quoted(self.sink.table)} SELECT * FROM {quoted(handle)}")

    def discard(self, db, handles):
        for handle in handles:
            db.execute(f"DROP TABLE {quoted(handle)}")

    def record(self, db, epoch, handles):
        values = (*self.key, self.identity.run, epoch, json.dumps(handles))
        db.execute("INSERT OR REPLACE INTO epochal_ledger VALUES (?, ?, ?, ?, ?, ?)", values)

    def ledger(self, db):
        query = "SELECT epoch, handles FROM epochal_ledger WHERE (pipeline, sink, uid) = (?, ?, ?)"
        return {epoch: json.loads(handles) for epoch, handles in db.execute(query, self.key)}


# The mutants: each is one mistake that a sink's author can make


class LedgerAfterCommit(PlainCommitter):
    """Rows in one transaction, the ledger entry in a second one."""

    def commit(self, epoch, receipts):
        handles = self.handles(receipts)
        with errors(), closing(self.begun()) as db:
            if self.is_recorded(db, epoch, handles):
                return
            self.require_not_back(db)
            self.require_staged(db, epoch, handles)
            self.publish(db, handles)
            self.discard(db, handles)
            db.commit()
            self.record(db, epoch, handles)


class NoLedgerLook(PlainCommitter):
    """Keeps the staging of what it committed, and never asks whether it did."""

    def is_recorded(self, db, epoch, handles):
        return False

    def discard(self, db, handles):
        pass


class AnyEntryOfTheEpoch(PlainCommitter):
    """Takes an entry of this epoch for its own, under whatever handles it is."""

    def is_recorded(self, db, epoch, handles):
        ledger = self.ledger(db)
        return epoch in ledger or epoch < min(ledger, default=epoch)


class WinnersDropped(PlainCommitter):
    """Publishes whatever is staged for the epoch, not the attempts that the decision names."""

    def commit(self, epoch, receipts):
        with errors(), closing(self.begun()) as db:
            staged = [one for one in self.staged(db) if kit.Handle.parse(one).epoch == epoch]
            if self.is_recorded(db, epoch, self.handles(receipts)):
                return
            self.require_not_back(db)
            self.require_staged(db, epoch, self.handles(receipts))
            self.publish(db, staged[:1])
            self.discard(db, self.handles(receipts))
            self.record(db, epoch, self.handles(receipts))
            db.commit()


class AbortDropsAll(PlainCommitter):
    def abort(self, epoch, receipts):
        with errors(), closing(self.begun()) as db:
            self.discard(db, self.staged(db))
            db.commit()


class ListsOtherSinks(PlainCommitter):
    def is_ours(self, handle):
        return True


class SaysAbortedOfPrepared(PlainCommitter):
    def proof_of_staged(self):
        return kit.Proof.ABORTED


class LostWithoutHandles(PlainCommitter):
    def lost(self, fact, handles):
        return kit.PreparedLost(fact)


class EmptyCheck(PlainCommitter):
    def check(self, schema):
        return []


class EmptyRehearse(PlainCommitter):
    def rehearse(self, epoch, receipts):
        pass


class UnsortedErrors(PlainCommitter):
    """Errors of the client library reach the caller as they are."""

    def in_doubt(self):
        with closing(self.sink.connect()) as db:
            db.execute("BEGIN IMMEDIATE")
            found = [kit.InDoubt(name=one, handle=kit.Handle.parse(one)) for one in self.staged(db)]
        return [one for one in found if self.is_ours(one.handle)]


class UnboundedBuffer(SQLiteWriter):
    """Keeps all rows until `prepare`."""

    def __init__(self, sink, task):
        super().__init__(sink, task)
        self._held = []

    def write(self, batch):
        self._held.append([batch.column(0).to_pylist(), batch.column(1).to_pylist()])
        self._rows += batch.num_rows

    def prepare(self):
        with errors(), closing(self._sink.connect()) as db:
            db.execute("BEGIN IMMEDIATE")
            for columns in self._held:
                db.executemany(self._insert, zip(*columns, strict=True))
            db.commit()
        return super().prepare()


@dataclass(frozen=True, kw_only=True)
class Mutant(PlainSQLite):
    mutation: str = ""

    def committer(self, identity, limits):
        return globals()[self.mutation](self, identity, limits)


@dataclass(frozen=True, kw_only=True)
class BufferingSQLite(PlainSQLite):
    def writer(self, task):
        return UnboundedBuffer(self, task)
