"""AlterConfigs: a topic's whole configuration is replaced."""

from __future__ import annotations

from epochal.broker.broker import Call
from epochal.broker.core.topics import Refused, check_configs
from epochal.kafka.codes import Code
from epochal.kafka.messages.alter_configs import (
    AlterConfigsRequest,
    AlterConfigsResource,
    AlterConfigsResourceResponse,
    AlterConfigsResponse,
)

VERSIONS = range(3)
_TOPIC = 2


def handle(call: Call, request: AlterConfigsRequest) -> AlterConfigsResponse:
    is_rehearsal = request.validate_only
    return AlterConfigsResponse(
        responses=[_alter(call, one, is_rehearsal=is_rehearsal) for one in request.resources]
    )


def _alter(
    call: Call, wanted: AlterConfigsResource, *, is_rehearsal: bool
) -> AlterConfigsResourceResponse:
    result = AlterConfigsResourceResponse(
        error_message=None, resource_type=wanted.resource_type, resource_name=wanted.resource_name
    )
    configs = {config.name: config.value for config in wanted.configs}
    try:
        change_topic(
            call, (wanted.resource_type, wanted.resource_name), configs, is_rehearsal=is_rehearsal
        )
    except Refused as refused:
        result.error_code, result.error_message = refused.code, refused.message
    return result


def change_topic(
    call: Call, resource: tuple[int, str], configs: dict[str, str | None], *, is_rehearsal: bool
) -> None:
    """Set the configuration of a topic. Raises `Refused`."""
    kind, name = resource
    if kind != _TOPIC:
        raise Refused(Code.INVALID_REQUEST, "only topics are configured here; see --help")
    topic = call.broker.state.topics.by_name.get(name)
    if topic is None:
        raise Refused(Code.UNKNOWN_TOPIC_OR_PARTITION, f"The topic '{name}' does not exist.")
    check_configs(configs)
    if not is_rehearsal:
        plain = {key: value for key, value in configs.items() if value is not None}
        call.broker.state.topics.configure(topic, plain)
