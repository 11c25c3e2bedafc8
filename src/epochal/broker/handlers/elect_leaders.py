"""ElectLeaders: this broker leads every partition already."""

from __future__ import annotations

from epochal.broker.broker import Call
from epochal.kafka.codes import Code
from epochal.kafka.messages.elect_leaders import (
    ElectLeadersRequest,
    ElectLeadersResponse,
    PartitionResult,
    ReplicaElectionResult,
)

VERSIONS = range(3)


def handle(call: Call, request: ElectLeadersRequest) -> ElectLeadersResponse:
    if request.topic_partitions is None:
        # Of all partitions, only those for which there was anything to do.
        asked = [(name, list[int]()) for name in call.broker.state.topics.by_name]
    else:
        asked = [(topic.topic, topic.partitions) for topic in request.topic_partitions]
    return ElectLeadersResponse(
        replica_election_results=[
            ReplicaElectionResult(
                topic=name, partition_result=[_result(call, name, index) for index in indexes]
            )
            for name, indexes in asked
        ]
    )


def _result(call: Call, topic: str, index: int) -> PartitionResult:
    if call.broker.partition(topic, index) is None:
        return PartitionResult(
            partition_id=index,
            error_code=Code.UNKNOWN_TOPIC_OR_PARTITION,
            error_message=f"No such partition as {topic}-{index}",
        )
    return PartitionResult(
        partition_id=index, error_code=Code.ELECTION_NOT_NEEDED, error_message=None
    )
