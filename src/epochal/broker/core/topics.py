"""Names, partitions and their configuration.

A partition has a number of its own for life, and that number is what the journal, the transactions
and the folders on disk go by: a topic's name never becomes part of a path, and a topic that is
deleted and made again shares nothing with the first one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from epochal.broker.core.entries import Entry, TopicChanged, TopicDeleted
from epochal.broker.core.partitions import Partition
from epochal.broker.core.settings import Settings
from epochal.kafka.codes import Code

_LEGAL = re.compile(r"[a-zA-Z0-9._-]{1,249}")
_LONG_MAX = (1 << 63) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigKind:
    """One setting of a topic: its default, its type in DescribeConfigs, and its check."""

    default: Callable[[Settings], str]
    type_code: int
    is_valid: Callable[[str], bool]


_BOOLEAN, _STRING, _INT, _LONG, _DOUBLE, _LIST = 1, 2, 3, 5, 6, 7


def _is_number(low: int, high: int = _LONG_MAX) -> Callable[[str], bool]:
    def check(text: str) -> bool:
        try:
            return low <= int(text) <= high
        except ValueError:
            return False

    return check


def _is_one_of(*words: str) -> Callable[[str], bool]:
    return lambda text: all(part.strip() in words for part in text.split(","))


def _number(
    default: Callable[[Settings], int], low: int, type_code: int = _LONG, high: int = _LONG_MAX
) -> ConfigKind:
    return ConfigKind(
        default=lambda settings: str(default(settings)),
        type_code=type_code,
        is_valid=_is_number(low, high),
    )


def _word(default: str, *words: str, type_code: int = _STRING) -> ConfigKind:
    return ConfigKind(default=lambda _: default, type_code=type_code, is_valid=_is_one_of(*words))


def _is_ratio(text: str) -> bool:
    try:
        return 0.0 <= float(text) <= 1.0
    except ValueError:
        return False


_INT_MAX = (1 << 31) - 1
CONFIGS: Mapping[str, ConfigKind] = {
    "cleanup.policy": _word("delete", "delete", "compact", type_code=_LIST),
    "compression.type": _word(
        "producer", "producer", "uncompressed", "gzip", "snappy", "lz4", "zstd"
    ),
    "delete.retention.ms": _number(lambda _: 86_400_000, 0),
    "file.delete.delay.ms": _number(lambda _: 60_000, 0),
    "flush.messages": _number(lambda _: _LONG_MAX, 1),
    "flush.ms": _number(lambda _: _LONG_MAX, 0),
    "index.interval.bytes": _number(lambda _: 4_096, 0, _INT, _INT_MAX),
    "max.compaction.lag.ms": _number(lambda _: _LONG_MAX, 1),
    "max.message.bytes": _number(lambda s: s.message_bytes_max, 0, _INT, _INT_MAX),
    "message.timestamp.after.max.ms": _number(lambda s: s.timestamp_ahead_max_ms, 0),
    "message.timestamp.before.max.ms": _number(lambda _: _LONG_MAX, 0),
    "message.timestamp.type": _word("CreateTime", "CreateTime", "LogAppendTime"),
    "min.cleanable.dirty.ratio": ConfigKind(
        default=lambda _: "0.5", type_code=_DOUBLE, is_valid=_is_ratio
    ),
    "min.compaction.lag.ms": _number(lambda _: 0, 0),
    "min.insync.replicas": _number(lambda _: 1, 1, _INT, _INT_MAX),
    "preallocate": _word("false", "true", "false", type_code=_BOOLEAN),
    "retention.bytes": _number(lambda s: s.retention_bytes, -1),
    "retention.ms": _number(lambda s: s.retention_ms, -1),
    "segment.bytes": _number(lambda s: s.segment_bytes, 14, _INT, _INT_MAX),
    "segment.index.bytes": _number(lambda _: 10_485_760, 4, _INT, _INT_MAX),
    "segment.jitter.ms": _number(lambda _: 0, 0),
    "segment.ms": _number(lambda s: s.segment_ms, 1),
    "unclean.leader.election.enable": _word("false", "true", "false", type_code=_BOOLEAN),
}


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
        return int(self.configs.get(name) or CONFIGS[name].default(settings))


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
    for name, value in configs.items():
        kind = CONFIGS.get(name)
        if kind is None:
            raise Refused(Code.INVALID_CONFIG, f"Unknown topic config name: {name}")
        if value is None or not kind.is_valid(value):
            raise Refused(Code.INVALID_CONFIG, f"Invalid value {value} for configuration {name}")
