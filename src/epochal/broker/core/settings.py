"""`Settings`: limits and defaults of a broker, with the names that Apache Kafka has for them."""

from __future__ import annotations

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
    offsets_retention_ms: int = 7 * _DAY_MS  # offsets.retention.minutes
    offset_metadata_bytes_max: int = 4_096  # offset.metadata.max.bytes
    # The wire
    frame_bytes_max: int = 100 << 20  # socket.request.max.bytes
    connections_max: int = 2_000  # max.connections
    connection_idle_max_ms: int = 10 * _MINUTE_MS  # connections.max.idle.ms
    fetch_bytes_max: int = 55 << 20  # fetch.max.bytes
