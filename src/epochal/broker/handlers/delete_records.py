"""DeleteRecords: a log begins later."""

from __future__ import annotations

from epochal.broker.broker import Call
from epochal.kafka.codes import Code
from epochal.kafka.messages.delete_records import (
    DeleteRecordsPartition,
    DeleteRecordsPartitionResult,
    DeleteRecordsRequest,
    DeleteRecordsResponse,
    DeleteRecordsTopicResult,
)

VERSIONS = range(3)
_TO_THE_END = -1


def handle(call: Call, request: DeleteRecordsRequest) -> DeleteRecordsResponse:
    return DeleteRecordsResponse(
        topics=[
            DeleteRecordsTopicResult(
                name=topic.name,
                partitions=[_delete(call, topic.name, part) for part in topic.partitions],
            )
            for topic in request.topics
        ]
    )


def _delete(call: Call, topic: str, part: DeleteRecordsPartition) -> DeleteRecordsPartitionResult:
    partition = call.broker.partition(topic, part.partition_index)
    result = DeleteRecordsPartitionResult(partition_index=part.partition_index, low_watermark=-1)
    if partition is None:
        result.error_code = Code.UNKNOWN_TOPIC_OR_PARTITION
        return result
    offset = partition.end if part.offset == _TO_THE_END else part.offset
    if not 0 <= offset <= partition.end:
        result.error_code = Code.OFFSET_OUT_OF_RANGE
        return result
    if offset > partition.log_start:
        call.broker.state.move_log_start(partition, offset)
    result.low_watermark = partition.log_start
    return result
