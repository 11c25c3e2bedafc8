"""The state of transactions, as their coordinators report it, and what the driver does by it.

Before the decision: all transactions of the receipts are still open. After it: wait until the
commit markers are written. At recovery and between epochs: list what is open under the ids of this
sink, and abort it.

An abort runs InitProducerId on the id instead of ending its transaction: a task that wakes up late
is then fenced and can't open the transaction again.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence

from epochal.errors import EpochalError, Misconfigured, OutcomeUnknown, TryAgain
from epochal.kafka.client import Ask, Client
from epochal.kafka.cluster import Coordinator
from epochal.kafka.codes import Code
from epochal.kafka.errors import code_name, require_ok
from epochal.kafka.messages.describe_transactions import (
    DescribeTransactionsRequest,
    DescribeTransactionsResponse,
    TransactionState,
)
from epochal.kafka.messages.init_producer_id import InitProducerIdResponse
from epochal.kafka.messages.list_transactions import ListTransactionsRequest
from epochal.kafka.versions import UnsupportedRequest
from epochal.sinks.kafka.errors import require_rights
from epochal.sinks.kafka.receipts import OpenTransaction
from epochal.sinks.kafka.transactional_ids import TransactionalIds
from epochal.sinks.kafka.transactions import ProducerStart, start_producers
from epochal.terms import NO_ROWS, EpochNumber, Handle, InDoubt, Receipt

_ONGOING = "Ongoing"
_PREPARE_COMMIT = "PrepareCommit"
_VISIBLE_WITHIN_S = 5.0
"""How long a commit waits for its markers. An acknowledged commit can't be undone any more."""
_POLL_S = (0.001, 0.002, 0.004, 0.008, 0.016)
_PATTERN_FROM = 2
"""The version of ListTransactions that takes a pattern; older ones list all."""
_ABORTED = (Code.NONE, Code.PRODUCER_FENCED, Code.INVALID_PRODUCER_EPOCH)
"""Fenced: the transaction was aborted, by this very request when it was sent the first time."""


def describe(client: Client, ids: Sequence[str]) -> list[TransactionState | EpochalError]:
    """The state of each id. Brokers before 3.0 don't report it: `UnsupportedRequest` for each."""
    client.locate([Coordinator(one) for one in ids])
    answers: list[DescribeTransactionsResponse | EpochalError] = client.ask_all(
        [
            Ask(
                request=DescribeTransactionsRequest(transactional_ids=[one]),
                to=Coordinator(one),
                code_of=lambda answer: answer.transaction_states[0].error_code,
            )
            for one in ids
        ]
    )
    return [
        answer if isinstance(answer, EpochalError) else _allowed(answer.transaction_states[0])
        for answer in answers
    ]


def _allowed(state: TransactionState) -> TransactionState | EpochalError:
    """A transaction that may not be described must not pass for one that is not open."""
    try:
        require_rights(state.error_code, transactional_id=("Describe", state.transactional_id))
    except Misconfigured as denied:
        return denied
    return state


def is_open(state: TransactionState, txn: OpenTransaction) -> bool:
    """Whether this very transaction is open: not an older or a later one of the same id."""
    producer = (state.producer_id, state.producer_epoch)
    is_same = producer == (txn.producer_id, txn.producer_epoch)
    return state.transaction_state == _ONGOING and is_same


def is_open_now(client: Client, txn: OpenTransaction) -> bool:
    (state,) = describe(client, [txn.transactional_id])
    return not isinstance(state, EpochalError) and is_open(state, txn)


def require_open(client: Client, epoch: EpochNumber, txns: Sequence[OpenTransaction]) -> None:
    """Raise `TryAgain` where one has ended already. Brokers before 3.0 are not asked."""
    states = describe(client, [txn.transactional_id for txn in txns])
    for txn, state in zip(txns, states, strict=True):
        if isinstance(state, UnsupportedRequest):
            continue
        if isinstance(state, OutcomeUnknown):
            raise TryAgain(state.message, state.hint)
        if isinstance(state, EpochalError):
            raise state
        if not is_open(state, txn):
            raise TryAgain(
                f"epoch {epoch}: the transaction {txn.transactional_id} is no longer open "
                f"({state.transaction_state or code_name(state.error_code)}); nothing was "
                "decided",
                f"it had {txn.timeout_ms / 1000:.0f} s: smaller epochs, or a longer "
                "transaction_timeout_s",
            )


