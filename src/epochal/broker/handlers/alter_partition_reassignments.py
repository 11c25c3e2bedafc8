"""AlterPartitionReassignments: to this broker, where every partition is, or refused."""

from __future__ import annotations

from epochal.broker.broker import Call
from epochal.kafka.codes import Code
from epochal.kafka.messages.alter_partition_reassignments import (
    AlterPartitionReassignmentsRequest,
    AlterPartitionReassignmentsResponse,
    ReassignablePartition,
    ReassignablePartitionResponse,
    ReassignableTopicResponse,
)

VERSIONS = range(2)


def handle(
    call: Call, request: AlterPartitionReassignmentsRequest
) -> AlterPartitionReassignmentsResponse:
    return AlterPartitionReassignmentsResponse(
        allow_replication_factor_change=request.allow_replication_factor_change,
        error_message=None,
        responses=[
            ReassignableTopicResponse(
                name=topic.name,
                partitions=[_result(call, topic.name, part) for part in topic.partitions],
            )
            for topic in request.topics
        ],
    )


def _result(call: Call, topic: str, part: ReassignablePartition) -> ReassignablePartitionResponse:
    result = ReassignablePartitionResponse(partition_index=part.partition_index, error_message=None)
    me = call.broker.settings.node_id
    if call.broker.partition(topic, part.partition_index) is None:
        result.error_code = Code.UNKNOWN_TOPIC_OR_PARTITION
        result.error_message = "This server does not host this topic-partition."
    elif part.replicas is None:
        result.error_code = Code.NO_REASSIGNMENT_IN_PROGRESS
        result.error_message = "No partition reassignment is in progress."
    elif part.replicas != [me]:
        result.error_code = Code.INVALID_REPLICA_ASSIGNMENT
        result.error_message = f"the only broker here is {me}"
    return result
