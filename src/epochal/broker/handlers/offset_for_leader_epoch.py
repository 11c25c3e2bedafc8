"""OffsetForLeaderEpoch: where the log of a leader's term ends. Here there is only one term."""

from __future__ import annotations

from epochal.broker.broker import Call
from epochal.broker.core.state import LEADER_EPOCH
from epochal.kafka.codes import Code
from epochal.kafka.messages.offset_for_leader_epoch import (
    EpochEndOffset,
    OffsetForLeaderEpochRequest,
    OffsetForLeaderEpochResponse,
    OffsetForLeaderPartition,
    OffsetForLeaderTopicResult,
)

VERSIONS = range(2, 5)


def handle(call: Call, request: OffsetForLeaderEpochRequest) -> OffsetForLeaderEpochResponse:
    return OffsetForLeaderEpochResponse(
        topics=[
            OffsetForLeaderTopicResult(
                topic=topic.topic,
                partitions=[_end(call, topic.topic, part) for part in topic.partitions],
            )
            for topic in request.topics
        ]
    )


def _end(call: Call, topic: str, part: OffsetForLeaderPartition) -> EpochEndOffset:
    result = EpochEndOffset(partition=part.partition)
    partition = call.broker.partition(topic, part.partition)
    if partition is None:
        result.error_code = Code.UNKNOWN_TOPIC_OR_PARTITION
    elif part.current_leader_epoch > LEADER_EPOCH:
        result.error_code = Code.UNKNOWN_LEADER_EPOCH
    elif part.leader_epoch == LEADER_EPOCH:
        result.leader_epoch, result.end_offset = LEADER_EPOCH, partition.end
    return result
