"""`Broker`: core, storage and waiting fetches together, as handlers see them.

All of it belongs to one event loop. A handler decides at once, and answers at once or takes a
`Later` and answers through that; nothing here blocks.
"""

from __future__ import annotations

import secrets
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from epochal.broker.core.entries import Identity
from epochal.broker.core.partitions import Partition
from epochal.broker.core.settings import LIMITS, Settings
from epochal.broker.core.state import BrokerState
from epochal.broker.core.topics import Topic
from epochal.broker.core.transaction_states import State
from epochal.broker.core.transactions import Transaction
from epochal.broker.fetch_waiters import FetchWaiters
from epochal.broker.sasl import Login
from epochal.broker.storage.store import Store
from epochal.errors import CorruptRecord
from epochal.kafka.codes import Code
from epochal.kafka.primitives import Message

FEATURE = "transaction.version"
FEATURE_MAX = 2
_CLIENT_ID_CHARS = 1_000
"""Of a client's name in the id of a member, which has to fit into every version of an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    host: str
    port: int


class Node(NamedTuple):
    node_id: int
    host: str
    port: int


class AuthorizedOperations:
    """What a client may do: everything that Kafka's authorizers know of, as nobody is refused."""

    TOPIC = 0b1101_1111_1000
    GROUP = 0b1101_0100_1000
    CLUSTER = 0b1_1111_1010_0000


T = TypeVar("T")


class Aside(Protocol):
    def __call__(self, work: Callable[[], T], then: Callable[[T], None]) -> None: ...


class Later(Protocol):
    """An answer that is given later, by the holder of this object."""

    is_over: bool
    """Answered, or the client has disconnected."""

    def answer(self, message: Message) -> None: ...

    def drop(self) -> None:
        """There is no answer: the client's next request is handled."""

    def after(self, delay_ms: int, then: Callable[[], None], gone: Callable[[], None]) -> None:
        """Call `then` after this time without an answer; `gone` if the client disconnects."""


@dataclass(slots=True)
class Call:
    """A request, as a handler gets it."""

    broker: Broker
    version: int
    client_id: str
    client_host: str
    address: Address
    """Where this client reaches the broker: the address in metadata answers."""
    login: Login | None
    later: Callable[[], Later]
    """For a handler that answers later, and returns None now."""

    @property
    def leader(self) -> Node:
        """Who leads and coordinates everything: this broker, or the active one of its cluster."""
        here = Node(self.broker.settings.node_id, self.address.host, self.address.port)
        return self.broker.leader or here

    @property
    def nodes(self) -> Sequence[Node]:
        """All brokers that a client may connect to, the leader included."""
        leader = self.leader
        return [leader, *(one for one in self.broker.members if one.node_id != leader.node_id)]


