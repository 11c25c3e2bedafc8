"""ListConfigResources: what has a configuration: topics, groups and this broker."""

from __future__ import annotations

from epochal.broker.broker import Call
from epochal.kafka.codes import Code
from epochal.kafka.messages.list_config_resources import (
    ConfigResource,
    ListConfigResourcesRequest,
    ListConfigResourcesResponse,
)

VERSIONS = range(2)
_TOPIC, _BROKER, _LOGGER, _CLIENT_METRICS, _GROUP = 2, 4, 8, 16, 32
_KINDS = (_TOPIC, _BROKER, _LOGGER, _CLIENT_METRICS, _GROUP)


def handle(call: Call, request: ListConfigResourcesRequest) -> ListConfigResourcesResponse:
    kinds = request.resource_types or _KINDS
    if call.version == 0:
        kinds = [_CLIENT_METRICS]
    if any(kind not in _KINDS for kind in kinds):
        return ListConfigResourcesResponse(error_code=Code.UNSUPPORTED_VERSION)
    me = str(call.broker.settings.node_id)
    state = call.broker.state
    names = {
        _TOPIC: list(state.topics.by_name),
        _BROKER: [me],
        _LOGGER: [me],
        _GROUP: list(state.groups.configs.by_group),
    }
    return ListConfigResourcesResponse(
        config_resources=[
            ConfigResource(resource_name=name, resource_type=kind)
            for kind in kinds
            for name in names.get(kind, ())
        ]
    )
