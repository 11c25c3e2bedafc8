"""IncrementalAlterConfigs: single settings of topics and groups are changed."""

from __future__ import annotations

from epochal.broker.broker import Call
from epochal.broker.core.configs import TOPIC_CONFIGS
from epochal.broker.core.topics import Refused
from epochal.broker.handlers.alter_configs import GROUP, change
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
    resource = (wanted.resource_type, wanted.resource_name)
    configs = _present(call, *resource)
    try:
        for step in wanted.configs:
            _apply(call, configs, step)
        change(call, resource, configs, is_rehearsal=is_rehearsal)
    except Refused as refused:
        result.error_code, result.error_message = refused.code, refused.message
    return result


def _present(call: Call, kind: int, name: str) -> dict[str, str | None]:
    state = call.broker.state
    if kind == GROUP:
        return {**state.groups.configs.by_group.get(name, {})}
    topic = state.topics.by_name.get(name)
    return {} if topic is None else {**topic.configs}


def _apply(call: Call, configs: dict[str, str | None], step: AlterableConfig) -> None:
    name = step.name
    match step.config_operation:
        case 0 | 2 | 3 if step.value is None:
            raise Refused(Code.INVALID_REQUEST, f"Null value not supported for {name}")
        case 0:  # set
            configs[name] = step.value
        case 1:  # delete: the default again
            configs.pop(name, None)
        case 2 | 3:  # append to, or take from, a list
            kind = TOPIC_CONFIGS.get(name)
            if kind is None or name != "cleanup.policy":
                raise Refused(Code.INVALID_CONFIG, f"{name} is not a list")
            now = configs.get(name) or kind.default(call.broker.settings)
            words = [word for word in now.split(",") if word]
            given = (step.value or "").split(",")
            if step.config_operation == 2:
                words += [word for word in given if word not in words]
            else:
                words = [word for word in words if word not in given]
            configs[name] = ",".join(words)
        case _:
            raise Refused(Code.INVALID_REQUEST, f"there is no operation {step.config_operation}")
