"""JoinGroup: become a member of a group, in its next generation."""

from __future__ import annotations

from epochal.broker.broker import Call
from epochal.broker.core.group_members import Answer, JoinAnswer, JoinRequest
from epochal.kafka.messages.join_group import (
    JoinGroupRequest,
    JoinGroupResponse,
    JoinGroupResponseMember,
)

VERSIONS = range(10)
_ID_FIRST_FROM = 4
_INSTANCES_FROM = 5
_NULL_PROTOCOL_FROM = 7
_SKIPS_FROM = 9


def handle(call: Call, request: JoinGroupRequest) -> None:
    later = call.later()
    rebalance_ms = request.rebalance_timeout_ms
    wish = JoinRequest(
        request.group_id,
        request.member_id,
        request.group_instance_id,
        call.client_id,
        call.client_host,
        request.session_timeout_ms,
        rebalance_ms if rebalance_ms >= 0 else request.session_timeout_ms,
        request.protocol_type,
        [(protocol.name, protocol.metadata) for protocol in request.protocols],
        call.version >= _ID_FIRST_FROM,
        call.version >= _SKIPS_FROM,
    )
    version = call.version

    def answer(found: Answer) -> None:
        if isinstance(found, JoinAnswer):
            later.answer(_result(found, version))

    new_id = call.broker.member_id(request.group_instance_id or call.client_id)
    call.broker.state.groups.join(wish, answer, new_id, call.broker.now_ms)


def _result(found: JoinAnswer, version: int) -> JoinGroupResponse:
    has_null = version >= _NULL_PROTOCOL_FROM
    return JoinGroupResponse(
        error_code=found.code,
        generation_id=found.generation,
        protocol_type=found.protocol_type if has_null else None,
        protocol_name=found.protocol if has_null else found.protocol or "",
        leader=found.leader,
        skip_assignment=found.is_assignment_skipped,
        member_id=found.member_id,
        members=[
            JoinGroupResponseMember(
                member_id=member_id,
                group_instance_id=instance_id if version >= _INSTANCES_FROM else None,
                metadata=metadata,
            )
            for member_id, instance_id, metadata in found.members
        ],
    )
