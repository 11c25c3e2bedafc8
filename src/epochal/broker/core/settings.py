"""`Settings`: limits and defaults of a broker, with the names that Apache Kafka has for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_SECOND_MS = 1_000
_MINUTE_MS = 60 * _SECOND_MS
_HOUR_MS = 60 * _MINUTE_MS
_DAY_MS = 24 * _HOUR_MS


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    node_id: int = 1
    # Transactions
    transaction_version: int = 2
    """The finalized feature `transaction.version`: 2 is the newer protocol, 1 and 0 the older."""
    transaction_timeout_max_ms: int = 15 * _MINUTE_MS  # transaction.max.timeout.ms
    transactional_id_expiry_ms: int = 7 * _DAY_MS  # transactional.id.expiration.ms
    producer_expiry_ms: int = _DAY_MS  # producer.id.expiration.ms
    producer_id_block: int = 1_000
    markers_per_tick_max: int = 1_000
    """A transaction over more partitions is completed over several ticks of the loop."""
    # Topics
    topics_auto_created: bool = True  # auto.create.topics.enable
    partitions_default: int = 1  # num.partitions
    topics_max: int = 10_000
    partitions_max: int = 50_000
    # Records
    message_bytes_max: int = 1_048_588  # message.max.bytes
    timestamp_ahead_max_ms: int = _HOUR_MS  # message.timestamp.after.max.ms
    retention_ms: int = 7 * _DAY_MS  # log.retention.ms
    retention_bytes: int = -1  # log.retention.bytes
    segment_bytes: int = 1 << 30  # log.segment.bytes
    segment_ms: int = 7 * _DAY_MS  # log.roll.ms
    # Groups
    group_initial_delay_ms: int = 0  # group.initial.rebalance.delay.ms, 3 s in Kafka
    group_members_max: int = 10_000  # group.max.size
    session_timeout_min_ms: int = 6 * _SECOND_MS  # group.min.session.timeout.ms
    session_timeout_max_ms: int = 30 * _MINUTE_MS  # group.max.session.timeout.ms
    consumer_heartbeat_ms: int = 5 * _SECOND_MS  # group.consumer.heartbeat.interval.ms
    consumer_heartbeat_min_ms: int = 5 * _SECOND_MS  # group.consumer.min.heartbeat.interval.ms
    consumer_heartbeat_max_ms: int = 15 * _SECOND_MS  # group.consumer.max.heartbeat.interval.ms
    consumer_session_ms: int = 45 * _SECOND_MS  # group.consumer.session.timeout.ms
    consumer_session_min_ms: int = 45 * _SECOND_MS  # group.consumer.min.session.timeout.ms
    consumer_session_max_ms: int = _MINUTE_MS  # group.consumer.max.session.timeout.ms
    offsets_retention_ms: int = 7 * _DAY_MS  # offsets.retention.minutes
    offset_metadata_bytes_max: int = 4_096  # offset.metadata.max.bytes
    # The wire: see LIMITS
    connections_max: int = 2_000  # max.connections
    connections_per_address_max: int = 1_000  # max.connections.per.ip
    connections_before_login_max: int = 200
    connection_idle_max_ms: int = 10 * _MINUTE_MS  # connections.max.idle.ms
    descriptors_reserved: int = 400
    handshakes_max: int = 100
    handshake_within_ms: int = 10 * _SECOND_MS
    login_within_ms: int = 30 * _SECOND_MS
    login_failure_delay_ms: int = 500  # connection.failed.authentication.delay.ms
    frame_bytes_max: int = 100 << 20  # socket.request.max.bytes
    frame_before_login_bytes_max: int = 512 << 10  # sasl.server.max.receive.size
    frame_within_ms: int = _MINUTE_MS
    frames_bytes_max: int = 256 << 20  # queued.max.request.bytes
    request_bytes_max: int = 8 << 20
    request_elements_max: int = 50_000
    unpacked_bytes_max: int = 32 << 20
    fetch_bytes_max: int = 55 << 20  # fetch.max.bytes


LIMITS: Mapping[str, str] = {
    "connections_max": "connections; a new one is closed",
    "connections_per_address_max": "connections of one address; a new one is closed",
    "connections_before_login_max": "connections that have not logged in; the oldest is closed",
    "connection_idle_max_ms": "silence without a request under way; the connection is closed",
    "descriptors_reserved": "file descriptors kept for the disk: the soft limit of the process is "
    "raised to the hard one at the start; a new connection is closed where no more are left",
    "handshakes_max": "TLS handshakes under way; a new connection is closed",
    "handshake_within_ms": "a TLS handshake; the connection is closed",
    "login_within_ms": "from connecting to the end of SASL; the connection is closed",
    "login_failure_delay_ms": "before a failed login is answered, and its connection closed",
    "frame_bytes_max": "a request; the connection is closed",
    "frame_before_login_bytes_max": "a request before login; the connection is closed",
    "frame_within_ms": "from the first byte of a request to its last; the connection is closed",
    "frames_bytes_max": "requests of all clients that are not handled yet (16 KB of each are not "
    "counted); the connection that holds most of it is closed",
    "request_bytes_max": "a request other than Produce; the connection is closed",
    "request_elements_max": "elements in all arrays of a request; the connection is closed",
    "unpacked_bytes_max": "what a compressed batch may unpack to where the broker opens it; the "
    "request is refused",
}
"""
What a client that can connect may use: settings by name, what each bounds, and what happens then.

Each time one is reached is counted in `epochal_broker_limit_reached_total{limit="name"}`.
"""
