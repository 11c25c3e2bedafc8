"""FindCoordinator: the coordinator of a group or a transactional id: the broker that leads all."""

from __future__ import annotations

from epochal.broker.broker import Call
from epochal.kafka.codes import Code
from epochal.kafka.messages.find_coordinator import (
    Coordinator,
    FindCoordinatorRequest,
    FindCoordinatorResponse,
)

VERSIONS = range(6)
_MANY_FROM = 4
_GROUP, _TRANSACTION = 0, 1


def handle(call: Call, request: FindCoordinatorRequest) -> FindCoordinatorResponse:
    if call.version >= _MANY_FROM:
        keys = request.coordinator_keys
        return FindCoordinatorResponse(coordinators=[_of(call, request, key) for key in keys])
    one = _of(call, request, request.key)
    return FindCoordinatorResponse(
        error_code=one.error_code,
        error_message=one.error_message if call.version >= 1 else "",
        node_id=one.node_id,
        host=one.host,
        port=one.port,
    )


def _of(call: Call, request: FindCoordinatorRequest, key: str) -> Coordinator:
    if request.key_type not in (_GROUP, _TRANSACTION):
        code = Code.INVALID_REQUEST
        return Coordinator(key=key, node_id=-1, port=-1, error_code=code, error_message=code.name)
    leader = call.leader
    return Coordinator(
        key=key,
        node_id=leader.node_id,
        host=leader.host,
        port=leader.port,
        error_message=None,
    )
