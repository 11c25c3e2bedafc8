"""AlterConfigs: the whole configuration of a topic or a group is replaced."""

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
TOPIC, GROUP = 2, 32


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
        change(
            call, (wanted.resource_type, wanted.resource_name), configs, is_rehearsal=is_rehearsal
        )
    except Refused as refused:
        result.error_code, result.error_message = refused.code, refused.message
    return result


def change(
    call: Call, resource: tuple[int, str], configs: dict[str, str | None], *, is_rehearsal: bool
) -> None:
    """Set the configuration of a topic or a group. Raises `Refused`."""
    kind, name = resource
    if kind == TOPIC:
        _change_topic(call, name, configs, is_rehearsal=is_rehearsal)
    elif kind == GROUP:
        _change_group(call, name, configs, is_rehearsal=is_rehearsal)
    else:
        raise Refused(Code.INVALID_REQUEST, "only topics and groups are configured here")


def _change_topic(
    call: Call, name: str, configs: dict[str, str | None], *, is_rehearsal: bool
) -> None:
    topic = call.broker.state.topics.by_name.get(name)
    if topic is None:
        raise Refused(Code.UNKNOWN_TOPIC_OR_PARTITION, f"The topic '{name}' does not exist.")
    check_configs(configs)
    if not is_rehearsal:
        call.broker.state.topics.configure(topic, _given(configs))


def _change_group(
    call: Call, name: str, configs: dict[str, str | None], *, is_rehearsal: bool
) -> None:
    if not name:
        raise Refused(Code.INVALID_REQUEST, "Default group resources are not allowed.")
    groups = call.broker.state.groups.configs
    fault = groups.fault(configs)
    if fault:
        raise Refused(Code.INVALID_CONFIG, fault)
    if not is_rehearsal:
        groups.configure(name, _given(configs))


def _given(configs: dict[str, str | None]) -> dict[str, str]:
    return {key: value for key, value in configs.items() if value is not None}
