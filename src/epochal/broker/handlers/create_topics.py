"""CreateTopics."""

from __future__ import annotations

import uuid
from collections import Counter

from epochal.broker.broker import Call
from epochal.broker.core.configs import TOPIC_CONFIGS
from epochal.broker.core.topics import Refused, Topic
from epochal.kafka.codes import Code
from epochal.kafka.messages.create_topics import (
    CreatableTopic,
    CreatableTopicConfigs,
    CreatableTopicResult,
    CreateTopicsRequest,
    CreateTopicsResponse,
)

VERSIONS = range(2, 8)
_DETAILS_FROM = 5
_IDS_FROM = 7
_SOURCE_TOPIC, _SOURCE_DEFAULT = 1, 5


def handle(call: Call, request: CreateTopicsRequest) -> CreateTopicsResponse:
    names = Counter(topic.name for topic in request.topics)
    results: list[CreatableTopicResult] = []
    for wanted in request.topics:
        try:
            if names[wanted.name] > 1:
                raise Refused(Code.INVALID_REQUEST, "Duplicate topic name.")  # noqa: TRY301
            results.append(_make(call, wanted, is_rehearsal=request.validate_only))
        except Refused as refused:
            results.append(
                CreatableTopicResult(
                    name=wanted.name,
                    error_code=refused.code,
                    error_message=refused.message,
                    configs=[],
                )
            )
    return CreateTopicsResponse(topics=results)


def _make(call: Call, wanted: CreatableTopic, *, is_rehearsal: bool) -> CreatableTopicResult:
    topics = call.broker.state.topics
    partitions = _partitions(call, wanted)
    configs = {config.name: config.value for config in wanted.configs}
    topics.check_new(wanted.name, partitions, configs)
    if wanted.replication_factor not in (-1, 1):
        raise Refused(
            Code.INVALID_REPLICATION_FACTOR,
            f"Unable to replicate the partition {wanted.replication_factor} time(s): "
            "this is one broker.",
        )
    topic_id = uuid.uuid4().bytes
    plain = {name: value for name, value in configs.items() if value is not None}
    if is_rehearsal:
        topic = Topic(wanted.name, bytes(16), [], plain)
    else:
        topic = topics.make(wanted.name, topic_id, partitions, plain)
    result = CreatableTopicResult(name=wanted.name, error_message=None, configs=[])
    if call.version >= _IDS_FROM:
        result.topic_id = topic.topic_id
    if call.version >= _DETAILS_FROM:
        result.num_partitions = partitions
        result.replication_factor = 1
        result.configs = _configs(call, topic)
    return result


def _partitions(call: Call, wanted: CreatableTopic) -> int:
    if not wanted.assignments:
        given = wanted.num_partitions
        return call.broker.settings.partitions_default if given == -1 else given
    indexes = sorted(assignment.partition_index for assignment in wanted.assignments)
    if wanted.num_partitions != -1 or wanted.replication_factor != -1:
        raise Refused(
            Code.INVALID_REQUEST,
            "A manual partition assignment was specified, but numPartitions was not set to -1.",
        )
    me = [call.broker.settings.node_id]
    if indexes != list(range(len(indexes))) or any(a.broker_ids != me for a in wanted.assignments):
        raise Refused(Code.INVALID_REPLICA_ASSIGNMENT, f"the only broker here is {me[0]}")
    return len(indexes)


def _configs(call: Call, topic: Topic) -> list[CreatableTopicConfigs]:
    settings = call.broker.settings
    return [
        CreatableTopicConfigs(
            name=name,
            value=topic.configs.get(name, kind.default(settings)),
            config_source=_SOURCE_TOPIC if name in topic.configs else _SOURCE_DEFAULT,
        )
        for name, kind in TOPIC_CONFIGS.items()
    ]
