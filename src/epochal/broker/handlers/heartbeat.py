"""Heartbeat: a member is alive, and learns whether to join again."""

from __future__ import annotations

from epochal.broker.broker import Call
from epochal.kafka.messages.heartbeat import HeartbeatRequest, HeartbeatResponse

VERSIONS = range(5)


def handle(call: Call, request: HeartbeatRequest) -> HeartbeatResponse:
    who = (request.member_id, request.group_instance_id, request.generation_id)
    code = call.broker.state.groups.heartbeat(request.group_id, who, call.broker.now_ms)
    return HeartbeatResponse(error_code=code)
