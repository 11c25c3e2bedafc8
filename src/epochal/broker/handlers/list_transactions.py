"""ListTransactions: which transactional ids there are."""

from __future__ import annotations

import re2

from epochal.broker.broker import Call
from epochal.broker.core.consumer_members import PATTERN
from epochal.broker.core.transaction_states import BY_NAME, NAMES, State
from epochal.broker.core.transactions import Transaction
from epochal.kafka.codes import Code
from epochal.kafka.messages.list_transactions import (
    ListTransactionsRequest,
    ListTransactionsResponse,
    TransactionState,
)

VERSIONS = range(3)


def handle(call: Call, request: ListTransactionsRequest) -> ListTransactionsResponse:
    unknown = [name for name in request.state_filters if name not in BY_NAME]
    if request.state_filters and len(unknown) == len(request.state_filters):
        return ListTransactionsResponse(unknown_state_filters=unknown)
    pattern = None
    if request.transactional_id_pattern:
        try:
            pattern = re2.compile(request.transactional_id_pattern, PATTERN)
        except re2.error:
            return ListTransactionsResponse(error_code=Code.INVALID_REGULAR_EXPRESSION)
    wanted = {BY_NAME[name] for name in request.state_filters if name in BY_NAME}
    now_ms = call.broker.now_ms
    return ListTransactionsResponse(
        unknown_state_filters=unknown,
        transaction_states=[
            TransactionState(
                transactional_id=txn.transactional_id,
                producer_id=txn.producer_id,
                transaction_state=NAMES[txn.state],
            )
            for txn in call.broker.state.transactions.ids.values()
            if _is_wanted(txn, request, wanted, now_ms)
            and (pattern is None or pattern.fullmatch(txn.transactional_id))
        ],
    )


def _is_wanted(
    txn: Transaction, request: ListTransactionsRequest, states: set[State], now_ms: int
) -> bool:
    if txn.state is State.DEAD or (states and txn.state not in states):
        return False
    if request.producer_id_filters and txn.producer_id not in request.producer_id_filters:
        return False
    if request.duration_filter >= 0:
        return txn.started_ms >= 0 and now_ms - txn.started_ms > request.duration_filter
    return True
