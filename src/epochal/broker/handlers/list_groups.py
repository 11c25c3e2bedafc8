"""ListGroups: which groups there are."""

from __future__ import annotations

from collections.abc import Iterator

from epochal.broker.broker import Call
from epochal.broker.core.group_members import CONSUMER
from epochal.kafka.messages.list_groups import (
    ListedGroup,
    ListGroupsRequest,
    ListGroupsResponse,
)

VERSIONS = range(6)
_STATES_FROM = 4
_TYPES_FROM = 5
_CLASSIC, _CONSUMER = "classic", "consumer"


def handle(call: Call, request: ListGroupsRequest) -> ListGroupsResponse:
    states = {state.lower() for state in request.states_filter}
    types = {kind.lower() for kind in request.types_filter}
    return ListGroupsResponse(
        groups=[
            ListedGroup(
                group_id=group_id,
                protocol_type=protocol_type,
                group_state=state if call.version >= _STATES_FROM else "",
                group_type=kind if call.version >= _TYPES_FROM else "",
            )
            for group_id, protocol_type, state, kind in _rows(call)
            if (not states or state.lower() in states) and (not types or kind in types)
        ]
    )


def _rows(call: Call) -> Iterator[tuple[str, str, str, str]]:
    groups = call.broker.state.groups
    for group in groups.classic.groups.values():
        yield group.group_id, group.protocol_type or "", group.state.value, _CLASSIC
    for newer in groups.consumers.groups.values():
        yield newer.group_id, CONSUMER, newer.state, _CONSUMER
