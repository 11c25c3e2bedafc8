"""Heartbeat: a member is alive, and learns whether to join again."""

from __future__ import annotations

from epochal.broker.broker import Call
from epochal.broker.core.group_members import Sender
from epochal.kafka.messages.heartbeat import HeartbeatRequest, HeartbeatResponse

VERSIONS = range(5)


def handle(call: Call, request: HeartbeatRequest) -> HeartbeatResponse:
    sender = Sender(request.member_id, request.group_instance_id, request.generation_id)
    code = call.broker.state.groups.heartbeat(request.group_id, sender, call.broker.now_ms)
    return HeartbeatResponse(error_code=code)
