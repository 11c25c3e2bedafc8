"""DeleteGroups: groups without members, and all that they committed, are forgotten."""

from __future__ import annotations

from epochal.broker.broker import Call
from epochal.kafka.codes import Code
from epochal.kafka.messages.delete_groups import (
    DeletableGroupResult,
    DeleteGroupsRequest,
    DeleteGroupsResponse,
)

VERSIONS = range(3)


def handle(call: Call, request: DeleteGroupsRequest) -> DeleteGroupsResponse:
    state = call.broker.state
    results: list[DeletableGroupResult] = []
    for group_id in request.groups_names:
        code = state.groups.delete(group_id)
        if code is Code.NONE:
            state.offsets.forget_group(group_id)
        results.append(DeletableGroupResult(group_id=group_id, error_code=code))
    return DeleteGroupsResponse(results=results)
