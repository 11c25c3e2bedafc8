"""IncrementalAlterConfigs: single settings of topics are changed."""

from __future__ import annotations

from epochal.broker.broker import Call
from epochal.broker.core.topics import CONFIGS, Refused
from epochal.broker.handlers.alter_configs import change_topic
from epochal.kafka.codes import Code
from epochal.kafka.messages.incremental_alter_configs import (
    AlterableConfig,
    AlterConfigsResource,
    AlterConfigsResourceResponse,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResponse,
)

VERSIONS = range(2)


def handle(call: Call, request: IncrementalAlterConfigsRequest) -> IncrementalAlterConfigsResponse:
    is_rehearsal = request.validate_only
    return IncrementalAlterConfigsResponse(
        responses=[_alter(call, one, is_rehearsal=is_rehearsal) for one in request.resources]
    )


def _alter(
    call: Call, wanted: AlterConfigsResource, *, is_rehearsal: bool
) -> AlterConfigsResourceResponse:
    result = AlterConfigsResourceResponse(
        error_message=None, resource_type=wanted.resource_type, resource_name=wanted.resource_name
    )
    topic = call.broker.state.topics.by_name.get(wanted.resource_name)
    configs: dict[str, str | None] = {} if topic is None else dict(topic.configs)
    resource = (wanted.resource_type, wanted.resource_name)
    try:
        for change in wanted.configs:
            _apply(call, configs, change)
        change_topic(call, resource, configs, is_rehearsal=is_rehearsal)
    except Refused as refused:
        result.error_code, result.error_message = refused.code, refused.message
    return result


def _apply(call: Call, configs: dict[str, str | None], change: AlterableConfig) -> None:
    name = change.name
    match change.config_operation:
        case 0:  # set
            configs[name] = change.value
        case 1:  # delete: the default again
            configs.pop(name, None)
        case 2 | 3:  # append to, or take from, a list
            kind = CONFIGS.get(name)
            if kind is None or name != "cleanup.policy":
                raise Refused(Code.INVALID_CONFIG, f"{name} is not a list")
            now = configs.get(name) or kind.default(call.broker.settings)
            words = [word for word in now.split(",") if word]
            given = (change.value or "").split(",")
            if change.config_operation == 2:
                words += [word for word in given if word not in words]
            else:
                words = [word for word in words if word not in given]
            configs[name] = ",".join(words)
        case _:
            raise Refused(Code.INVALID_REQUEST, f"there is no operation {change.config_operation}")
