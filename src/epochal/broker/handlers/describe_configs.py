"""DescribeConfigs: of topics, groups and this broker."""

from __future__ import annotations

from collections.abc import Mapping

from epochal.broker.broker import Call
from epochal.broker.core.configs import GROUP_CONFIGS, TOPIC_CONFIGS, ConfigKind
from epochal.broker.core.settings import Settings
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
_TOPIC, _BROKER, _GROUP = 2, 4, 32
_SOURCE_TOPIC, _SOURCE_STATIC, _SOURCE_DEFAULT, _SOURCE_GROUP = 1, 4, 5, 8
_BOOLEAN, _STRING, _INT, _LONG = 1, 2, 3, 5
_TYPES_FROM = 3
_DEFAULTS = Settings()


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
        if resource.resource_name not in ("", str(call.broker.settings.node_id)):
            result.error_code = Code.INVALID_REQUEST
            result.error_message = f"this is broker {call.broker.settings.node_id}"
            return result
        found = _broker_rows(call) if resource.resource_name else []
    elif resource.resource_type == _GROUP:
        configs = call.broker.state.groups.configs.by_group.get(resource.resource_name, {})
        found = _rows(call, GROUP_CONFIGS, configs, _SOURCE_GROUP)
    else:
        result.error_code = Code.INVALID_REQUEST
        result.error_message = f"resources of type {resource.resource_type} are not known here"
        return result
    if found is None:
        result.error_code = Code.UNKNOWN_TOPIC_OR_PARTITION
        return result
    wanted = resource.configuration_keys
    result.configs = [
        _row(call, row, resource.resource_type, with_synonyms=request.include_synonyms)
        for row in found
        if wanted is None or not wanted or row[0] in wanted
    ]
    return result


_Row = tuple[str, str, int, int]
"""Name, value, source, type."""


def _topic_rows(call: Call, name: str) -> list[_Row] | None:
    topic = call.broker.state.topics.by_name.get(name)
    return None if topic is None else _rows(call, TOPIC_CONFIGS, topic.configs, _SOURCE_TOPIC)


def _rows(
    call: Call, kinds: Mapping[str, ConfigKind], configs: Mapping[str, str], source: int
) -> list[_Row]:
    found = []
    for key, kind in kinds.items():
        default = kind.default(call.broker.settings)
        is_default = default == kind.default(_DEFAULTS)
        otherwise = _SOURCE_DEFAULT if is_default else _SOURCE_STATIC
        row_source = source if key in configs else otherwise
        found.append((key, configs.get(key, default), row_source, kind.type_code))
    return found


def _broker_rows(call: Call) -> list[_Row]:
    settings = call.broker.settings
    known: dict[str, str | int | bool] = {
        "advertised.listeners": f"PLAINTEXT://{call.address.host}:{call.address.port}",
        "auto.create.topics.enable": settings.topics_auto_created,
        "broker.id": settings.node_id,
        "compression.type": "producer",
        "connections.max.idle.ms": settings.connection_idle_max_ms,
        "default.replication.factor": 1,
        "delete.topic.enable": True,
        "fetch.max.bytes": settings.fetch_bytes_max,
        "group.consumer.heartbeat.interval.ms": settings.consumer_heartbeat_ms,
        "group.consumer.max.heartbeat.interval.ms": settings.consumer_heartbeat_max_ms,
        "group.consumer.max.session.timeout.ms": settings.consumer_session_max_ms,
        "group.consumer.min.heartbeat.interval.ms": settings.consumer_heartbeat_min_ms,
        "group.consumer.min.session.timeout.ms": settings.consumer_session_min_ms,
        "group.consumer.session.timeout.ms": settings.consumer_session_ms,
        "group.initial.rebalance.delay.ms": settings.group_initial_delay_ms,
        "group.max.session.timeout.ms": settings.session_timeout_max_ms,
        "group.max.size": settings.group_members_max,
        "group.min.session.timeout.ms": settings.session_timeout_min_ms,
        "log.cleanup.policy": "delete",
        "log.dirs": call.broker.store.folder,
        "log.retention.bytes": settings.retention_bytes,
        "log.retention.ms": settings.retention_ms,
        "log.roll.ms": settings.segment_ms,
        "log.segment.bytes": settings.segment_bytes,
        "max.connections": settings.connections_max,
        "max.connections.per.ip": settings.connections_per_address_max,
        "message.max.bytes": settings.message_bytes_max,
        "min.insync.replicas": 1,
        "node.id": settings.node_id,
        "num.partitions": settings.partitions_default,
        "offset.metadata.max.bytes": settings.offset_metadata_bytes_max,
        "offsets.retention.minutes": settings.offsets_retention_ms // 60_000,
        "process.roles": "broker,controller",
        "producer.id.expiration.ms": settings.producer_expiry_ms,
        "socket.request.max.bytes": settings.frame_bytes_max,
        "transaction.max.timeout.ms": settings.transaction_timeout_max_ms,
        "transactional.id.expiration.ms": settings.transactional_id_expiry_ms,
    }
    return [_static(name, value) for name, value in known.items()]


def _static(name: str, value: str | int | bool) -> _Row:
    if isinstance(value, bool):
        return name, str(value).lower(), _SOURCE_STATIC, _BOOLEAN
    if isinstance(value, int):
        return name, str(value), _SOURCE_STATIC, _LONG if name.endswith(".ms") else _INT
    return name, value, _SOURCE_STATIC, _STRING


def _row(
    call: Call, row: _Row, resource_type: int, *, with_synonyms: bool
) -> DescribeConfigsResourceResult:
    name, value, source, type_code = row
    synonym = DescribeConfigsSynonym(name=name, value=value, source=source)
    result = DescribeConfigsResourceResult(
        name=name,
        value=value,
        read_only=resource_type == _BROKER,
        config_source=source,
        synonyms=[synonym] if with_synonyms else [],
    )
    if call.version >= _TYPES_FROM:
        result.config_type = type_code
        result.documentation = None
    return result
