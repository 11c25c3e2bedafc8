"""Settings of topics and of groups that clients may change, by the names of Apache Kafka."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from epochal.broker.core.entries import Entry, GroupConfigured
from epochal.broker.core.settings import Settings

_LONG_MAX = (1 << 63) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigKind:
    """One setting: its default, its type in DescribeConfigs, and its check."""

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
TOPIC_CONFIGS: Mapping[str, ConfigKind] = {
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
_SESSION, _HEARTBEAT = "consumer.session.timeout.ms", "consumer.heartbeat.interval.ms"
GROUP_CONFIGS: Mapping[str, ConfigKind] = {
    _HEARTBEAT: _number(lambda s: s.consumer_heartbeat_ms, 1, _INT, _INT_MAX),
    _SESSION: _number(lambda s: s.consumer_session_ms, 1, _INT, _INT_MAX),
}
"""Of groups of the newer consumer protocol."""


def first_fault(
    what: str, kinds: Mapping[str, ConfigKind], configs: Mapping[str, str | None]
) -> str:
    """What is wrong with settings; empty: nothing."""
    for name, value in configs.items():
        kind = kinds.get(name)
        if kind is None:
            return f"Unknown {what} config name: {name}"
        if value is None or not kind.is_valid(value):
            return f"Invalid value {value} for configuration {name}"
    return ""


class GroupConfigs:
    """Settings of single groups. They are there before the group is, and after it."""

    def __init__(self, settings: Settings, emit: Callable[[Entry], None]) -> None:
        self.by_group: dict[str, dict[str, str]] = {}
        """Settings that differ from the default."""
        self._settings = settings
        self._emit = emit

    def heartbeat_ms(self, group: str) -> int:
        return self._number(group, _HEARTBEAT)

    def session_ms(self, group: str) -> int:
        return self._number(group, _SESSION)

    def _number(self, group: str, name: str) -> int:
        found = self.by_group.get(group, {}).get(name)
        return int(found or GROUP_CONFIGS[name].default(self._settings))

    def fault(self, configs: Mapping[str, str | None]) -> str:
        """What is wrong with all settings of a group; empty: nothing."""
        found = first_fault("group", GROUP_CONFIGS, configs)
        if found:
            return found
        settings = self._settings
        bounds = {
            _HEARTBEAT: (settings.consumer_heartbeat_min_ms, settings.consumer_heartbeat_max_ms),
            _SESSION: (settings.consumer_session_min_ms, settings.consumer_session_max_ms),
        }
        for name, value in configs.items():
            low, high = bounds[name]
            if not low <= int(value or 0) <= high:
                return f"{name} must be from {low} to {high}"
        return ""

    def configure(self, group: str, configs: Mapping[str, str]) -> None:
        """Replace all settings of a group by these, which were found faultless."""
        entry = GroupConfigured(group, dict(configs))
        self.apply(entry)
        self._emit(entry)

    def apply(self, entry: GroupConfigured) -> None:
        if entry.configs:
            self.by_group[entry.group] = dict(entry.configs)
        else:
            self.by_group.pop(entry.group, None)

    def known(self) -> Iterator[Entry]:
        for group, configs in self.by_group.items():
            yield GroupConfigured(group, configs)
