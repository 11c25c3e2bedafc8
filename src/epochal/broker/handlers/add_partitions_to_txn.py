"""AddPartitionsToTxn: partitions join a transaction, or begin one."""

from __future__ import annotations

from epochal.broker.broker import Call
from epochal.kafka.codes import Code
from epochal.kafka.messages.add_partitions_to_txn import (
    AddPartitionsToTxnPartitionResult,
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse,
    AddPartitionsToTxnResult,
    AddPartitionsToTxnTopic,
    AddPartitionsToTxnTopicResult,
)

VERSIONS = range(6)
_MANY_FROM = 4
_FENCED_FROM = 2
"""Clients before this version know only INVALID_PRODUCER_EPOCH."""
_ABORTABLE_FROM = 5


def handle(call: Call, request: AddPartitionsToTxnRequest) -> AddPartitionsToTxnResponse:
    if call.version < _MANY_FROM:
        who = (
            request.v3_and_below_transactional_id,
            request.v3_and_below_producer_id,
            request.v3_and_below_producer_epoch,
        )
        results = _add(call, who, request.v3_and_below_topics, verify_only=False)
        return AddPartitionsToTxnResponse(results_by_topic_v3_and_below=results)
    return AddPartitionsToTxnResponse(
        results_by_transaction=[
            AddPartitionsToTxnResult(
                transactional_id=one.transactional_id,
                topic_results=_add(
                    call,
                    (one.transactional_id, one.producer_id, one.producer_epoch),
                    one.topics,
                    verify_only=one.verify_only,
                ),
            )
            for one in request.transactions
        ]
    )


def _add(
    call: Call,
    who: tuple[str, int, int],
    topics: list[AddPartitionsToTxnTopic],
    *,
    verify_only: bool,
) -> list[AddPartitionsToTxnTopicResult]:
    codes: dict[tuple[str, int], Code] = {}
    numbers: dict[tuple[str, int], int] = {}
    for topic in topics:
        for index in topic.partitions:
            partition = call.broker.partition(topic.name, index)
            if partition is None:
                codes[topic.name, index] = Code.UNKNOWN_TOPIC_OR_PARTITION
            else:
                numbers[topic.name, index] = partition.number
    transactions = call.broker.state.transactions
    if not who[0]:
        codes = dict.fromkeys([*codes, *numbers], Code.INVALID_REQUEST)
    elif codes:
        codes |= dict.fromkeys(numbers, Code.OPERATION_NOT_ATTEMPTED)
    elif verify_only:
        for place, number in numbers.items():
            codes[place] = _result(call, transactions.verify(who, partition=number))
    else:
        code = transactions.add(who, tuple(numbers.values()), (), call.broker.now_ms)
        codes = dict.fromkeys(numbers, _result(call, code))
    return [
        AddPartitionsToTxnTopicResult(
            name=topic.name,
            results_by_partition=[
                AddPartitionsToTxnPartitionResult(
                    partition_index=index, partition_error_code=codes[topic.name, index]
                )
                for index in topic.partitions
            ],
        )
        for topic in topics
    ]


def _result(call: Call, code: Code) -> Code:
    if code is Code.PRODUCER_FENCED and call.version < _FENCED_FROM:
        return Code.INVALID_PRODUCER_EPOCH
    if code is Code.TRANSACTION_ABORTABLE and call.version < _ABORTABLE_FROM:
        return Code.INVALID_TXN_STATE
    return code
