"""ConsumerGroupHeartbeat: a member joins, goes on or leaves, and learns what it reads."""

from __future__ import annotations

import uuid

from epochal.broker.broker import Call
from epochal.broker.core.consumer_members import Beat, check_beat
from epochal.broker.core.entries import Places
from epochal.broker.core.topics import Refused
from epochal.kafka.messages.consumer_group_heartbeat import (
    Assignment,
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    ResponseTopicPartitions,
)

VERSIONS = range(2)
_ID_BY_CLIENT_FROM = 1


def handle(call: Call, request: ConsumerGroupHeartbeatRequest) -> ConsumerGroupHeartbeatResponse:
    must_have_id = call.version >= _ID_BY_CLIENT_FROM
    owned: Places | None = None
    if request.topic_partitions is not None:
        owned = frozenset(
            (topic.topic_id.hex(), index)
            for topic in request.topic_partitions
            for index in topic.partitions
        )
    beat = Beat(
        request.group_id,
        request.member_id,
        request.member_epoch,
        request.instance_id,
        request.rack_id,
        request.rebalance_timeout_ms,
        request.subscribed_topic_names,
        request.subscribed_topic_regex,
        request.server_assignor,
        owned,
        call.client_id,
        call.client_host,
    )
    try:
        check_beat(beat, must_have_id=must_have_id)
        if not beat.member_id:
            beat = beat._replace(member_id=str(uuid.uuid4()))
        found = call.broker.state.groups.beat(beat, call.broker.now_ms)
    except Refused as refused:
        return ConsumerGroupHeartbeatResponse(
            error_code=refused.code, error_message=refused.message
        )
    answer = ConsumerGroupHeartbeatResponse(
        member_id=found.member_id,
        member_epoch=found.epoch,
        heartbeat_interval_ms=call.broker.state.groups.configs.heartbeat_ms(beat.group_id),
    )
    if found.assigned is not None:
        answer.assignment = Assignment(topic_partitions=_by_topic(found.assigned))
    return answer


def _by_topic(places: Places) -> list[ResponseTopicPartitions]:
    found: dict[str, list[int]] = {}
    for topic_id, index in sorted(places):
        found.setdefault(topic_id, []).append(index)
    return [
        ResponseTopicPartitions(topic_id=bytes.fromhex(topic_id), partitions=indexes)
        for topic_id, indexes in found.items()
    ]
