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
_TOPIC, _BROKER, _GROUP = 2, 4, 32
_SOURCE_TOPIC, _SOURCE_STATIC, _SOURCE_DEFAULT = 1, 4, 5
_BOOLEAN, _STRING, _INT, _LONG = 1, 2, 3, 5
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
        if resource.resource_name not in ("", str(call.broker.settings.node_id)):
            result.error_code = Code.INVALID_REQUEST
            result.error_message = f"this is broker {call.broker.settings.node_id}"
            return result
        found = _broker_rows(call) if resource.resource_name else []
    elif resource.resource_type == _GROUP:
        found = _group_rows(call)
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


def _group_rows(call: Call) -> list[_Row]:
    settings = call.broker.settings
    known = {
        "consumer.heartbeat.interval.ms": settings.consumer_heartbeat_ms,
        "consumer.session.timeout.ms": settings.consumer_session_ms,
    }
    return [(name, str(value), _SOURCE_DEFAULT, _INT) for name, value in known.items()]


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
