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

**Tables with unique indexes.** A prepared transaction holds the locks of its keys, so a second
attempt of a task would wait for its own first one, which nobody ends before the decision. Where a
sink can (`TableSink.stages_late`), only first attempts prepare; others stage their rows, and the
rehearsal applies those in a transaction that stays open until the decision. Before it does, it ends
what attempts that lost have left. No attempt does that itself: only the driver knows which receipts
it has.

    first attempt of p0   COPY, PREPARE; its executor dies before the receipt is out
    second attempt        stages its rows; its receipt is the one of p0
    rehearse              ROLLBACK PREPARED of the first, INSERT … SELECT from staging, left open
    (decision)
    commit                COMMIT PREPARED of the others, COMMIT

Where the transaction was lost, its part is applied again. A first attempt that wakes up meanwhile
may hold the same keys, so what lost is ended first then, too. One that wakes later finds its keys
in the table, or is found by a sweep.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from epochal.contract import Begin
from epochal.errors import PreparedLost, TryAgain
from epochal.kit.sql.client import Session
from epochal.kit.sql.committer import HOLDER_WAIT_S, has_rows, proven, retry_transient
from epochal.kit.sql.staged_table import StagedTable
from epochal.terms import EpochNumber, Handle, InDoubt, Json, Proof, Receipt, claims_of

_HELD_WAITS_S = (0.002, 0.01, 0.05, 0.2, 0.5, 1.0, 2.0)
"""How long a session that holds a prepared transaction, or is ending it, may take."""


def is_late(receipt: Receipt) -> bool:
    """Whether its rows are staged, and no transaction of its own is prepared."""
    return "slot" in receipt.token


@dataclass(frozen=True, slots=True, kw_only=True)
class _Open:
    """A transaction with the rows of staged attempts, not committed yet."""

    handles: frozenset[Handle]
    session: Session


