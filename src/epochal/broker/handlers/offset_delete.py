"""OffsetDelete: a group's offsets of topics that it does not read any more."""

from __future__ import annotations

from epochal.broker.broker import Call
from epochal.kafka.codes import Code
from epochal.kafka.messages.offset_delete import (
    OffsetDeleteRequest,
    OffsetDeleteResponse,
    OffsetDeleteResponsePartition,
    OffsetDeleteResponseTopic,
)

VERSIONS = range(1)


def handle(call: Call, request: OffsetDeleteRequest) -> OffsetDeleteResponse:
    state = call.broker.state
    code, subscribed = state.groups.readers_of(request.group_id)
    if code is not Code.NONE:
        return OffsetDeleteResponse(error_code=code)
    answer = OffsetDeleteResponse()
    gone: list[tuple[str, int]] = []
    for topic in request.topics:
        parts: list[OffsetDeleteResponsePartition] = []
        for part in topic.partitions:
            code = Code.NONE
            if state.topics.partition(topic.name, part.partition_index) is None:
                code = Code.UNKNOWN_TOPIC_OR_PARTITION
            elif topic.name in subscribed:
                code = Code.GROUP_SUBSCRIBED_TO_TOPIC
            else:
                gone.append((topic.name, part.partition_index))
            parts.append(
                OffsetDeleteResponsePartition(partition_index=part.partition_index, error_code=code)
            )
        answer.topics.append(OffsetDeleteResponseTopic(name=topic.name, partitions=parts))
    state.offsets.forget(request.group_id, gone)
    return answer