def await_visible(client: Client, txns: Sequence[OpenTransaction]) -> None:
    """Wait for the commit markers, which follow an acknowledged commit within milliseconds."""
    deadline = time.monotonic() + _VISIBLE_WITHIN_S
    left, turn = list(txns), 0
    while left:
        states = describe(client, [txn.transactional_id for txn in left])
        left = [
            txn
            for txn, state in zip(left, states, strict=True)
            if not isinstance(state, EpochalError) and _awaits_markers(state, txn)
        ]
        if left and time.monotonic() > deadline:
            return
        if left:
            time.sleep(_POLL_S[min(turn, len(_POLL_S) - 1)])
            turn += 1


def _awaits_markers(state: TransactionState, txn: OpenTransaction) -> bool:
    is_same = state.producer_id == txn.producer_id
    return is_same and state.transaction_state == _PREPARE_COMMIT


def list_open(
    client: Client, ids: TransactionalIds, handle_of: Callable[[str, OpenTransaction], Handle]
) -> list[InDoubt]:
    """What is open now; `handle_of` finds the attempt that left a transaction, by id."""
    names = _open_ids(client, ids)
    found = []
    for name, state in zip(names, describe(client, names), strict=True):
        if isinstance(state, EpochalError):
            raise state
        if state.transaction_state == _ONGOING:
            txn = OpenTransaction(
                transactional_id=name,
                producer_id=state.producer_id,
                producer_epoch=state.producer_epoch,
                is_v2=client.transaction_version() >= 2,
                timeout_ms=state.transaction_timeout_ms,
                opened_at_s=state.transaction_start_time_ms / 1000,
            )
            found.append(_in_doubt(txn, handle_of(name, txn)))
    return found


def _open_ids(client: Client, ids: TransactionalIds) -> list[str]:
    """Ids of this sink with an open transaction; each broker lists those that it coordinates."""
    version = client.supported_versions(ListTransactionsRequest.API_KEY)[1]
    if version < 0:
        return []
    pattern = f"{re.escape(ids.prefix_of_pipeline)}.*" if version >= _PATTERN_FROM else None
    request = ListTransactionsRequest(state_filters=[_ONGOING], transactional_id_pattern=pattern)
    answers = client.ask_every_broker(request, "listing transactions")
    names = [one.transactional_id for answer in answers for one in answer.transaction_states]
    return sorted({name for name in names if ids.parse(name) is not None})


def _in_doubt(txn: OpenTransaction, handle: Handle) -> InDoubt:
    return InDoubt(
        name=txn.transactional_id,
        handle=handle,
        age_s=max(0.0, time.time() - txn.opened_at_s),
        receipt=Receipt(handle=handle, fingerprint=NO_ROWS, token=txn.to_token()),
        blocks="readers of its partitions that read committed records only",
    )


def abort(client: Client, txns: Sequence[OpenTransaction], timeout_ms: int) -> None:
    """Fence each id whose transaction is still the given one, which aborts the transaction."""
    starts = [
        ProducerStart(
            transactional_id=txn.transactional_id,
            timeout_ms=timeout_ms,
            expected=(txn.producer_id, txn.producer_epoch),
        )
        for txn in _still_open(client, txns)
    ]
    answers = start_producers(client, starts)
    if client.supports(DescribeTransactionsRequest.API_KEY):
        # Their state now counts, not the answers: a lost reply may have been a success, and at the
        # highest producer epoch Apache Kafka aborts and answers UNKNOWN_SERVER_ERROR.
        still = _still_open(client, txns)
        if not still:
            return
        _require_aborted(answers)
        raise TryAgain(f"{still[0].transactional_id} is still open")
    _require_aborted(answers)


def _still_open(client: Client, txns: Sequence[OpenTransaction]) -> list[OpenTransaction]:
    """Those that are open; all of them where brokers don't report it."""
    states = describe(client, [txn.transactional_id for txn in txns])
    found = []
    for txn, state in zip(txns, states, strict=True):
        if isinstance(state, EpochalError) and not isinstance(state, UnsupportedRequest):
            raise state
        if isinstance(state, UnsupportedRequest) or is_open(state, txn):
            found.append(txn)
    return found


def _require_aborted(answers: Sequence[InitProducerIdResponse | EpochalError]) -> None:
    for answer in answers:
        if isinstance(answer, EpochalError):
            raise answer
        if answer.error_code not in _ABORTED:
            require_ok(answer.error_code, "aborting a transaction")
