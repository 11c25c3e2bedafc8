"""DescribeConfigs: of topics and of this broker."""

from __future__ import annotations

from epochal.broker.broker import Call
from epochal.broker.core.topics import CONFIGS
from epochal.kafka.codes import Code
from epochal.kafka.messages.describe_configs import (
    DescribeConfigsRequest,
    DescribeConfigsResource,
    DescribeConfigsResourceResult,
    DescribeConfigsResponse,
    DescribeConfigsResult,
    DescribeConfigsSynonym,
)

VERSIONS = range(1, 5)
_TOPIC, _BROKER = 2, 4
_SOURCE_TOPIC, _SOURCE_STATIC, _SOURCE_DEFAULT = 1, 4, 5
_STRING = 2
_TYPES_FROM = 3


def handle(call: Call, request: DescribeConfigsRequest) -> DescribeConfigsResponse:
    return DescribeConfigsResponse(
        results=[_result(call, request, resource) for resource in request.resources]
    )


def _result(
    call: Call, request: DescribeConfigsRequest, resource: DescribeConfigsResource
) -> DescribeConfigsResult:
    result = DescribeConfigsResult(
        error_message=None,
        resource_type=resource.resource_type,
        resource_name=resource.resource_name,
    )
    if resource.resource_type == _TOPIC:
        found = _topic_rows(call, resource.resource_name)
    elif resource.resource_type == _BROKER:
        found = _broker_rows(call)
    else:
        result.error_code = Code.INVALID_REQUEST
        result.error_message = f"resources of type {resource.resource_type} are not known here"
        return result
    if found is None:
        result.error_code = Code.UNKNOWN_TOPIC_OR_PARTITION
        return result
    wanted = resource.configuration_keys
    result.configs = [
        _row(call, row, with_synonyms=request.include_synonyms)
        for row in found
        if wanted is None or not wanted or row[0] in wanted
    ]
    return result


_Row = tuple[str, str, int, int]
"""Name, value, source, type."""


def _topic_rows(call: Call, name: str) -> list[_Row] | None:
    topic = call.broker.state.topics.by_name.get(name)
    if topic is None:
        return None
    settings = call.broker.settings
    return [
        (
            key,
            topic.configs.get(key, kind.default(settings)),
            _SOURCE_TOPIC if key in topic.configs else _SOURCE_DEFAULT,
            kind.type_code,
        )
        for key, kind in CONFIGS.items()
    ]


def _broker_rows(call: Call) -> list[_Row]:
    settings = call.broker.settings
    known = {
        "auto.create.topics.enable": str(settings.topics_auto_created).lower(),
        "broker.id": str(settings.node_id),
        "default.replication.factor": "1",
        "log.retention.bytes": str(settings.retention_bytes),
        "log.retention.ms": str(settings.retention_ms),
        "log.segment.bytes": str(settings.segment_bytes),
        "message.max.bytes": str(settings.message_bytes_max),
        "node.id": str(settings.node_id),
        "num.partitions": str(settings.partitions_default),
        "transaction.max.timeout.ms": str(settings.transaction_timeout_max_ms),
        "transactional.id.expiration.ms": str(settings.transactional_id_expiry_ms),
    }
    return [(name, value, _SOURCE_STATIC, _STRING) for name, value in known.items()]


def _row(call: Call, row: _Row, *, with_synonyms: bool) -> DescribeConfigsResourceResult:
    name, value, source, type_code = row
    synonym = DescribeConfigsSynonym(name=name, value=value, source=source)
    result = DescribeConfigsResourceResult(
        name=name,
        value=value,
        read_only=source == _SOURCE_STATIC,
        config_source=source,
        synonyms=[synonym] if with_synonyms else [],
    )
    if call.version >= _TYPES_FROM:
        result.config_type = type_code
        result.documentation = None
    return result
