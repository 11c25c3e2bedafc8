"""The offsets of Kafka sources, read from what Spark's checkpoint says about an epoch."""

from __future__ import annotations

import json

from epochal.sinks.kafka.ending import Offsets as GroupOffsets
from epochal.terms import Offsets


def group_offsets(offsets: Offsets) -> GroupOffsets:
    """Topic → partition → offset of every Kafka source; sources of another kind have none."""
    found: dict[str, dict[int, tuple[int, str]]] = {}
    for line in offsets.sources:
        for topic, partitions in _kafka_source(line).items():
            ends = found.setdefault(topic, {})
            ends |= {partition: (offset, "") for partition, offset in partitions.items()}
    return found


def _kafka_source(line: str) -> dict[str, dict[int, int]]:
    """What Spark's Kafka source writes: {"topic": {"0": 17}}. Anything else is another source."""
    try:
        told = json.loads(line)
        return {
            str(topic): {int(partition): int(end) for partition, end in ends.items()}
            for topic, ends in told.items()
        }
    except (AttributeError, TypeError, ValueError):
        return {}
