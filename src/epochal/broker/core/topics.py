"""Names, partitions and their configuration.

A partition has a number of its own for life, and that number is what the journal, the transactions
and the folders on disk go by: a topic's name never becomes part of a path, and a topic that is
deleted and made again shares nothing with the first one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from epochal.broker.core.configs import TOPIC_CONFIGS, first_fault
from epochal.broker.core.entries import Entry, TopicChanged, TopicDeleted
from epochal.broker.core.partitions import Partition
from epochal.broker.core.settings import Settings
from epochal.kafka.codes import Code

_LEGAL = re.compile(r"[a-zA-Z0-9._-]{1,249}")


@dataclass(slots=True, eq=False)
class Topic:
    name: str
    topic_id: bytes
    partitions: list[Partition]
    configs: dict[str, str] = field(default_factory=dict)
    """Settings that differ from the default."""
    message_bytes_max: int = 0
    is_log_append_time: bool = False
    is_compacted: bool = False
    timestamp_ahead_max_ms: int = 0

    def number(self, name: str, settings: Settings) -> int:
        return int(self.configs.get(name) or TOPIC_CONFIGS[name].default(settings))


class Refused(Exception):
    """A change to a topic that is not made, with the protocol's code."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class Topics:
    def __init__(self, settings: Settings, emit: Callable[[Entry], None]) -> None:
        self.by_name: dict[str, Topic] = {}
        self.by_id: dict[bytes, Topic] = {}
        self.partitions: dict[int, Partition] = {}
        """By their numbers."""
        self.next_partition = 1
        self.version = 0
        """Raised with every change: whether something derived from the topics is still right."""
        self._settings = settings
        self._emit = emit

    def partition(self, topic: str, index: int) -> Partition | None:
        found = self.by_name.get(topic)
        if found is None or not 0 <= index < len(found.partitions):
            return None
        return found.partitions[index]

    def check_new(self, name: str, partitions: int, configs: Mapping[str, str | None]) -> None:
        """Raises `Refused` where `make` would not be right."""
        if not _LEGAL.fullmatch(name) or name in (".", ".."):
            raise Refused(Code.INVALID_TOPIC_EXCEPTION, f"{name[:300]!r} is no name for a topic")
        if name in self.by_name:
            raise Refused(Code.TOPIC_ALREADY_EXISTS, f"Topic '{name}' already exists.")
        if partitions < 1:
            raise Refused(Code.INVALID_PARTITIONS, "Number of partitions must be larger than 0.")
        if len(self.by_name) >= self._settings.topics_max:
            limit = self._settings.topics_max
            raise Refused(Code.POLICY_VIOLATION, f"this broker holds {limit} topics at most")
        self._check_room(partitions)
        check_configs(configs)

    def make(
        self, name: str, topic_id: bytes, partitions: int, configs: Mapping[str, str]
    ) -> Topic:
        numbers = self._numbers(partitions)
        entry = TopicChanged(name, topic_id.hex(), numbers, dict(configs))
        self.apply_changed(entry)
        self._emit(entry)
        return self.by_name[name]

    def check_growth(self, topic: Topic, count: int) -> None:
        """Raises `Refused` where `grow` would not be right."""
        added = count - len(topic.partitions)
        if added <= 0:
            raise Refused(
                Code.INVALID_PARTITIONS,
                f"The topic {topic.name} currently has {len(topic.partitions)} partition(s); "
                f"{count} would not be an increase.",
            )
        self._check_room(added)

    def grow(self, topic: Topic, count: int) -> None:
        numbers = [partition.number for partition in topic.partitions]
        self._change(topic, numbers + self._numbers(count - len(numbers)), topic.configs)

    def configure(self, topic: Topic, configs: dict[str, str]) -> None:
        numbers = [partition.number for partition in topic.partitions]
        self._change(topic, numbers, configs)

    def delete(self, topic: Topic) -> None:
        entry = TopicDeleted(topic.name)
        self.apply_deleted(entry)
        self._emit(entry)

    def _change(self, topic: Topic, numbers: list[int], configs: dict[str, str]) -> None:
        entry = TopicChanged(topic.name, topic.topic_id.hex(), numbers, configs)
        self.apply_changed(entry)
        self._emit(entry)

    def _check_room(self, partitions: int) -> None:
        limit = self._settings.partitions_max
        if len(self.partitions) + partitions > limit:
            raise Refused(Code.POLICY_VIOLATION, f"this broker holds {limit} partitions at most")

    def _numbers(self, count: int) -> list[int]:
        first = self.next_partition
        return list(range(first, first + count))

    # Entries

    def apply_changed(self, entry: TopicChanged) -> None:
        self.version += 1
        topic = self.by_name.get(entry.name)
        if topic is None:
            topic = Topic(entry.name, bytes.fromhex(entry.topic_id), [])
            self.by_name[entry.name] = topic
            self.by_id[topic.topic_id] = topic
        for index in range(len(topic.partitions), len(entry.partitions)):
            number = entry.partitions[index]
            partition = Partition(number, entry.name, index)
            topic.partitions.append(partition)
            self.partitions[number] = partition
            self.next_partition = max(self.next_partition, number + 1)
        topic.configs = dict(entry.configs)
        topic.message_bytes_max = topic.number("max.message.bytes", self._settings)
        ahead = topic.number("message.timestamp.after.max.ms", self._settings)
        topic.timestamp_ahead_max_ms = ahead
        topic.is_log_append_time = topic.configs.get("message.timestamp.type") == "LogAppendTime"
        topic.is_compacted = "compact" in topic.configs.get("cleanup.policy", "")

    def apply_deleted(self, entry: TopicDeleted) -> None:
        self.version += 1
        topic = self.by_name.pop(entry.name, None)
        if topic is None:
            return
        del self.by_id[topic.topic_id]
        for partition in topic.partitions:
            self.partitions.pop(partition.number, None)

    def known(self) -> Iterator[Entry]:
        for topic in self.by_name.values():
            numbers = [partition.number for partition in topic.partitions]
            yield TopicChanged(topic.name, topic.topic_id.hex(), numbers, topic.configs)


def check_configs(configs: Mapping[str, str | None]) -> None:
    fault = first_fault("topic", TOPIC_CONFIGS, configs)
    if fault:
        raise Refused(Code.INVALID_CONFIG, fault)
