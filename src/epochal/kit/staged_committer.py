"""
StagedCommitter: every verb of a committer, for a target with transactions and a place to stage.

Tasks stage their rows under the name of their handle. The driver publishes what a decision names
and records it in the target's ledger, in one transaction. A subclass defines single statements
of its target; the rules are here, once:

- ledger first: an epoch that is recorded under these very handles was published, and is not
  published again; recorded under others, it was published by a copy of the epoch log: `Refused`;
- where the ledger lacks the newest epoch that was committed here, the target was restored, or a
  replica that lagged took over: `WentBack`;
- else everything that the decision names must be staged, or `PreparedLost` with the handles;
- publishing, clearing the staging and recording are one transaction;
- a rehearsal is that transaction, left open: constraints refuse rows before the decision (I3);
- what is staged under this uid and this sink is in doubt, nothing else is (I5);
- proof is asked of the handle first, then of the ledger (I9);
- the newest entry of the ledger is never pruned.

Why rows and ledger entry share one transaction. With the entry in a second one:

    driver 1   publish 7 │ COMMIT │ ✗ dies          record 7 │ COMMIT   never runs
    driver 2   recovers: 7 is decided, the ledger has no 7, the staging is gone
               → `PreparedLost`, and the rows are written again, though readers see them

In one transaction there is no such moment. And where the reply to COMMIT is lost, the next `commit`
finds the entry and does nothing:

    driver 1   publish 7, record 7 │ COMMIT ──────✗ no reply → `OutcomeUnknown`
    driver 1   commit 7 again: the ledger has 7 → done

Two of our sinks keep these rules without it. The SQL engine (`kit.sql`) shares one transaction
among several sinks, and where DDL commits, its staging tables disappear only after the epoch: what
is left of the verbs here would only be a shape. `Memory` does each verb in one call, as a task in
another process may be killed between two calls and would leave a transaction open for good.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from epochal.contract import Begin
from epochal.errors import (
    EpochalError,
    OutcomeUnknown,
    PreparedLost,
    TryAgain,
    copy_at_work,
    require_still_committed,
)
from epochal.kit.sink_base import CommitterBase, Dropped
from epochal.terms import (
    EpochNumber,
    Handle,
    Identity,
    InDoubt,
    Json,
    Limits,
    Mark,
    Proof,
    Receipt,
    Uid,
    handle_prefix,
    quantity,
)


class Transaction(Protocol):
    """An open transaction of a target: a DB-API connection is one."""

    def commit(self) -> None: ...

    def rollback(self) -> None: ...

    def close(self) -> None: ...


T = TypeVar("T", bound=Transaction)


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """The target's own proof that an epoch was committed."""

    uid: Uid
    epoch: EpochNumber
    run: str | None
    handles: tuple[str, ...]
    """The attempts whose rows were published."""


@dataclass(frozen=True, slots=True)
class _Rehearsal(Generic[T]):
    transaction: T
    epoch: EpochNumber
    handles: tuple[str, ...]


