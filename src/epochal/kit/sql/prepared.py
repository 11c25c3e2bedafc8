"""Carries decisions out, the prepared way: each task left a transaction that waits for its end.

A transaction that is gone was committed or rolled back, and the server tells the same of both: the
ledger row, written inside that transaction, tells them apart (I9). MySQL tells the same, too, while
another session is ending it, or still holds it: so the listing is asked before the ledger.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from epochal.contract import Begin
from epochal.errors import TryAgain
from epochal.kit.sql.committing import Committing
from epochal.kit.sql.dialect import Session
from epochal.kit.sql.ending import each, require_listed, require_none_lost
from epochal.kit.sql.names import parse_staging_name, staging_name, staging_prefix
from epochal.kit.sql.receipts import has_rows, proven
from epochal.terms import EpochNumber, Handle, InDoubt, Json, Proof, Receipt

_CLOSING_WAITS_S = (0.002, 0.01, 0.05, 0.2, 0.5, 1.0, 2.0)
"""How long a session that holds a prepared transaction, or is ending it, may take."""


class PreparedCommitter(Committing):
    def begin(self, begin: Begin) -> Json:  # noqa: ARG002
        return self._get_ready()

    def rehearse(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        """Every constraint was met when it was prepared: only that all is still there is asked."""
        require_listed(epoch, receipts, {one.handle for one in self.in_doubt()})

    def commit(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        self._get_ready()
        prepared = [receipt for receipt in receipts if has_rows(receipt)]
        lost = each(lambda one: self._commit(epoch, one), prepared, at_once_max=self._sink.pool_max)
        require_none_lost(epoch, receipts, lost)
        if len(prepared) < len(receipts) or not receipts:
            self._record_empty(epoch, [one for one in receipts if not has_rows(one)])

    def abort(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        self._forget()
        each(lambda one: self._roll_back(epoch, one), receipts, at_once_max=self._sink.pool_max)

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
            return proven(receipt, self._ledger.proof(session, receipt.handle))

        return self._ask("ask for proof", ask, missing=Proof.ABORTED)

    def _is_listed(self, session: Session, handle: Handle) -> bool:
        return staging_name(handle) in self._dialect.prepared(session)

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
