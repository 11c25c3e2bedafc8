"""DescribeQuorum: the one voter, this broker. Its log of metadata is the journal."""

from __future__ import annotations

from epochal.broker.broker import Call
from epochal.kafka.codes import Code
from epochal.kafka.messages.describe_quorum import (
    DescribeQuorumRequest,
    DescribeQuorumResponse,
    Listener,
    Node,
    ReplicaState,
    ResponsePartitionData,
    ResponseTopicData,
)

VERSIONS = range(3)
_TOPIC = "__cluster_metadata"
_NODES_FROM = 2


def handle(call: Call, request: DescribeQuorumRequest) -> DescribeQuorumResponse:
    me = call.broker.settings.node_id
    answer = DescribeQuorumResponse(
        error_message=None,
        topics=[
            ResponseTopicData(
                topic_name=topic.topic_name,
                partitions=[
                    _result(call, topic.topic_name, part.partition_index)
                    for part in topic.partitions
                ],
            )
            for topic in request.topics
        ],
    )
    if call.version >= _NODES_FROM:
        place = Listener(name="PLAINTEXT", host=call.address.host, port=call.address.port)
        answer.nodes = [Node(node_id=me, listeners=[place])]
    return answer


def _result(call: Call, topic: str, index: int) -> ResponsePartitionData:
    me, now_ms = call.broker.settings.node_id, call.broker.now_ms
    result = ResponsePartitionData(partition_index=index, error_message=None)
    if (topic, index) != (_TOPIC, 0):
        result.error_code = Code.UNKNOWN_TOPIC_OR_PARTITION
        return result
    end = call.broker.store.ticks
    voter = ReplicaState(replica_id=me, log_end_offset=end)
    if call.version > 0:
        voter.last_fetch_timestamp = voter.last_caught_up_timestamp = now_ms
    result.leader_id, result.leader_epoch, result.high_watermark = me, 1, end
    result.current_voters = [voter]
    return result
