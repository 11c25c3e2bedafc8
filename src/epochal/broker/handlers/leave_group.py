"""LeaveGroup: members leave, or are removed."""

from __future__ import annotations

from epochal.broker.broker import Call
from epochal.kafka.codes import Code
from epochal.kafka.messages.leave_group import (
    LeaveGroupRequest,
    LeaveGroupResponse,
    MemberResponse,
)

VERSIONS = range(6)
_MANY_FROM = 3


def handle(call: Call, request: LeaveGroupRequest) -> LeaveGroupResponse:
    groups, now_ms = call.broker.state.groups, call.broker.now_ms
    if not request.group_id:
        return LeaveGroupResponse(error_code=Code.INVALID_GROUP_ID)
    if call.version < _MANY_FROM:
        code = groups.leave(request.group_id, request.member_id, None, now_ms)
        return LeaveGroupResponse(error_code=code)
    return LeaveGroupResponse(
        members=[
            MemberResponse(
                member_id=one.member_id,
                group_instance_id=one.group_instance_id,
                error_code=groups.leave(
                    request.group_id, one.member_id, one.group_instance_id, now_ms
                ),
            )
            for one in request.members
        ]
    )
