"""ListGroups: which groups there are."""

from __future__ import annotations

from epochal.broker.broker import Call
from epochal.kafka.messages.list_groups import (
    ListedGroup,
    ListGroupsRequest,
    ListGroupsResponse,
)

VERSIONS = range(6)
_STATES_FROM = 4
_TYPES_FROM = 5
_TYPE = "classic"


def handle(call: Call, request: ListGroupsRequest) -> ListGroupsResponse:
    states = {state.lower() for state in request.states_filter}
    types = {kind.lower() for kind in request.types_filter}
    if types and _TYPE not in types:
        return ListGroupsResponse()
    return ListGroupsResponse(
        groups=[
            ListedGroup(
                group_id=group.group_id,
                protocol_type=group.protocol_type or "",
                group_state=group.state.value if call.version >= _STATES_FROM else "",
                group_type=_TYPE if call.version >= _TYPES_FROM else "",
            )
            for group in call.broker.state.groups.groups.values()
            if not states or group.state.value.lower() in states
        ]
    )
