"""`Cluster`: a frozen view of brokers, topics and leaders; and the targets of requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeAlias

from epochal.errors import Misconfigured
from epochal.kafka.messages.metadata import MetadataResponse, MetadataResponseTopic
from epochal.kafka.primitives import NO_UUID, Uuid

NO_NODE = -1


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Address:
        # Java's clients take a listener's name in front, as in PLAINTEXT://host:9092.
        host, colon, port = text.strip().rpartition("://")[2].rpartition(":")
        if not colon or not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise Misconfigured(
                f"{text.strip()!r} is not the address of a broker", hint="write host:port"
            )
        return cls(host.removeprefix("[").removesuffix("]"), int(port))


class CoordinatorKind(IntEnum):
    GROUP = 0
    TRANSACTION = 1


@dataclass(frozen=True, slots=True)
class AnyBroker:
    """Any broker that can be reached."""

    def __str__(self) -> str:
        return "any broker"


@dataclass(frozen=True, slots=True)
class Controller:
    """The broker that creates and deletes topics."""

    def __str__(self) -> str:
        return "the controller"


@dataclass(frozen=True, slots=True)
class Node:
    """One broker, by its id."""

    node_id: int

    def __str__(self) -> str:
        return f"broker {self.node_id}"


@dataclass(frozen=True, slots=True)
class Leader:
    """The broker that leads a partition."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"the leader of {self.topic}-{self.partition}"


@dataclass(frozen=True, slots=True)
class Coordinator:
    """The broker that coordinates a transactional id or a consumer group."""

    key: str
    kind: CoordinatorKind = CoordinatorKind.TRANSACTION

    def __str__(self) -> str:
        return f"the {self.kind.name.lower()} coordinator of {self.key}"


Target: TypeAlias = AnyBroker | Controller | Node | Leader | Coordinator


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    name: str
    topic_id: Uuid = NO_UUID
    error_code: int = 0
    leaders: Mapping[int, int] = field(default_factory=dict)
    """Partition → node id; NO_NODE where an election is under way."""

    @property
    def partition_count(self) -> int:
        return len(self.leaders)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    cluster_id: str | None = None
    controller_id: int = NO_NODE
    addresses: Mapping[int, Address] = field(default_factory=dict)
    topics: Mapping[str, Topic] = field(default_factory=dict)

    def updated(self, answer: MetadataResponse) -> Cluster:
        """The view after an answer, which names all brokers and the topics that were asked for."""
        fresh = {t.name: _topic(t.name, t) for t in answer.topics if t.name is not None}
        return Cluster(
            cluster_id=answer.cluster_id,
            controller_id=answer.controller_id,
            addresses={b.node_id: Address(b.host, b.port) for b in answer.brokers},
            topics={**self.topics, **fresh},
        )

    def without(self, topic: str) -> Cluster:
        kept = {name: known for name, known in self.topics.items() if name != topic}
        return Cluster(
            cluster_id=self.cluster_id,
            controller_id=self.controller_id,
            addresses=self.addresses,
            topics=kept,
        )


def _topic(name: str, answer: MetadataResponseTopic) -> Topic:
    return Topic(
        name=name,
        topic_id=answer.topic_id,
        error_code=answer.error_code,
        leaders={p.partition_index: p.leader_id for p in answer.partitions},
    )
