"""The prepared strategy: each task leaves a prepared transaction, which the driver ends.

A transaction that is gone was committed or rolled back, and the server reports the same error for
both: the ledger row, written inside that transaction, distinguishes them (I9). A server reports
that error, too, while another session is ending the transaction or still holds it: so the listing
is asked before the ledger.

    COMMIT PREPARED x   ok                           committed
                        "not found", x is listed     another session holds it: wait, try again
                        "not found", x not listed    the ledger proves committed, or rolled back

Two rows of the ledger are the epoch's own. One comes first, in a transaction before them: where a
copy of the epoch log is at work, both sides have transactions of this epoch, and only one may
commit its own. The other comes last and proves the whole epoch: a server that went back in time to
a moment between the two has a part of the epoch only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from epochal.contract import Begin
from epochal.errors import PreparedLost, TryAgain
from epochal.kit.sql.client import Session
from epochal.kit.sql.committer import HOLDER_WAIT_S, SqlCommitter, has_rows, proven
from epochal.terms import EpochNumber, Handle, InDoubt, Json, Proof, Receipt

_HELD_WAITS_S = (0.002, 0.01, 0.05, 0.2, 0.5, 1.0, 2.0)
"""How long a session that holds a prepared transaction, or is ending it, may take."""


class PreparedSqlCommitter(SqlCommitter):
    def begin(self, begin: Begin) -> Json:
        self._begin_after(begin.newest_committed)
        return self.hand_out()

    def rehearse(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        """
        Every constraint was met when a task prepared: only that all are still there is asked, and
        that the server did not go back in time since the epoch began.
        """
        self._ask("compare the ledger", self._require_not_back)
        listed = {one.handle for one in self.in_doubt()}
        gone = [one.handle for one in receipts if has_rows(one) and one.handle not in listed]
        if gone:
            raise TryAgain(
                f"epoch {epoch}: {len(gone)} of {len(receipts)} prepared transactions are not on "
                f"the server any more, {gone[0]} among them; no decision was made",
                "somebody rolled them back",
            )

    def commit(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        self.make_ready()
        self._claim(epoch, receipts)
        prepared = [receipt for receipt in receipts if has_rows(receipt)]
        lost = self._each(lambda one: self._commit(epoch, one), prepared)
        handles = tuple(str(handle) for handle in lost if handle is not None)
        if handles:
            raise PreparedLost(
                f"epoch {epoch}: {len(handles)} of {len(receipts)} prepared transactions are "
                "neither on the server nor in its ledger: they were rolled back",
                "a person or a script rolled them back, or the server was restored",
                handles=handles,
            )
        self._in_transaction(
            f"record epoch {epoch}",
            lambda session: self._ledger.record_all(session, epoch, receipts),
        )
        self.clear_staging(receipts)

    def abort(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        self._read_again()
        self._each(lambda one: self._roll_back(epoch, one), receipts)

    def in_doubt(self) -> Sequence[InDoubt]:
        return self._ask(
            "list prepared transactions",
            lambda session: self.dialect.prepared(session, self.identity),
        )

    def outcome(self, epoch: EpochNumber, receipt: Receipt) -> Proof:
        def ask(session: Session) -> Proof:
            if self._is_listed(session, receipt.handle):
                return Proof.UNKNOWN
            proof = proven(receipt, self._ledger.proof(session, receipt.handle))
            if proof is not Proof.COMMITTED:
                return proof
            # The epoch's last row is its proof: without it `newest` does not show the epoch.
            newest = self._ledger.newest_epoch(session)
            return Proof.UNKNOWN if newest is None or newest < epoch else proof

        return self._ask("ask for proof", ask, missing=Proof.ABORTED)

    def _each(
        self, verb: Callable[[Receipt], Handle | None], receipts: Sequence[Receipt]
    ) -> list[Handle | None]:
        """Many at a time: each waits for the server's disk by itself."""
        if len(receipts) <= 1:
            return [verb(receipt) for receipt in receipts]
        workers = min(len(receipts), self.sink.pool_max)
        with ThreadPoolExecutor(workers, thread_name_prefix="epochal-commit") as threads:
            return list(threads.map(verb, receipts))

    def _is_listed(self, session: Session, handle: Handle) -> bool:
        return self.dialect.is_prepared(session, self.dialect.transaction_name(handle))

    def _commit(self, epoch: EpochNumber, receipt: Receipt) -> Handle | None:
        """The handle where its transaction was rolled back, else None."""

        def commit(session: Session) -> bool:
            if self._end(session, epoch, receipt.handle, is_commit=True):
                return False
            # Not in the ledger any more means committed long ago: only such epochs are pruned.
            return self._ledger.proof(session, receipt.handle) is Proof.ABORTED

        is_lost = self._ask(f"commit {receipt.handle}", commit)
        return receipt.handle if is_lost else None

    def _roll_back(self, epoch: EpochNumber, receipt: Receipt) -> None:
        self._ask(
            f"abort {receipt.handle}",
            lambda session: self._end(session, epoch, receipt.handle, is_commit=False),
        )

    def _end(
        self, session: Session, epoch: EpochNumber, handle: Handle, *, is_commit: bool
    ) -> bool:
        """Whether this call ended it; False where it is not there (any more)."""
        name = self.dialect.transaction_name(handle)
        for wait_s in (*_HELD_WAITS_S, None):
            try:
                self.dialect.end_prepared(session, name, is_commit=is_commit)
            except self.dialect.errors as error:
                if not self.dialect.is_not_prepared(error):
                    doing = self.doing(f"end {handle} of epoch {epoch}")
                    raise self.dialect.classify(error, doing, is_commit=True) from error
            else:
                return True
            if not self._is_listed(session, handle):
                return False
            if wait_s is not None:
                time.sleep(wait_s)
        raise TryAgain(
            self.doing(f"{handle} is prepared, and another session holds it"), "it is retried"
        )

    def _claim(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        """
        Insert the epoch's row of the ledger, or find that it is this log's own. With it go the rows
        of tasks that had nothing to prepare: an empty epoch is proven all the same (I8).
        """
        empty = [one for one in receipts if not has_rows(one)]

        def claim(session: Session) -> bool:
            if not self._ledger.claim_epoch(session, epoch, receipts, after=self._after):
                if self._ledger.owner(session, epoch) is None:
                    self._require_not_back(session)
                return self._ledger.take_over_epoch(session, epoch, receipts)
            for statement in self._ledger.record(empty):
                session.execute(statement)
            return True

        done = self._in_transaction(f"claim epoch {epoch}", claim, lock_wait_s=HOLDER_WAIT_S)
        if not done:
            raise self._committed_by_others(epoch)
