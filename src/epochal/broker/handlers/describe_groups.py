"""DescribeGroups: members and assignments of groups."""

from __future__ import annotations

from epochal.broker.broker import AuthorizedOperations, Call
from epochal.broker.core.group_members import GroupState
from epochal.kafka.codes import Code
from epochal.kafka.messages.describe_groups import (
    DescribedGroup,
    DescribedGroupMember,
    DescribeGroupsRequest,
    DescribeGroupsResponse,
)

VERSIONS = range(7)
_NOT_FOUND_FROM = 6
_INSTANCES_FROM = 4


def handle(call: Call, request: DescribeGroupsRequest) -> DescribeGroupsResponse:
    answer = DescribeGroupsResponse(groups=[_result(call, one) for one in request.groups])
    if request.include_authorized_operations:
        for group in answer.groups:
            group.authorized_operations = AuthorizedOperations.GROUP
    return answer


def _result(call: Call, group_id: str) -> DescribedGroup:
    group = call.broker.state.groups.classic.groups.get(group_id)
    if group is None:
        result = DescribedGroup(group_id=group_id, group_state=GroupState.DEAD.value)
        if call.version >= _NOT_FOUND_FROM:
            result.error_code = Code.GROUP_ID_NOT_FOUND
            is_newer = group_id in call.broker.state.groups.consumers.groups
            what = "is not a classic group" if is_newer else "not found"
            result.error_message = f"Group {group_id} {what}."
        return result
    has_protocol = group.state is GroupState.STABLE
    return DescribedGroup(
        group_id=group_id,
        group_state=group.state.value,
        protocol_type=group.protocol_type or "",
        protocol_data=(group.protocol or "") if has_protocol else "",
        members=[
            DescribedGroupMember(
                member_id=member.member_id,
                group_instance_id=member.instance_id if call.version >= _INSTANCES_FROM else None,
                client_id=member.client_id,
                client_host=f"/{member.client_host}",
                member_metadata=member.metadata(group.protocol) if has_protocol else b"",
                member_assignment=member.assignment if has_protocol else b"",
            )
            for member in group.members.values()
        ],
    )
