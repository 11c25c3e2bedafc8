"""Carries decisions out, the prepared way: each task left a transaction that waits for its end.

A transaction that is gone was committed or rolled back, and the server tells the same of both: the
ledger row, written inside that transaction, tells them apart (I9). MySQL tells the same, too, while
another session is ending it, or still holds it: so the listing is asked before the ledger.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from epochal.errors import PreparedLost, TryAgain
from epochal.sinks.sql.committing import Committing
from epochal.sinks.sql.dialect import Session
from epochal.sinks.sql.names import parse_staging_name, staging_name, staging_prefix
from epochal.terms import EpochNumber, Handle, InDoubt, Json, Proof, Receipt

_CLOSING_WAITS_S = (0.002, 0.01, 0.05, 0.2, 0.5, 1.0, 2.0)
"""How long a session that holds a prepared transaction, or is ending it, may take."""


class PreparedCommitter(Committing):
    def begin(self, epoch: EpochNumber) -> Json:  # noqa: ARG002
        return self._get_ready()

    def rehearse(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        """Every constraint was met when it was prepared: only that all is still there is asked."""
        listed = {one.name for one in self.in_doubt()}
        wanted = [staging_name(one.handle) for one in receipts if _has_rows(one)]
        gone = [name for name in wanted if name not in listed]
        if gone:
            raise TryAgain(
                f"epoch {epoch}: {len(gone)} of {len(receipts)} prepared transactions are not on "
                f"the server any more, {gone[0]} among them; no decision was made",
                "somebody rolled them back",
            )

    def commit(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        self._get_ready()
        prepared = [receipt for receipt in receipts if _has_rows(receipt)]
        results = self._each(lambda one: self._commit(epoch, one), prepared)
        lost = tuple(str(handle) for handle in results if handle is not None)
        if lost:
            raise PreparedLost(
                f"epoch {epoch}: {len(lost)} of {len(receipts)} prepared transactions are neither "
                "on the server nor in its ledger: they were rolled back",
                "a person or a script rolled them back, or the server was restored",
                handles=lost,
            )
        if len(prepared) < len(receipts) or not receipts:
            self._record_empty(epoch, [one for one in receipts if not _has_rows(one)])

    def abort(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        self._forget()
        self._each(lambda one: self._roll_back(epoch, one), receipts)

    def in_doubt(self) -> Sequence[InDoubt]:
        prefix = staging_prefix(self._identity)

        def ask(session: Session) -> list[InDoubt]:
            """A server lists those of everybody."""
            return [
                InDoubt(name=name, handle=parse_staging_name(name))
                for name in sorted(self._dialect.prepared(session))
                if name.startswith(prefix)
            ]

        return self._ask("list prepared transactions", ask)

    def outcome(self, epoch: EpochNumber, receipt: Receipt) -> Proof:  # noqa: ARG002
        def ask(session: Session) -> Proof:
            if self._is_listed(session, receipt.handle):
                return Proof.UNKNOWN
            proof = self._ledger.proof(session, receipt.handle)
            is_nothing = proof is Proof.ABORTED and not _has_rows(receipt)
            return Proof.UNKNOWN if is_nothing else proof

        return self._ask("ask for proof", ask, missing=Proof.ABORTED)

    def _is_listed(self, session: Session, handle: Handle) -> bool:
        return staging_name(handle) in self._dialect.prepared(session)

    def _each(
        self, verb: Callable[[Receipt], Handle | None], receipts: Sequence[Receipt]
    ) -> list[Handle | None]:
        """The same for many at a time: each XA COMMIT waits for the disk by itself."""
        if len(receipts) <= 1:
            return [verb(receipt) for receipt in receipts]
        workers = min(len(receipts), self._sink.pool_max)
        with ThreadPoolExecutor(workers, thread_name_prefix="epochal-commit") as threads:
            return list(threads.map(verb, receipts))

    def _commit(self, epoch: EpochNumber, receipt: Receipt) -> Handle | None:
        """The handle where its rows were thrown away, else None."""

        def commit(session: Session) -> bool:
            if self._end(session, epoch, receipt.handle, is_commit=True):
                return False
            # Forgotten means settled long ago: an epoch is pruned only after that.
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
        xid = staging_name(handle)
        for wait_s in (*_CLOSING_WAITS_S, None):
            try:
                self._dialect.end_prepared(session, xid, is_commit=is_commit)
            except self._dialect.errors as error:
                if not self._dialect.is_not_prepared(error):
                    doing = self._doing(f"end {handle} of epoch {epoch}")
                    raise self._dialect.sort(error, doing, is_commit=True) from error
            else:
                return True
            if not self._is_listed(session, handle):
                return False
            if wait_s is not None:
                time.sleep(wait_s)
        raise TryAgain(
            self._doing(f"{handle} is prepared, and a connection that is still open holds it"),
            "it is asked again",
        )

    def _record_empty(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        """Tasks without rows prepared nothing: their epoch is proven all the same (I8)."""

        def record(session: Session) -> bool:
            if self._ledger.claim_epoch(session, epoch, 0):
                for statement in self._ledger.record(receipts):
                    session.execute(statement)
            return True

        self._in_transaction(f"record epoch {epoch}", record)


def _has_rows(receipt: Receipt) -> bool:
    """Whether a transaction was prepared; found in a target's listing, it was."""
    return bool(receipt.token.get("staged", True))
