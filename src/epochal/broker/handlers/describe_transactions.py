"""DescribeTransactions: state and contents of transactional ids."""

from __future__ import annotations

from epochal.broker.broker import Call
from epochal.broker.core.transaction_states import NAMES, State
from epochal.kafka.codes import Code
from epochal.kafka.messages.describe_transactions import (
    DescribeTransactionsRequest,
    DescribeTransactionsResponse,
    TopicData,
    TransactionState,
)

VERSIONS = range(1)


def handle(call: Call, request: DescribeTransactionsRequest) -> DescribeTransactionsResponse:
    return DescribeTransactionsResponse(
        transaction_states=[_result(call, name) for name in request.transactional_ids]
    )


def _result(call: Call, name: str) -> TransactionState:
    txn = call.broker.state.transactions.ids.get(name)
    if not name:
        return TransactionState(error_code=Code.INVALID_REQUEST)
    if txn is None or txn.state is State.DEAD:
        code = Code.TRANSACTIONAL_ID_NOT_FOUND
        return TransactionState(transactional_id=name, error_code=code)
    topics: dict[str, list[int]] = {}
    for number in txn.partitions:
        partition = call.broker.state.topics.partitions.get(number)
        if partition is not None:
            topics.setdefault(partition.topic, []).append(partition.index)
    return TransactionState(
        transactional_id=name,
        transaction_state=NAMES[txn.state],
        transaction_timeout_ms=txn.timeout_ms,
        transaction_start_time_ms=txn.started_ms,
        producer_id=txn.producer_id,
        producer_epoch=txn.producer_epoch,
        topics=[
            TopicData(topic=topic, partitions=sorted(indexes))
            for topic, indexes in sorted(topics.items())
        ],
    )