class Broker:
    def __init__(
        self, settings: Settings, store: Store, now_ms: int, *, is_member: bool = False
    ) -> None:
        """`is_member`: of a cluster, in which it decides nothing before it leads."""
        self.settings = settings
        self.store = store
        self.fetch_waiters = FetchWaiters()
        self.now_ms = now_ms
        """The time of this tick."""
        self.report: Callable[[str], None] = _unheard
        """Writes a line for the operator."""
        self.aside: Aside = _at_once
        """Do something slow that needs no state of the broker, and go on with the result in a
        later tick."""
        self.limits_reached: Counter[str] = Counter(dict.fromkeys(LIMITS, 0))
        self.damaged_batches = 0
        self._reported: set[str] = set()
        self.state = BrokerState(settings, store.emit, self.fetch_waiters.grown)
        self.is_leading = not is_member
        self.may_clean_up = True
        """False for the active of a cluster whose clock is wrong."""
        self.leader: Node | None = None
        self.members: Sequence[Node] = ()
        store.recover(self.state)
        if not is_member:
            self._recover()

    def lead(self, *, is_clock_right: bool) -> None:
        """The claim of this member is won: what it decides from here on goes to slots."""
        state = self.state
        self.is_leading = True
        self.may_clean_up = is_clock_right
        if not state.cluster_id:
            identity = Identity(secrets.token_urlsafe(16), state.topics.next_partition)
            state.apply(identity)
            self.store.emit(identity)
        state.begin_reign(self.now_ms)

    def _recover(self) -> None:
        store, state = self.store, self.state
        if store.position is not None:
            # A member's folder, run alone: what it writes from here on is in no shared journal.
            store.position = None
            store.roll(state.known())
        if not state.cluster_id:
            cluster_id = secrets.token_urlsafe(16)
            state.apply(Identity(cluster_id, state.topics.next_partition))
            store.roll(state.known())
        state.recovered(self.now_ms)
        # Transactions prepared before a crash are completed before clients may connect.
        while state.finish(self.now_ms):
            store.commit()
        store.commit()
        if store.is_synced:
            store.sync()

    @property
    def is_newer_protocol(self) -> bool:
        return self.settings.transaction_version >= FEATURE_MAX

    def topic(self, name: str, *, may_create: bool) -> Topic | None:
        """The topic, created now if that is wanted and allowed. Raises `Refused`."""
        found = self.state.topics.by_name.get(name)
        if found is None and may_create and self.settings.topics_auto_created:
            partitions = self.settings.partitions_default
            self.state.topics.check_new(name, partitions, {})
            found = self.state.topics.make(name, uuid.uuid4().bytes, partitions, {})
        return found

    def partition(self, topic: str, index: int) -> Partition | None:
        return self.state.topics.partition(topic, index)

    def member_id(self, client_id: str) -> str:
        return f"{client_id[:_CLIENT_ID_CHARS]}-{uuid.uuid4()}"

    def open_transactions(self) -> list[Transaction]:
        ids = self.state.transactions.ids.values()
        return [txn for txn in ids if txn.state is State.ONGOING]

    def limit_reached(self, limit: str) -> None:
        self.limits_reached[limit] += 1

    def report_damage(self, error: CorruptRecord) -> Code:
        """Report a batch that failed its checksum, once; returns the answer for its reader."""
        self.damaged_batches += 1
        text = str(error)
        if text not in self._reported:
            self._reported.add(text)
            self.report(text)
        return Code.CORRUPT_MESSAGE

    # Retention and expiry

    def clean_up(self) -> None:
        """From time to time: retention, and expiry of unused ids and groups."""
        self.state.forget_idle(self.now_ms)
        for topic in list(self.state.topics.by_name.values()):
            keep_ms = topic.number("retention.ms", self.settings)
            keep_bytes = topic.number("retention.bytes", self.settings)
            if "delete" not in topic.configs.get("cleanup.policy", "delete"):
                continue
            for partition in topic.partitions:
                start = self._retained_from(partition, keep_ms, keep_bytes)
                if start > partition.log_start:
                    self.state.move_log_start(partition, start)

    def _retained_from(self, partition: Partition, keep_ms: int, keep_bytes: int) -> int:
        """The offset at which the log may begin: behind a segment, or a batch in memory."""
        log = self.store.logs[partition.number]
        start = partition.log_start
        size = log.size
        stable_end = partition.stable_end
        for segment in log.segments:
            is_last = segment is log.segments[-1]
            is_old = self._is_old(segment.timestamp_max_ms, keep_ms)
            is_surplus = keep_bytes >= 0 and size - segment.size >= keep_bytes and not is_last
            if not (is_old or is_surplus) or segment.end_offset > stable_end:
                return start
            start = segment.end_offset
            size -= segment.size
        for end_offset, batch_ms, _ in log.in_memory():
            if not self._is_old(batch_ms, keep_ms) or end_offset > stable_end:
                break
            start = end_offset
        return start

    def _is_old(self, timestamp_ms: int, keep_ms: int) -> bool:
        """What has no time (-1) has no age."""
        return keep_ms >= 0 and 0 <= timestamp_ms < self.now_ms - keep_ms


def _at_once(work: Callable[[], T], then: Callable[[T], None]) -> None:
    then(work())


def _unheard(_: str) -> None:
    """Until there is a loop that logs."""
