"""SyncGroup: the leader sends the assignment, and every member gets its part."""

from __future__ import annotations

from epochal.broker.broker import Call
from epochal.broker.core.group_members import Answer, Sender, SyncAnswer, SyncRequest
from epochal.kafka.codes import Code
from epochal.kafka.messages.sync_group import SyncGroupRequest, SyncGroupResponse

VERSIONS = range(6)
_PROTOCOL_FROM = 5


def handle(call: Call, request: SyncGroupRequest) -> None:
    later = call.later()
    has_protocol = call.version >= _PROTOCOL_FROM

    def answer(found: Answer) -> None:
        if isinstance(found, SyncAnswer):
            result = SyncGroupResponse(error_code=found.code, assignment=found.assignment)
            if has_protocol:
                result.protocol_type = found.protocol_type
                result.protocol_name = found.protocol
            later.answer(result)

    if has_protocol and (request.protocol_type is None or request.protocol_name is None):
        answer(SyncAnswer(Code.INCONSISTENT_GROUP_PROTOCOL))
        return
    wanted = SyncRequest(
        request.group_id,
        Sender(request.member_id, request.group_instance_id, request.generation_id),
        request.protocol_type,
        request.protocol_name,
        {given.member_id: given.assignment for given in request.assignments},
    )
    call.broker.state.groups.sync(wanted, answer, call.broker.now_ms)
