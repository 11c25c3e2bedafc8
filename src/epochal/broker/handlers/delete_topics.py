"""DeleteTopics."""

from __future__ import annotations

from epochal.broker.broker import Call
from epochal.kafka.codes import Code
from epochal.kafka.messages.delete_topics import (
    DeletableTopicResult,
    DeleteTopicsRequest,
    DeleteTopicsResponse,
    DeleteTopicState,
)

VERSIONS = range(1, 7)
_IDS_FROM = 6


def handle(call: Call, request: DeleteTopicsRequest) -> DeleteTopicsResponse:
    wanted = request.topics
    if call.version < _IDS_FROM:
        wanted = [DeleteTopicState(name=name) for name in request.topic_names]
    return DeleteTopicsResponse(responses=[_delete(call, one) for one in wanted])


def _delete(call: Call, wanted: DeleteTopicState) -> DeletableTopicResult:
    topics = call.broker.state.topics
    if wanted.name is not None:
        topic = topics.by_name.get(wanted.name)
        code = Code.UNKNOWN_TOPIC_OR_PARTITION
    else:
        topic = topics.by_id.get(wanted.topic_id)
        code = Code.UNKNOWN_TOPIC_ID
    result = DeletableTopicResult(name=wanted.name)
    if call.version >= _IDS_FROM:
        result.topic_id = wanted.topic_id
    if topic is None:
        result.error_code = code
        return result
    result.name = topic.name
    if call.version >= _IDS_FROM:
        result.topic_id = topic.topic_id
    for partition in topic.partitions:
        call.broker.fetch_waiters.removed(partition)
    topics.delete(topic)
    call.broker.state.offsets.forget_topic(topic.name)
    return result
