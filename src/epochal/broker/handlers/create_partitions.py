"""CreatePartitions: a topic gets more of them."""

from __future__ import annotations

from epochal.broker.broker import Call
from epochal.broker.core.topics import Refused
from epochal.kafka.codes import Code
from epochal.kafka.messages.create_partitions import (
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CreatePartitionsTopic,
    CreatePartitionsTopicResult,
)

VERSIONS = range(4)


def handle(call: Call, request: CreatePartitionsRequest) -> CreatePartitionsResponse:
    is_rehearsal = request.validate_only
    return CreatePartitionsResponse(
        results=[_grow(call, wanted, is_rehearsal=is_rehearsal) for wanted in request.topics]
    )


def _grow(
    call: Call, wanted: CreatePartitionsTopic, *, is_rehearsal: bool
) -> CreatePartitionsTopicResult:
    topics = call.broker.state.topics
    topic = topics.by_name.get(wanted.name)
    result = CreatePartitionsTopicResult(name=wanted.name)
    if topic is None:
        result.error_code = Code.UNKNOWN_TOPIC_OR_PARTITION
        result.error_message = "This server does not host this topic-partition."
        return result
    try:
        topics.check_growth(topic, wanted.count)
        if not is_rehearsal:
            topics.grow(topic, wanted.count)
    except Refused as refused:
        result.error_code, result.error_message = refused.code, refused.message
    return result
