"""What readers of a topic see of one sink, counted from its batches.

A batch names the producer that wrote it, and how a transaction ended stands behind it as a marker.
Brokers remember for a week which transactional id a producer belongs to: as long as they do, our
records are told from those of others; later they are counted together, and that is said. Records
that an open transaction of somebody holds back are counted: they are committed, and readers see
them once it ends.

There is nothing to compare where a partition no longer holds all that was ever written to it:
retention cuts its beginning off, compaction leaves gaps.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from epochal.contract import Recount
from epochal.errors import TryAgain
from epochal.kafka import batch_reader, faults
from epochal.kafka.batch_reader import Batch
from epochal.kafka.batches import Marker
from epochal.kafka.client import Client
from epochal.kafka.cluster import Leader
from epochal.kafka.codes import Code
from epochal.sinks.kafka.every_broker import producers
from epochal.sinks.kafka.fetching import fetch
from epochal.sinks.kafka.names import Names

_EMPTY_FETCHES_MAX = 100


class _NotWhole(Exception):
    """A partition that no longer holds all that was written to it."""


@dataclass(slots=True)
class _Partition:
    """One partition, being read from its first record on."""

    at: Leader
    offset: int = 0
    committed: Counter[int] = field(default_factory=Counter)
    """Records by producer."""
    is_held_back: bool = False
    _open: Counter[int] = field(default_factory=Counter)

    @property
    def _name(self) -> str:
        return f"{self.at.topic}-{self.at.partition}"

    def read(self, client: Client) -> None:
        end, empty = None, 0
        while end is None or self.offset < end:
            part = fetch(client, self.at, self.offset)
            if part.error_code == Code.OFFSET_OUT_OF_RANGE:
                raise _NotWhole(f"retention took the first records of {self._name} away")
            faults.check(part.error_code, f"reading {self._name}")
            end = part.high_watermark if end is None else end
            self.is_held_back = 0 <= part.last_stable_offset < part.high_watermark
            before = self.offset
            for batch in batch_reader.read(part.records or b""):
                self._take(batch)
            empty = empty + 1 if self.offset == before else 0
            if empty > _EMPTY_FETCHES_MAX:
                raise TryAgain(f"{self._name} gives nothing at {self.offset}, and ends at {end}")

    def _take(self, batch: Batch) -> None:
        if batch.base_offset != self.offset or batch.count != batch.last_offset_delta + 1:
            raise _NotWhole(f"compaction took records of {self._name} away, at {self.offset}")
        self.offset = batch.last_offset + 1
        marker = batch.marker()
        if marker is not None:
            ended = self._open.pop(batch.producer_id, 0)
            self.committed[batch.producer_id] += ended if marker is Marker.COMMIT else 0
        elif batch.is_transactional and not batch.is_control:
            self._open[batch.producer_id] += batch.count


def recount(client: Client, topic: str, names: Names) -> Recount:
    owners = producers(client)
    count = client.await_topic(topic).partition_count
    partitions = [_Partition(Leader(topic, index)) for index in range(count)]
    try:
        for partition in partitions:
            partition.read(client)
    except _NotWhole as reason:
        return Recount(rows=None, because=f"{reason}: what is left can't be compared")
    committed: Counter[int] = Counter()
    for partition in partitions:
        committed.update(partition.committed)
    ours = sum(rows for who, rows in committed.items() if names.has(owners.get(who, "")))
    nobodys = sum(rows for who, rows in committed.items() if who not in owners)
    held_back = sum(partition.is_held_back for partition in partitions)
    return Recount(
        rows=ours + nobodys,
        because=_told(topic, nobodys=nobodys, held_back=held_back),
        is_alone=not nobodys,
    )


def _told(topic: str, *, nobodys: int, held_back: int) -> str:
    told = f"committed records of {topic} under this sink's transactional ids"
    if nobodys:
        told += (
            f", and {nobodys} of ids that the brokers no longer know or don't show, whose they may "
            "be"
        )
    if held_back:
        told += f"; an open transaction holds readers of {held_back} partitions back"
    return told
