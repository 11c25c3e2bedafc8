"""DescribeTopicPartitions: topics by name, a page of partitions at a time."""

from __future__ import annotations

from epochal.broker.broker import AuthorizedOperations, Call
from epochal.broker.core.state import LEADER_EPOCH
from epochal.broker.core.topics import Topic
from epochal.kafka.codes import Code
from epochal.kafka.messages.describe_topic_partitions import (
    DescribeTopicPartitionsRequest,
    DescribeTopicPartitionsResponse,
    DescribeTopicPartitionsResponsePartition,
    DescribeTopicPartitionsResponseTopic,
    ResponseCursor,
)

VERSIONS = range(1)
_PARTITIONS_MAX = 2_000


def handle(call: Call, request: DescribeTopicPartitionsRequest) -> DescribeTopicPartitionsResponse:
    known = call.broker.state.topics.by_name
    names = sorted({topic.name for topic in request.topics} or known)
    first = 0
    if request.cursor is not None:
        cursor = request.cursor
        names = [name for name in names if name >= cursor.topic_name]
        first = cursor.partition_index if names and names[0] == cursor.topic_name else 0
    left = max(min(request.response_partition_limit, _PARTITIONS_MAX), 1)
    answer = DescribeTopicPartitionsResponse()
    for name in names:
        topic = known.get(name)
        if topic is None:
            code = Code.UNKNOWN_TOPIC_OR_PARTITION
            answer.topics.append(
                DescribeTopicPartitionsResponseTopic(
                    error_code=code,
                    name=name,
                    topic_authorized_operations=AuthorizedOperations.TOPIC,
                )
            )
            continue
        if left <= 0:
            answer.next_cursor = ResponseCursor(topic_name=name, partition_index=0)
            break
        last = min(max(first, 0) + left, len(topic.partitions))
        answer.topics.append(_result(call, topic, range(max(first, 0), last)))
        left -= last - max(first, 0)
        if last < len(topic.partitions):
            answer.next_cursor = ResponseCursor(topic_name=name, partition_index=last)
            break
        first = 0
    return answer


def _result(call: Call, topic: Topic, indexes: range) -> DescribeTopicPartitionsResponseTopic:
    me = call.broker.settings.node_id
    return DescribeTopicPartitionsResponseTopic(
        name=topic.name,
        topic_id=topic.topic_id,
        partitions=[
            DescribeTopicPartitionsResponsePartition(
                partition_index=index,
                leader_id=me,
                leader_epoch=LEADER_EPOCH,
                replica_nodes=[me],
                isr_nodes=[me],
                eligible_leader_replicas=[],
                last_known_elr=[],
            )
            for index in indexes
        ],
        topic_authorized_operations=AuthorizedOperations.TOPIC,
    )
