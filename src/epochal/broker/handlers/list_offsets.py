"""ListOffsets: the first, the last, and the first since a time."""

from __future__ import annotations

from epochal.broker.broker import Broker, Call
from epochal.broker.core.partitions import Partition
from epochal.broker.core.state import LEADER_EPOCH
from epochal.broker.record_times import first_record_since
from epochal.kafka.codes import Code
from epochal.kafka.messages.list_offsets import (
    ListOffsetsPartition,
    ListOffsetsPartitionResponse,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ListOffsetsTopicResponse,
)
from epochal.kafka.primitives import Malformed

VERSIONS = range(1, 9)
_MAX_TIMESTAMP = -3
_EPOCHS_FROM = 4
_COMMITTED = 1


def handle(call: Call, request: ListOffsetsRequest) -> ListOffsetsResponse:
    is_committed = request.isolation_level == _COMMITTED
    return ListOffsetsResponse(
        topics=[
            ListOffsetsTopicResponse(
                name=topic.name,
                partitions=[
                    _found(call, topic.name, part, is_committed=is_committed)
                    for part in topic.partitions
                ],
            )
            for topic in request.topics
        ]
    )


def _found(
    call: Call, topic: str, part: ListOffsetsPartition, *, is_committed: bool
) -> ListOffsetsPartitionResponse:
    broker = call.broker
    answer = ListOffsetsPartitionResponse(partition_index=part.partition_index)
    partition = broker.partition(topic, part.partition_index)
    if partition is None:
        answer.error_code = Code.UNKNOWN_TOPIC_OR_PARTITION
        return answer
    if part.current_leader_epoch > LEADER_EPOCH:
        answer.error_code = Code.UNKNOWN_LEADER_EPOCH
        return answer
    end = partition.stable_end if is_committed else partition.end
    match part.timestamp:
        case -1:  # the end
            answer.offset = end
        case -2 | -4:  # the start; as nothing is kept elsewhere, the local one too
            answer.offset = partition.log_start
        case _:
            answer.timestamp, answer.offset = _since(broker, partition, part.timestamp, end)
            if answer.offset < 0:
                return answer
    if call.version >= _EPOCHS_FROM:
        answer.leader_epoch = LEADER_EPOCH
    return answer


def _since(broker: Broker, partition: Partition, timestamp_ms: int, end: int) -> tuple[int, int]:
    log = broker.store.logs[partition.number]
    if timestamp_ms == _MAX_TIMESTAMP:
        timestamp_ms = log.latest_timestamp()
    if timestamp_ms < 0:
        return -1, -1
    batch = log.first_since(timestamp_ms, partition.log_start)
    if batch is None:
        return -1, -1
    try:
        found = first_record_since(batch, timestamp_ms)
    except Malformed:
        found = None
    if found is None or found[1] >= end:
        return -1, -1
    return found