class StagedCommitter(CommitterBase, Generic[T]):
    """
    Derive from it and define `check` and the target's verbs: `transaction`, `staged`, `publish`,
    `discard`, `record`, `recorded`, `forget`, `meaning`.

    All but the first and the last run in a transaction that the engine ends. None of them needs to
    care for repetition, for other pipelines or for crashes.
    """

    def __init__(self, identity: Identity, limits: Limits) -> None:
        self.identity = identity
        self.limits = limits
        self._rehearsal: _Rehearsal[T] | None = None
        self._after = identity.committed

    # The verbs of the target

    @abstractmethod
    def transaction(self, *, is_read: bool) -> T:
        """
        Begin a transaction. Those that are no reads exclude each other, from the first statement
        on: an older driver may be committing the same epoch (I7).

        `close` ends it for good: it closes the connection, or gives it back to a pool.
        """

    @abstractmethod
    def staged(self, transaction: T, prefix: str) -> Sequence[str]:
        """The names of all staged attempts that begin with `prefix`, also of those without rows."""

    @abstractmethod
    def publish(self, transaction: T, receipts: Sequence[Receipt]) -> None:
        """Make the staged rows of these receipts visible when the transaction is committed."""

    @abstractmethod
    def discard(self, transaction: T, handles: Sequence[str]) -> None:
        """Remove these attempts, all of them staged, from the staging."""

    @abstractmethod
    def record(self, transaction: T, entry: LedgerEntry) -> None:
        """Add an entry to the ledger, for this pipeline's and this sink's name."""

    @abstractmethod
    def recorded(self, transaction: T) -> Sequence[LedgerEntry]:
        """All entries of the ledger under this pipeline's and this sink's name, of any uid."""

    @abstractmethod
    def forget(self, transaction: T, epochs: Sequence[EpochNumber]) -> None:
        """Remove these epochs of this uid from the ledger."""

    @abstractmethod
    def meaning(self, error: Exception) -> EpochalError | None:
        """
        The error of ours that an error of the target's client means, None where it means none:
        `TryAgain` where the target can't be reached or is busy, `RowRejected` where it refuses
        rows, `Misconfigured` where a person must act. A lost reply to COMMIT is the engine's work.
        """

    # The verbs of a committer

    def begin(self, begin: Begin) -> Json:
        self._give_up_rehearsal()
        self._after = begin.newest_committed
        return None

    def rehearse(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        self._give_up_rehearsal()
        with self._errors():
            transaction = self.transaction(is_read=False)
        try:
            with self._errors():
                self._publish_once(transaction, epoch, receipts)
        except BaseException:
            self._end(transaction)
            raise
        self._rehearsal = _Rehearsal(transaction, epoch, _names(receipts))

    def commit(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        rehearsal, self._rehearsal = self._rehearsal, None
        if rehearsal is None:
            with self._transaction() as transaction:
                self._publish_once(transaction, epoch, receipts)
                self._commit(transaction)
            return
        try:
            if (rehearsal.epoch, rehearsal.handles) == (epoch, _names(receipts)):
                self._commit(rehearsal.transaction)
                return
        finally:
            self._end(rehearsal.transaction)
        self.commit(epoch, receipts)

    def abort(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:  # noqa: ARG002
        self._give_up_rehearsal()
        names = set(_names(receipts))
        with self._transaction() as transaction:
            staged = self.staged(transaction, handle_prefix(self.identity.uid))
            self.discard(transaction, [name for name in staged if name in names])
            self._commit(transaction)

    def in_doubt(self) -> Sequence[InDoubt]:
        with self._transaction(is_read=True) as transaction:
            names = self.staged(transaction, handle_prefix(self.identity.uid))
        listed = [InDoubt(name=name, handle=Handle.parse(name)) for name in names]
        return [one for one in listed if one.handle is None or one.handle.sink == self.identity.tag]

    def outcome(self, epoch: EpochNumber, receipt: Receipt) -> Proof:
        name = str(receipt.handle)
        with self._transaction(is_read=True) as transaction:
            if name in self.staged(transaction, name):
                return Proof.UNKNOWN
            entries = self._own(transaction)
        if entries and epoch < min(entries):
            return Proof.UNKNOWN
        is_recorded = epoch in entries and name in entries[epoch].handles
        return Proof.COMMITTED if is_recorded else Proof.ABORTED

    def newest(self) -> Sequence[Mark]:
        with self._transaction(is_read=True) as transaction:
            entries = sorted(self.recorded(transaction), key=lambda entry: entry.epoch)
        newest = {entry.uid: entry for entry in entries}
        return [Mark(uid=one.uid, epoch=one.epoch, run=one.run) for one in newest.values()]

    def prune(self, below: EpochNumber) -> None:
        with self._transaction() as transaction:
            entries = self._own(transaction)
            self.forget(
                transaction, [one for one in entries if one < below and one != max(entries)]
            )
            self._commit(transaction)

    def drop(self, *, is_dry_run: bool) -> Dropped:
        with self._transaction(is_read=is_dry_run) as transaction:
            entries = self._own(transaction)
            if not is_dry_run:
                self.forget(transaction, list(entries))
                self._commit(transaction)
        return Dropped(removed=[quantity(len(entries), "ledger entry", "ledger entries")])

    def close(self) -> None:
        self._give_up_rehearsal()

    # The rules

    def _publish_once(
        self, transaction: T, epoch: EpochNumber, receipts: Sequence[Receipt]
    ) -> None:
        """Publish and record an epoch, unless the ledger proves that this was done before."""
        names = _names(receipts)
        entries = self._own(transaction)
        if self._is_published(entries, epoch, names):
            return
        newest = max(entries, default=None)
        require_still_committed(self.identity.sink, self._after, proven=newest)
        staged = set(self.staged(transaction, handle_prefix(self.identity.uid)))
        lost = tuple(name for name in names if name not in staged)
        if lost:
            raise PreparedLost(
                f"epoch {epoch}: {len(lost)} of {len(names)} prepared attempts are not staged",
                "somebody removed them from the staging: the rows are written again where the "
                "source can be replayed",
                handles=lost,
                shows_none=True,
            )
        self.publish(transaction, receipts)
        self.discard(transaction, names)
        identity = self.identity
        self.record(
            transaction,
            LedgerEntry(uid=identity.uid, epoch=epoch, run=identity.run, handles=names),
        )

    def _is_published(
        self,
        entries: Mapping[EpochNumber, LedgerEntry],
        epoch: EpochNumber,
        names: Sequence[str],
    ) -> bool:
        """
        Whether the ledger proves these very handles. Raises where it proves others, or only later
        epochs: this driver was superseded then, or a copy of its log has gone past it.
        """
        if epoch > max(entries, default=-1):
            return False
        if epoch not in entries or set(entries[epoch].handles) != set(names):
            raise copy_at_work(
                f"sink {self.identity.sink!r}: the ledger has epoch {epoch}, or a later one, under "
                "handles that this log did not decide"
            )
        return True

    def _own(self, transaction: T) -> dict[EpochNumber, LedgerEntry]:
        return {
            entry.epoch: entry
            for entry in self.recorded(transaction)
            if entry.uid == self.identity.uid
        }

    @contextmanager
    def _transaction(self, *, is_read: bool = False) -> Iterator[T]:
        """A transaction that is rolled back unless `_commit` was called."""
        with self._errors():
            transaction = self.transaction(is_read=is_read)
            try:
                yield transaction
            finally:
                self._end(transaction)

    def _commit(self, transaction: T) -> None:
        try:
            with self._errors():
                transaction.commit()
        except TryAgain as error:
            raise OutcomeUnknown(error.message, error.hint) from error

    def _end(self, transaction: T) -> None:
        """Roll back what is not committed. Where that fails, closing the connection does it."""
        try:
            transaction.rollback()
        except Exception as error:
            if self.meaning(error) is None:
                raise
        finally:
            transaction.close()

    def _give_up_rehearsal(self) -> None:
        rehearsal, self._rehearsal = self._rehearsal, None
        if rehearsal is not None:
            self._end(rehearsal.transaction)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except EpochalError:
            raise
        except Exception as error:
            meant = self.meaning(error)
            if meant is None:
                raise
            raise meant from error


def _names(receipts: Sequence[Receipt]) -> tuple[str, ...]:
    return tuple(str(receipt.handle) for receipt in receipts)
