"""Produce: append batches, each in its turn, to the partitions they are for."""

from __future__ import annotations

from collections.abc import Mapping

from epochal.broker.broker import Call
from epochal.broker.core.batch_check import BatchHeader, Refusal, inspect
from epochal.broker.core.partitions import Partition
from epochal.broker.record_section import keyless
from epochal.kafka.codes import Code
from epochal.kafka.messages.produce import (
    BatchIndexAndErrorMessage,
    PartitionProduceData,
    PartitionProduceResponse,
    ProduceRequest,
    ProduceResponse,
    TopicProduceResponse,
)
from epochal.kafka.primitives import Malformed, Oversized, Records

VERSIONS = range(3, 13)
NEWER_FROM = 12
_ZSTD_FROM = 7
_REASONS_FROM = 8
_ABORTABLE_FROM = 11
_ACKS = (-1, 0, 1)
_ANY_TIME = (1 << 63) - 1


_KEYLESS = "Compacted topic cannot accept message without key in topic partition {}-{}."
_Scans = Mapping[tuple[str, int], "list[int] | Malformed"]
"""Partitions of compacted topics → which records have no key, or why they can't be read."""


def handle(call: Call, request: ProduceRequest) -> ProduceResponse | None:
    compacted = [
        (topic.name, part.index, part.records)
        for topic in request.topic_data
        if _is_compacted(call, topic.name)
        for part in topic.partition_data
        if part.records is not None
    ]
    if not compacted:
        answer = _answer(call, request, {})
        return None if request.acks == 0 else answer
    later = call.later()

    def then(scans: _Scans) -> None:
        answer = _answer(call, request, scans)
        if request.acks == 0:
            later.drop()
        else:
            later.answer(answer)

    bytes_max = call.broker.settings.unpacked_bytes_max
    call.broker.aside(
        lambda: {(name, index): _scan(data, bytes_max) for name, index, data in compacted}, then
    )
    return None


def _is_compacted(call: Call, name: str) -> bool:
    topic = call.broker.state.topics.by_name.get(name)
    return topic is not None and topic.is_compacted


def _scan(data: Records, bytes_max: int) -> list[int] | Malformed:
    try:
        return keyless(bytes(data), bytes_max)
    except Malformed as error:
        return error


def _answer(call: Call, request: ProduceRequest, scans: _Scans) -> ProduceResponse:
    return ProduceResponse(
        responses=[
            TopicProduceResponse(
                name=topic.name,
                partition_responses=[
                    _append(call, request, topic.name, part, scans.get((topic.name, part.index)))
                    for part in topic.partition_data
                ],
            )
            for topic in request.topic_data
        ]
    )


def _append(  # noqa: PLR0911  a line for each refusal
    call: Call,
    request: ProduceRequest,
    name: str,
    part: PartitionProduceData,
    scan: list[int] | Malformed | None,
) -> PartitionProduceResponse:
    broker = call.broker
    topic = broker.state.topics.by_name.get(name)
    if request.acks not in _ACKS:
        return _refused(part, Code.INVALID_REQUIRED_ACKS)
    if topic is None or not 0 <= part.index < len(topic.partitions):
        return _refused(part, Code.UNKNOWN_TOPIC_OR_PARTITION)
    is_stamped = topic.is_log_append_time
    head = inspect(
        part.records,
        bytes_max=topic.message_bytes_max,
        timestamp_max_ms=_ANY_TIME if is_stamped else broker.now_ms + topic.timestamp_ahead_max_ms,
        takes_zstd=call.version >= _ZSTD_FROM,
    )
    if isinstance(head, Refusal) or part.records is None:
        code, message = head if isinstance(head, Refusal) else (Code.INVALID_RECORD, "")
        return _refused(part, code, message)
    if scan:
        return _unkeyed(call, name, part, scan)
    partition = topic.partitions[part.index]
    if head.is_transactional:
        code = _check_transaction(call, request, head, partition)
        if code is not Code.NONE:
            return _refused(part, code)
    verdict, offset = broker.state.append(
        partition,
        head,
        part.records,
        now_ms=broker.now_ms,
        is_stamped=is_stamped,
        is_newer_protocol=head.is_transactional and call.version >= NEWER_FROM,
    )
    if verdict.code is not Code.NONE:
        return _refused(part, verdict.code)
    return PartitionProduceResponse(
        index=part.index,
        base_offset=offset,
        log_append_time_ms=broker.now_ms if is_stamped else -1,
        log_start_offset=partition.log_start,
    )


def _check_transaction(
    call: Call, request: ProduceRequest, head: BatchHeader, partition: Partition
) -> Code:
    """The transaction must be open and hold this partition; the newer protocol adds it here."""
    if request.transactional_id is None:
        return Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    if head.producer_id < 0:
        return Code.INVALID_PRODUCER_ID_MAPPING
    who = (request.transactional_id, head.producer_id, head.producer_epoch)
    transactions = call.broker.state.transactions
    if call.version >= NEWER_FROM:
        code = transactions.add(who, (partition.number,), (), call.broker.now_ms)
    else:
        code = transactions.verify(who, partition=partition.number)
    if code is Code.PRODUCER_FENCED:
        return Code.INVALID_PRODUCER_EPOCH
    if code is Code.TRANSACTION_ABORTABLE and call.version < _ABORTABLE_FROM:
        return Code.INVALID_TXN_STATE
    if code is Code.CONCURRENT_TRANSACTIONS and call.version < NEWER_FROM:
        return Code.NOT_ENOUGH_REPLICAS
    return code


def _unkeyed(
    call: Call, name: str, part: PartitionProduceData, scan: list[int] | Malformed
) -> PartitionProduceResponse:
    if isinstance(scan, Malformed):
        if isinstance(scan, Oversized):
            call.broker.limit_reached("unpacked_bytes_max")
        return _refused(part, Code.INVALID_RECORD, str(scan))
    result = _refused(part, Code.INVALID_RECORD, "One or more records have been rejected")
    if call.version >= _REASONS_FROM:
        text = _KEYLESS.format(name, part.index)
        result.record_errors = [
            BatchIndexAndErrorMessage(batch_index=number, batch_index_error_message=text)
            for number in scan
        ]
    return result


def _refused(
    part: PartitionProduceData, code: Code, message: str | None = None
) -> PartitionProduceResponse:
    return PartitionProduceResponse(
        index=part.index, error_code=code, base_offset=-1, error_message=message
    )