class PreparedSqlCommitter(StagedTable):
    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._open: _Open | None = None

    def begin(self, begin: Begin) -> Json:
        self._give_up()
        self._begin_after(begin.newest_committed)
        return self.hand_out()

    def rehearse(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        """
        Every constraint was met when a task prepared: only that all are still there is asked, and
        that the server did not go back in time since the epoch began. Staged rows are applied.
        """
        self._give_up()
        self._ask("compare the ledger", self._require_not_back)
        listed = {one.handle for one in self._prepared()}
        wanted = [one.handle for one in receipts if has_rows(one) and not is_late(one)]
        gone = [handle for handle in wanted if handle not in listed]
        if gone:
            raise TryAgain(
                f"epoch {epoch}: {len(gone)} of {len(receipts)} prepared transactions are not on "
                f"the server any more, {gone[0]} among them; no decision was made",
                "somebody rolled them back",
            )
        if any(map(is_late, receipts)):
            try:
                self._open = self._apply_late(epoch, receipts)
            except PreparedLost as error:
                fact = f"{error.message}; no decision was made"
                raise TryAgain(fact, "the epoch is tried again whole") from error

    def confirm(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        """Apply staged rows again where the transaction was lost that holds them."""
        if any(map(is_late, receipts)) and not self._is_held():
            self.rehearse(epoch, receipts)

    def commit(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        self.make_ready()
        self._claim(epoch, receipts)
        prepared = [one for one in receipts if has_rows(one) and not is_late(one)]
        lost = self._each(lambda one: self._commit(epoch, one), prepared)
        handles = [str(handle) for handle in lost if handle is not None]
        if any(map(is_late, receipts)):
            try:
                self._commit_late(epoch, receipts)
            except PreparedLost as error:
                handles += error.handles
        if handles:
            raise PreparedLost(
                f"epoch {epoch}: {len(handles)} of {len(receipts)} prepared transactions are "
                "neither on the server nor in its ledger: they were rolled back",
                "a person or a script rolled them back, or the server was restored",
                handles=tuple(handles),
            )
        self._in_transaction(
            f"record epoch {epoch}",
            lambda session: self._ledger.record_all(session, epoch, receipts),
        )
        self.clear_staging(receipts)

    def abort(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        self._give_up()
        self._read_again()
        self._each(lambda one: self._roll_back(epoch, one), receipts)
        if self.sink.stages_late:
            self.throw_away(f"abort epoch {epoch}", receipts)

    def in_doubt(self) -> Sequence[InDoubt]:
        return [*self._prepared(), *self._staged()]

    def _prepared(self) -> Sequence[InDoubt]:
        return self._ask(
            "list prepared transactions",
            lambda session: self.dialect.prepared(session, self.identity),
        )

    def _staged(self) -> Sequence[InDoubt]:
        if not self.sink.stages_late:
            return []
        return self._ask(
            "list staged attempts",
            lambda session: self.staging.listed(session, self.identity),
            missing=[],
        )

    def outcome(self, epoch: EpochNumber, receipt: Receipt) -> Proof:
        def ask(session: Session) -> Proof:
            if self._is_listed(session, receipt.handle) or (
                self.sink.stages_late and self.staging.is_listed(session, receipt.handle)
            ):
                return Proof.UNKNOWN
            proof = proven(receipt, self._ledger.proof(session, receipt.handle))
            if proof is not Proof.COMMITTED:
                return proof
            # The epoch's last row is its proof: without it `newest` does not show the epoch.
            newest = self._ledger.newest_epoch(session)
            return Proof.UNKNOWN if newest is None or newest < epoch else proof

        return self._ask("ask for proof", ask, missing=Proof.ABORTED)

    def close(self) -> None:
        self._give_up()
        super().close()

    # Rows of attempts that staged them

    def _apply_late(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> _Open:
        """Everything but COMMIT. May be repeated, in any process."""
        late = [one for one in receipts if is_late(one)]
        doing = self.doing(f"apply staged attempts of epoch {epoch}")

        def apply() -> _Open:
            self._ask("end what lost", lambda session: self._end_lost(session, epoch, receipts))
            session = self.pool.take()
            try:
                session.begin(idle_max_s=self._held_max_s)
                self.apply_rows(session, epoch, late)
                for statement in self._ledger.record(late):
                    session.defer(statement)
                self.dialect.check_constraints(session)
            except self.dialect.errors as error:
                self._let_go(session)
                raise self._not_applied(error, doing) from error
            except BaseException:
                self._let_go(session)
                raise
            return _Open(handles=frozenset(one.handle for one in late), session=session)

        return retry_transient(apply, self._limits)

    def _not_applied(self, error: Exception, doing: str) -> Exception:
        if self.dialect.is_lock_wait(error):
            return TryAgain(
                f"{doing}: {self.dialect.text_of(error)}",
                "if two tasks of one epoch have the same key, the second waits for the first until "
                "lock_timeout_s: repartition by the key, or strategy='staged'",
            )
        return self.dialect.classify(error, doing)

    def _end_lost(self, session: Session, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        """
        End what attempts of this epoch hold that none of these receipts names: first sessions that
        could still prepare, then prepared transactions. Those of a copy of the log are left alone.
        """
        named = {receipt.handle for receipt in receipts}
        own, claims = self.identity.generation, {self.identity.claim, *claims_of(receipts)}

        def is_lost(handle: Handle) -> bool:
            is_ours = handle.claim in claims and handle.generation <= own
            return is_ours and handle.epoch == epoch and handle not in named

        def is_over(handle: Handle) -> bool:
            """Nothing is decided on what is not prepared: no harm is done to a copy's task."""
            is_older = handle.epoch == epoch and handle.generation < own
            return is_lost(handle) or (is_older and handle not in named)

        partitions = 1 + max(receipt.handle.partition for receipt in receipts)
        self.dialect.end_tasks(session, self.identity, epoch, partitions, is_over)
        for one in self.dialect.prepared(session, self.identity):
            if one.handle is not None and is_lost(one.handle):
                self._end(session, epoch, one.handle, is_commit=False)

    def _commit_late(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        late = frozenset(one.handle for one in receipts if is_late(one))
        open_ = self._open
        if open_ is None or open_.handles != late:
            self._give_up()
            if self._is_recorded(epoch, late):
                return
            try:
                open_ = self._apply_late(epoch, receipts)
            except PreparedLost:
                # Another driver of this log may have been quicker: its commit was waited for.
                if self._is_recorded(epoch, late):
                    return
                raise
        self._open = None
        try:
            with self.dialect.classified(self.doing(f"commit epoch {epoch}"), is_commit=True):
                open_.session.commit()
        finally:
            self.pool.give_back(open_.session)

    def _is_recorded(self, epoch: EpochNumber, late: frozenset[Handle]) -> bool:
        """Whether the ledger proves these committed."""
        found = self._ask("read the ledger", lambda session: self._ledger.handles(session, epoch))
        return found is not None and late <= found

    @property
    def _held_max_s(self) -> float:
        """How long staged rows may wait for gates, or for the log to take the decision."""
        return self._limits.decide_retry_max_s + self._limits.commit_retry_max_s

    def _is_held(self) -> bool:
        if self._open is None:
            return False
        try:
            self._open.session.query(f"SELECT 1{self.dialect.dual}")
        except self.dialect.errors:
            return False
        return True

    def _give_up(self) -> None:
        """Roll rows back that will not be committed from here."""
        open_, self._open = self._open, None
        if open_ is not None:
            self._let_go(open_.session)

    def _let_go(self, session: Session) -> None:
        session.roll_back()
        self.pool.give_back(session)

    # Prepared transactions

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
