"""Every durable change of a broker, as a value.

Applying the entries of a journal in their order to a snapshot's state gives the state of the broker
that emitted them. An entry is the result of a request, never the request: applying one can't fail
and needs no clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, TypeAlias


class Appended(NamedTuple):
    """A batch, its offset assigned, is the newest of a partition. Markers are batches too."""

    partition: int
    batch: bytes


class AppendedElsewhere(NamedTuple):
    """In the shared journal of a cluster: a batch whose bytes are a part of this object."""

    partition: int
    key: str
    at: int
    size: int
    crc: int


class Placed(NamedTuple):
    """The bytes of a partition from `first_offset` up to `end_offset` are in a segment."""

    partition: int
    segment: int
    position: int
    size: int
    first_offset: int
    end_offset: int


class TxnChanged(NamedTuple):
    """Everything about a transactional id except the partitions and groups of its transaction."""

    transactional_id: str
    producer_id: int
    producer_epoch: int
    last_epoch: int
    previous_producer_id: int
    next_producer_id: int
    state: int
    timeout_ms: int
    started_ms: int
    updated_ms: int
    is_v2: bool


class TxnGrew(NamedTuple):
    """Partitions or groups joined a transaction."""

    transactional_id: str
    partitions: tuple[int, ...]
    groups: tuple[str, ...]


class TxnForgotten(NamedTuple):
    transactional_id: str


class ProducerIdsReserved(NamedTuple):
    """Ids below this one may be in use."""

    before: int


class TopicChanged(NamedTuple):
    """A topic is there, with these partitions (by their numbers) and configuration."""

    name: str
    topic_id: str
    partitions: list[int]
    configs: dict[str, str]


class TopicDeleted(NamedTuple):
    name: str


class LogStartMoved(NamedTuple):
    partition: int
    offset: int


class OffsetsCommitted(NamedTuple):
    """Rows of topic, partition, offset, leader epoch, metadata, time of commit."""

    group: str
    rows: list[OffsetRow]


class OffsetsPending(NamedTuple):
    """The same, waiting for the end of a producer's transaction."""

    group: str
    producer_id: int
    rows: list[OffsetRow]


class OffsetsDecided(NamedTuple):
    group: str
    producer_id: int
    is_commit: bool


class OffsetsForgotten(NamedTuple):
    group: str
    places: list[tuple[str, int]]


class GroupChanged(NamedTuple):
    """A group between two rebalances."""

    group: str
    generation: int
    protocol_type: str | None
    protocol: str | None
    leader: str | None
    members: list[MemberRow]
    changed_ms: int


class GroupForgotten(NamedTuple):
    group: str


class GroupConfigured(NamedTuple):
    """All settings of a group that differ from the default."""

    group: str
    configs: dict[str, str]


class ConsumerGroupChanged(NamedTuple):
    """A group of the newer consumer protocol, without its members."""

    group: str
    epoch: int
    """Raised when members, subscriptions or topics change."""
    assignment_epoch: int
    """The epoch for which partitions were last distributed."""
    topics_hash: str
    """Of the topics that members subscribe to, with their ids and numbers of partitions."""
    changed_ms: int


class ConsumerMember(NamedTuple):
    """A member of such a group is there, and this is all about it."""

    group: str
    member_id: str
    instance_id: str | None = None
    rack_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    rebalance_timeout_ms: int = -1
    topics: tuple[str, ...] = ()
    pattern: str = ""
    """It also reads the topics whose whole names match this."""
    assignor: str | None = None
    session_timeout_ms: int = -1
    """Of a member that uses the classic protocol; -1: it does not."""
    protocols: tuple[tuple[str, bytes], ...] = ()
    """Of a member that uses the classic protocol."""
    epoch: int = 0
    previous_epoch: int = 0
    state: int = 0
    """`consumer_groups.Reconciliation`"""
    assigned: Mapping[tuple[str, int], int] = MappingProxyType({})
    """Partitions, and the member's epoch since which it has had each."""
    revoking: Places = frozenset()
    """It was asked to give these up, and has not confirmed that yet."""
    target: Places = frozenset()


class ConsumerMemberGone(NamedTuple):
    group: str
    member_id: str


class PartitionKnown(NamedTuple):
    """A partition in a snapshot: its state after all its batches up to here."""

    partition: int
    log_start: int
    end: int
    producers: list[ProducerRow]
    aborted: list[tuple[int, int, int, int]]


class SegmentKnown(NamedTuple):
    """A segment in a snapshot."""

    partition: int
    base_offset: int
    end_offset: int
    size: int
    timestamp_max_ms: int


class Identity(NamedTuple):
    """Made once, when the data folder is."""

    cluster_id: str
    next_partition: int


class ProducersForgotten(NamedTuple):
    """Producers that have not written to a partition for long are no longer known there."""

    partition: int
    producers: list[int]


class SlotTaken(NamedTuple):
    """Of a member of a cluster: everything up to this slot of the shared journal is in here."""

    number: int
    crc: int
    generation: int
    nonce: str
    holder: str
    claims: list[int]


class SlotFilled(NamedTuple):
    """As `SlotTaken`, after another slot of the same generation: the rest is as it was."""

    number: int
    crc: int


OffsetRow: TypeAlias = tuple[str, int, int, int, str, int]
ProducerRow: TypeAlias = tuple[int, int, int, int, int, list[tuple[int, int, int]]]
"""Producer id, epoch, last time stamp, coordinator epoch, first offset of the open transaction or
-1, and the newest batches as (first sequence, last sequence, offset of the first)."""
MemberRow: TypeAlias = tuple[str, str | None, str, str, int, int, list[tuple[str, bytes]], bytes]
"""Member id, instance id, client id, host, two timeouts, protocols, assignment."""

Places: TypeAlias = frozenset[tuple[str, int]]
"""Partitions: the id of the topic, in hex, and the partition's index."""

Entry: TypeAlias = (
    Appended
    | AppendedElsewhere
    | Placed
    | TxnChanged
    | TxnGrew
    | TxnForgotten
    | ProducerIdsReserved
    | TopicChanged
    | TopicDeleted
    | LogStartMoved
    | OffsetsCommitted
    | OffsetsPending
    | OffsetsDecided
    | OffsetsForgotten
    | GroupChanged
    | GroupForgotten
    | GroupConfigured
    | ConsumerGroupChanged
    | ConsumerMember
    | ConsumerMemberGone
    | PartitionKnown
    | SegmentKnown
    | Identity
    | ProducersForgotten
    | SlotTaken
    | SlotFilled
)
