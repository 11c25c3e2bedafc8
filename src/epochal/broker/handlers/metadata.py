"""Metadata: which topics there are, and who leads them: this broker, or the active member."""

from __future__ import annotations

from epochal.broker.broker import AuthorizedOperations, Call
from epochal.broker.core.state import LEADER_EPOCH
from epochal.broker.core.topics import Refused, Topic
from epochal.kafka.codes import Code
from epochal.kafka.messages.metadata import (
    MetadataRequest,
    MetadataRequestTopic,
    MetadataResponse,
    MetadataResponseBroker,
    MetadataResponsePartition,
    MetadataResponseTopic,
)
from epochal.kafka.primitives import NO_UUID

VERSIONS = range(13)
_EMPTY_MEANS_ALL_TO = 0


def handle(call: Call, request: MetadataRequest) -> MetadataResponse:
    broker = call.broker
    node_id = call.leader.node_id
    asked = request.topics
    if asked is None or (not asked and call.version <= _EMPTY_MEANS_ALL_TO):
        topics = [_result(topic, node_id) for topic in broker.state.topics.by_name.values()]
    else:
        may_create = request.allow_auto_topic_creation and broker.is_leading
        topics = [_one(call, topic, may_create=may_create) for topic in asked]
    if request.include_topic_authorized_operations:
        for topic in topics:
            if topic.error_code == Code.NONE:
                topic.topic_authorized_operations = AuthorizedOperations.TOPIC
    answer = MetadataResponse(
        brokers=[
            MetadataResponseBroker(node_id=node.node_id, host=node.host, port=node.port)
            for node in call.nodes
        ],
        cluster_id=broker.state.cluster_id,
        controller_id=node_id,
        topics=topics,
    )
    if request.include_cluster_authorized_operations:
        answer.cluster_authorized_operations = AuthorizedOperations.CLUSTER
    return answer


def _one(call: Call, asked: MetadataRequestTopic, *, may_create: bool) -> MetadataResponseTopic:
    broker = call.broker
    if asked.topic_id != NO_UUID:
        found = broker.state.topics.by_id.get(asked.topic_id)
        if found is None:
            return MetadataResponseTopic(
                error_code=Code.UNKNOWN_TOPIC_ID, name=asked.name, topic_id=asked.topic_id
            )
        return _result(found, call.leader.node_id)
    name = asked.name or ""
    try:
        found = broker.topic(name, may_create=may_create)
    except Refused as refused:
        return MetadataResponseTopic(error_code=refused.code, name=name)
    if found is None:
        return MetadataResponseTopic(error_code=Code.UNKNOWN_TOPIC_OR_PARTITION, name=name)
    return _result(found, call.leader.node_id)


def _result(topic: Topic, node_id: int) -> MetadataResponseTopic:
    return MetadataResponseTopic(
        name=topic.name,
        topic_id=topic.topic_id,
        partitions=[
            MetadataResponsePartition(
                partition_index=partition.index,
                leader_id=node_id,
                leader_epoch=LEADER_EPOCH,
                replica_nodes=[node_id],
                isr_nodes=[node_id],
            )
            for partition in topic.partitions
        ],
    )
