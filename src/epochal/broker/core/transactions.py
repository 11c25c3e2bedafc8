"""The transaction coordinator: who may write, and how every transaction ends.

A transactional id has one producer id and one epoch at a time. InitProducerId returns the next
epoch; producers with an older one are fenced from then on. An epoch has sixteen bits: the last but
one is never given to a client, and the id then continues under a new producer id.

An end has two steps. *Prepare* is the decision and is durable before it is acknowledged; *complete*
follows once every partition has its marker. A broker that dies in between finds the prepared state
and completes it (`unfinished`). Until then, requests for the id are answered with
CONCURRENT_TRANSACTIONS.

The newer protocol raises the epoch with every end, so that pid and epoch name one transaction, and
a late request of the transaction before can't touch the next one. The marker carries the raised
epoch: the partitions learn it from there.

A transaction that is open for longer than its timeout is aborted under a raised epoch, which fences
its producer.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from epochal.broker.core.entries import Entry, TxnChanged, TxnForgotten, TxnGrew
from epochal.broker.core.settings import Settings
from epochal.broker.core.transaction_states import (
    COMPLETED,
    END_NEWER,
    END_OLDER,
    IS_AT_REST,
    IS_PREPARED,
    State,
    move,
)
from epochal.kafka.codes import Code

NO_ID = -1
NO_EPOCH = -1
EPOCH_MAX = 32_767
_EPOCH_LAST = EPOCH_MAX - 1
"""The last epoch that a client ever sees."""


class Given(NamedTuple):
    """The answer to a producer: the code, and the id and epoch to continue with."""

    code: Code
    producer_id: int = NO_ID
    producer_epoch: int = NO_EPOCH


@dataclass(slots=True, eq=False)
class Transaction:
    """A transactional id, with its current or latest transaction."""

    transactional_id: str
    producer_id: int
    producer_epoch: int = NO_EPOCH
    last_epoch: int = NO_EPOCH
    previous_producer_id: int = NO_ID
    next_producer_id: int = NO_ID
    state: State = State.EMPTY
    timeout_ms: int = 0
    started_ms: int = -1
    updated_ms: int = -1
    is_v2: bool = False
    partitions: set[int] = field(default_factory=set)
    groups: set[str] = field(default_factory=set)
    unmarked: list[int] = field(default_factory=list)
    """Partitions still without their marker while it is being completed, the next one last."""
    watched_ms: int = 0
    """When its deadline is looked at next."""


class Transactions:
    def __init__(
        self,
        settings: Settings,
        emit: Callable[[Entry], None],
        new_producer_id: Callable[[], int],
    ) -> None:
        self.ids: dict[str, Transaction] = {}
        self.unfinished: dict[str, Transaction] = {}
        """Prepared ones, the oldest first: their markers are to be written."""
        self._settings = settings
        self._emit = emit
        self._new_producer_id = new_producer_id
        self._deadlines: list[tuple[int, str]] = []

    # InitProducerId

    def init(
        self,
        transactional_id: str,
        timeout_ms: int,
        expected: tuple[int, int] | None,
        now_ms: int,
    ) -> Given:
        """A new epoch for a transactional id; a transaction open under the last one is aborted."""
        if not 0 < timeout_ms <= self._settings.transaction_timeout_max_ms:
            return Given(Code.INVALID_TRANSACTION_TIMEOUT)
        txn = self.ids.get(transactional_id)
        if txn is None:
            txn = Transaction(transactional_id, self._new_producer_id())
            self.ids[transactional_id] = txn
        if expected is not None and not _is_expected(txn, expected):
            return Given(Code.PRODUCER_FENCED)
        if txn.state in IS_PREPARED:
            return Given(Code.CONCURRENT_TRANSACTIONS)
        if txn.state is State.ONGOING:
            self._fence_and_abort(txn, now_ms)
            return Given(Code.CONCURRENT_TRANSACTIONS)
        given = self._next_epoch(txn, expected)
        if given.code is not Code.NONE:
            return given
        txn.timeout_ms = timeout_ms
        txn.started_ms = -1
        self._move(txn, State.EMPTY, now_ms)
        return given

    def _next_epoch(self, txn: Transaction, expected: tuple[int, int] | None) -> Given:
        if txn.producer_epoch >= _EPOCH_LAST:
            txn.previous_producer_id = txn.producer_id
            txn.last_epoch = txn.producer_epoch if expected is not None else NO_EPOCH
            txn.producer_id = self._new_producer_id()
            txn.producer_epoch = 0
        elif expected is None or txn.producer_epoch == NO_EPOCH:
            txn.last_epoch = NO_EPOCH
            txn.producer_epoch += 1
        elif expected[1] == txn.producer_epoch:
            txn.last_epoch = txn.producer_epoch
            txn.producer_epoch += 1
        elif expected[1] != txn.last_epoch:
            # Equal to the last one: the answer to the same request was lost, and is repeated.
            return Given(Code.PRODUCER_FENCED)
        return Given(Code.NONE, txn.producer_id, txn.producer_epoch)

    # Partitions and groups of a transaction

    def add(
        self,
        who: tuple[str, int, int],
        partitions: Sequence[int],
        groups: Sequence[str],
        now_ms: int,
    ) -> Code:
        """Partitions and groups join the transaction of (id, producer id, epoch), or begin one."""
        txn = self.ids.get(who[0])
        code = _name_check(txn, who)
        if txn is None or code is not Code.NONE:
            return code
        new_partitions = tuple(p for p in partitions if p not in txn.partitions)
        new_groups = tuple(g for g in groups if g not in txn.groups)
        if txn.state is State.ONGOING:
            if not new_partitions and not new_groups:
                return Code.NONE
        else:
            txn.started_ms = now_ms
            self._move(txn, State.ONGOING, now_ms)
            self._watch(txn)
        txn.partitions.update(new_partitions)
        txn.groups.update(new_groups)
        self._emit(TxnGrew(txn.transactional_id, new_partitions, new_groups))
        return Code.NONE

    def verify(self, who: tuple[str, int, int], *, partition: int = -1, group: str = "") -> Code:
        """Whether a partition or a group is in the open transaction of its writer."""
        txn = self.ids.get(who[0])
        code = _name_check(txn, who)
        if txn is None or code is not Code.NONE:
            return code
        if partition in txn.partitions or group in txn.groups:
            return Code.NONE
        return Code.TRANSACTION_ABORTABLE

    # EndTxn

    def end(self, who: tuple[str, int, int], *, is_commit: bool, is_v2: bool, now_ms: int) -> Given:
        """Decide a transaction. Its markers follow: see `unfinished`."""
        txn = self.ids.get(who[0])
        if txn is None:
            return Given(Code.INVALID_PRODUCER_ID_MAPPING)
        if is_v2:
            return self._end_newer(txn, who, is_commit, now_ms)
        if txn.producer_id != who[1]:
            return Given(Code.INVALID_PRODUCER_ID_MAPPING)
        if txn.producer_epoch != who[2]:
            return Given(Code.PRODUCER_FENCED)
        then = END_OLDER.get((txn.state, is_commit), Code.INVALID_TXN_STATE)
        if isinstance(then, State):
            txn.is_v2 = False
            self._prepare(txn, then, now_ms)
            return Given(Code.NONE)
        return Given(then)

    def _end_newer(
        self, txn: Transaction, who: tuple[str, int, int], is_commit: bool, now_ms: int
    ) -> Given:
        _, producer_id, epoch = who
        is_overflow = (
            txn.is_v2
            and txn.previous_producer_id == producer_id
            and epoch == _EPOCH_LAST
            and txn.producer_epoch == 0
        )
        if txn.producer_id != producer_id and not is_overflow:
            return Given(Code.INVALID_PRODUCER_ID_MAPPING)
        is_repeated = is_overflow or txn.producer_epoch == epoch + 1
        is_current = txn.producer_epoch == epoch
        if txn.state in IS_PREPARED:
            is_valid = is_repeated
        elif txn.state in (State.COMPLETE_COMMIT, State.COMPLETE_ABORT):
            is_valid = is_repeated or is_current
        else:
            is_valid = is_current
        if not is_valid:
            return Given(Code.PRODUCER_FENCED)
        is_at_rest = txn.state in IS_AT_REST
        then = END_NEWER.get((txn.state, is_commit, is_repeated), Code.INVALID_TXN_STATE)
        if isinstance(then, Code):
            if then is Code.NONE:
                return Given(then, txn.producer_id, txn.producer_epoch)
            return Given(then)
        if is_at_rest:
            txn.started_ms = now_ms
        if txn.producer_epoch >= _EPOCH_LAST:
            txn.next_producer_id = self._new_producer_id()
        txn.is_v2 = True
        txn.last_epoch = txn.producer_epoch
        txn.producer_epoch += 1
        self._prepare(txn, then, now_ms)
        if txn.next_producer_id != NO_ID:
            return Given(Code.NONE, txn.next_producer_id, 0)
        return Given(Code.NONE, txn.producer_id, txn.producer_epoch)

    def _prepare(self, txn: Transaction, to: State, now_ms: int) -> None:
        self._move(txn, to, now_ms)
        self._unfinish(txn)

    def _unfinish(self, txn: Transaction) -> None:
        txn.unmarked = sorted(txn.partitions, reverse=True)
        self.unfinished[txn.transactional_id] = txn

    def completed(self, txn: Transaction, now_ms: int) -> None:
        """Every partition has its marker, every group its offsets."""
        if txn.next_producer_id != NO_ID:
            txn.previous_producer_id = txn.producer_id
            txn.producer_id = txn.next_producer_id
            txn.next_producer_id = NO_ID
            txn.producer_epoch = 0
        self._move(txn, COMPLETED[txn.state], now_ms)
        txn.partitions.clear()
        txn.groups.clear()
        del self.unfinished[txn.transactional_id]

    # Time

    def expire(self, now_ms: int) -> None:
        """Abort and fence what has been open for too long."""
        while self._deadlines and self._deadlines[0][0] <= now_ms:
            due_ms, transactional_id = heapq.heappop(self._deadlines)
            txn = self.ids.get(transactional_id)
            if txn is None or txn.watched_ms != due_ms:
                continue
            txn.watched_ms = 0
            if txn.state is not State.ONGOING:
                continue
            if txn.started_ms + txn.timeout_ms <= now_ms:
                self._fence_and_abort(txn, now_ms)
            else:
                self._watch(txn)

    def forget_idle(self, now_ms: int) -> None:
        before_ms = now_ms - self._settings.transactional_id_expiry_ms
        idle = [t for t in self.ids.values() if t.state in IS_AT_REST and t.updated_ms < before_ms]
        for txn in idle:
            txn.state = move(txn.state, State.DEAD)
            del self.ids[txn.transactional_id]
            self._emit(TxnForgotten(txn.transactional_id))

    def _watch(self, txn: Transaction) -> None:
        """Check it when its timeout is due. One entry per id is enough: a check adds the next."""
        due_ms = txn.started_ms + txn.timeout_ms
        if 0 < txn.watched_ms <= due_ms:
            return
        txn.watched_ms = due_ms
        heapq.heappush(self._deadlines, (due_ms, txn.transactional_id))

    def _fence_and_abort(self, txn: Transaction, now_ms: int) -> None:
        # The producer itself, which knows the epoch before, may go on with the raised one: it asks
        # InitProducerId with that epoch. Any other asks without, and is given the one after.
        txn.last_epoch = txn.producer_epoch
        # The highest epoch is reserved for this: clients get only those below it.
        txn.producer_epoch = min(txn.producer_epoch + 1, EPOCH_MAX)
        self._prepare(txn, State.PREPARE_ABORT, now_ms)

    # Entries

    def _move(self, txn: Transaction, to: State, now_ms: int) -> None:
        txn.state = move(txn.state, to)
        txn.updated_ms = now_ms
        self._emit(_changed(txn))

    def apply_changed(self, entry: TxnChanged) -> None:
        txn = self.ids.get(entry.transactional_id)
        if txn is None:
            txn = Transaction(entry.transactional_id, entry.producer_id)
            self.ids[entry.transactional_id] = txn
        txn.producer_id, txn.producer_epoch = entry.producer_id, entry.producer_epoch
        txn.last_epoch = entry.last_epoch
        txn.previous_producer_id = entry.previous_producer_id
        txn.next_producer_id = entry.next_producer_id
        txn.state = State(entry.state)
        txn.timeout_ms = entry.timeout_ms
        txn.started_ms, txn.updated_ms = entry.started_ms, entry.updated_ms
        txn.is_v2 = entry.is_v2
        if txn.state in IS_AT_REST:
            txn.partitions.clear()
            txn.groups.clear()
            self.unfinished.pop(txn.transactional_id, None)
        elif txn.state in IS_PREPARED:
            self._unfinish(txn)

    def apply_grew(self, entry: TxnGrew) -> None:
        txn = self.ids[entry.transactional_id]
        txn.partitions.update(entry.partitions)
        txn.groups.update(entry.groups)
        if txn.state in IS_PREPARED:
            self._unfinish(txn)

    def recovered(self) -> None:
        """All entries are applied: start the timeouts of open transactions."""
        for txn in self.ids.values():
            if txn.state is State.ONGOING:
                self._watch(txn)

    def restart_timeouts(self, now_ms: int) -> None:
        for txn in self.ids.values():
            if txn.state is State.ONGOING:
                txn.started_ms = now_ms
                self._emit(_changed(txn))

    def known(self) -> Iterator[Entry]:
        for txn in self.ids.values():
            yield _changed(txn)
            if txn.partitions or txn.groups:
                grew = TxnGrew(
                    txn.transactional_id, tuple(sorted(txn.partitions)), tuple(sorted(txn.groups))
                )
                yield grew


def _changed(txn: Transaction) -> TxnChanged:
    return TxnChanged(
        txn.transactional_id,
        txn.producer_id,
        txn.producer_epoch,
        txn.last_epoch,
        txn.previous_producer_id,
        txn.next_producer_id,
        txn.state,
        txn.timeout_ms,
        txn.started_ms,
        txn.updated_ms,
        txn.is_v2,
    )


def _is_expected(txn: Transaction, expected: tuple[int, int]) -> bool:
    producer_id, epoch = expected
    return (
        txn.producer_epoch == NO_EPOCH
        or txn.producer_id == producer_id
        or (txn.previous_producer_id == producer_id and epoch >= _EPOCH_LAST)
    )


def _name_check(txn: Transaction | None, who: tuple[str, int, int]) -> Code:
    """Whether it is this producer's transaction, and one that can be written to."""
    if txn is None or txn.producer_id != who[1]:
        return Code.INVALID_PRODUCER_ID_MAPPING
    if txn.producer_epoch != who[2]:
        return Code.PRODUCER_FENCED
    if txn.state in IS_PREPARED:
        return Code.CONCURRENT_TRANSACTIONS
    return Code.NONE
