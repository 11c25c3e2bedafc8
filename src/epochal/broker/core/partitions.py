"""One partition: who wrote what under which number, and how far readers may read.

Of every producer id the partition knows the newest epoch and the newest five batches, which is as
many as a client keeps under way. A batch is
    a duplicate    if one of the five has the same epoch and sequences: answered with its offset,
    in sequence    if it begins where the newest ends (numbers start again at zero after 2³¹ - 1),
    the first      of a new epoch if it begins at zero; of an unknown producer wherever it begins,
                   as a producer whose batches have all been deleted goes on where it was. With the
                   newer transaction protocol, whose epochs are of one transaction, at zero too,
    out of order   otherwise. An older epoch is a zombie's.

A transaction is open here from its first batch to its marker. The *last stable offset* is the first
offset of the oldest open transaction that the log still has, or the end: readers of committed
records get no further, so that whatever they do get is decided. Aborted transactions are listed in
their answers as (producer id, first offset): from there on they drop that producer's records up to
its abort marker.

Open transactions are kept in the order of their first offsets, which is the order in which they
were opened, so that the oldest is always the first: no search.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from epochal.broker.core.batch_check import BatchHeader, header_at
from epochal.broker.core.entries import PartitionKnown
from epochal.kafka import batch_format
from epochal.kafka.batch_format import Marker
from epochal.kafka.codes import Code

_BATCHES_KEPT = 5
_SEQUENCE_MASK = (1 << 31) - 1
_NO_EPOCH = -1
_MARKER_TYPE_AT = batch_format.HEADER_BYTES + 7
_MARKER_COORDINATOR_AT = batch_format.HEADER_BYTES + 12


class KnownBatch(NamedTuple):
    first_sequence: int
    last_sequence: int
    offset: int


class ProducerState:
    """The state of a producer id at a partition."""

    __slots__ = (
        "batches",
        "coordinator_epoch",
        "epoch",
        "first_open_offset",
        "heard_ms",
        "last_timestamp_ms",
    )

    def __init__(self, epoch: int = _NO_EPOCH) -> None:
        self.epoch = epoch
        self.batches: list[KnownBatch] = []
        self.first_open_offset = -1
        self.coordinator_epoch = -1
        self.last_timestamp_ms = -1
        self.heard_ms = 0
        """When it last wrote, by the broker's clock: time stamps of records may be years old."""

    @property
    def last_sequence(self) -> int:
        return self.batches[-1].last_sequence if self.batches else -1


class Aborted(NamedTuple):
    last_offset: int
    first_offset: int
    producer_id: int
    stable_offset: int
    """The last stable offset when it was aborted; reads below that don't need it."""


class Verdict(NamedTuple):
    code: Code
    duplicate_of: int = -1
    """The offset at which the same batch was appended before."""


_GOOD = Verdict(Code.NONE)


@dataclass(slots=True, eq=False)
class Partition:
    number: int
    topic: str
    index: int
    log_start: int = 0
    end: int = 0
    producers: dict[int, ProducerState] = field(default_factory=dict)
    open: dict[int, int] = field(default_factory=dict)
    """Producer id → first offset of its open transaction, the oldest first."""
    aborted: list[Aborted] = field(default_factory=list)
    """By last offset."""

    @property
    def stable_end(self) -> int:
        """The last stable offset."""
        for first in self.open.values():
            return max(first, self.log_start)
        return self.end

    def judge(  # noqa: PLR0911  a line for each of the rules
        self, head: BatchHeader, *, is_newer_protocol: bool = False
    ) -> Verdict:
        """Whether the batch may be appended. Changes nothing."""
        if head.producer_id < 0:
            return _GOOD
        known = self.producers.get(head.producer_id)
        if known is None or known.epoch == _NO_EPOCH:
            is_late = is_newer_protocol and head.base_sequence != 0
            return Verdict(Code.OUT_OF_ORDER_SEQUENCE_NUMBER) if is_late else _GOOD
        if head.producer_epoch < known.epoch:
            return Verdict(Code.INVALID_PRODUCER_EPOCH)
        if head.producer_epoch > known.epoch:
            if head.base_sequence != 0:
                return Verdict(Code.OUT_OF_ORDER_SEQUENCE_NUMBER)
            return _GOOD
        first = head.base_sequence
        last = (first + head.last_offset_delta) & _SEQUENCE_MASK
        for batch in known.batches:
            if batch.first_sequence == first and batch.last_sequence == last:
                return Verdict(Code.NONE, batch.offset)
        if known.first_open_offset >= 0 and not head.is_transactional:
            return Verdict(Code.INVALID_TXN_STATE)
        if first != (known.last_sequence + 1) & _SEQUENCE_MASK:
            return Verdict(Code.OUT_OF_ORDER_SEQUENCE_NUMBER)
        return _GOOD

    def append(self, head: BatchHeader, now_ms: int = 0) -> int:
        """Take in a batch that was judged good; returns its offset."""
        offset = self.end
        self.end = offset + head.last_offset_delta + 1
        producer_id = head.producer_id
        if producer_id < 0:
            return offset
        known = self.producers.get(producer_id)
        if known is None:
            known = self.producers[producer_id] = ProducerState(head.producer_epoch)
        if known.epoch != head.producer_epoch:
            known.epoch = head.producer_epoch
            known.batches.clear()
        first = head.base_sequence
        last = (first + head.last_offset_delta) & _SEQUENCE_MASK
        known.batches.append(KnownBatch(first, last, offset))
        if len(known.batches) > _BATCHES_KEPT:
            del known.batches[0]
        known.last_timestamp_ms = head.max_timestamp_ms
        known.heard_ms = now_ms
        if head.is_transactional and known.first_open_offset < 0:
            known.first_open_offset = offset
            self.open[producer_id] = offset
        return offset

    def judge_marker(self, producer_id: int, epoch: int, coordinator_epoch: int) -> Code:
        if producer_id < 0:
            return Code.INVALID_PRODUCER_ID_MAPPING
        known = self.producers.get(producer_id)
        if known is None:
            return Code.NONE
        if epoch < known.epoch:
            return Code.INVALID_PRODUCER_EPOCH
        if coordinator_epoch < known.coordinator_epoch:
            return Code.TRANSACTION_COORDINATOR_FENCED
        return Code.NONE

    def end_transaction(
        self, producer_id: int, epoch: int, marker: Marker, coordinator_epoch: int, now_ms: int
    ) -> int:
        """Take in a marker; returns its offset."""
        offset = self.end
        self.end = offset + 1
        known = self.producers.get(producer_id)
        if known is None:
            known = self.producers[producer_id] = ProducerState(epoch)
        if epoch > known.epoch:
            known.epoch = epoch
            known.batches.clear()
        known.coordinator_epoch = coordinator_epoch
        known.last_timestamp_ms = known.heard_ms = now_ms
        if known.first_open_offset >= 0:
            first = known.first_open_offset
            known.first_open_offset = -1
            del self.open[producer_id]
            if marker is Marker.ABORT:
                self.aborted.append(Aborted(offset, first, producer_id, self.stable_end))
        return offset

    def apply(self, batch: bytes) -> None:
        """Take in a batch of the journal."""
        head = header_at(batch)
        if head.base_offset < self.end:
            return
        self.end = head.base_offset
        if head.is_control:
            marker = Marker(int.from_bytes(batch[_MARKER_TYPE_AT : _MARKER_TYPE_AT + 2], "big"))
            where = slice(_MARKER_COORDINATOR_AT, _MARKER_COORDINATOR_AT + 4)
            coordinator_epoch = int.from_bytes(batch[where], "big", signed=True)
            self.end_transaction(
                head.producer_id,
                head.producer_epoch,
                marker,
                coordinator_epoch,
                head.max_timestamp_ms,
            )
        else:
            self.append(head)

    def aborted_between(self, start: int, end: int) -> list[Aborted]:
        """The aborted transactions that a reader of these offsets has to know."""
        at = bisect_left(self.aborted, start, key=lambda aborted: aborted.last_offset)
        found: list[Aborted] = []
        for number in range(at, len(self.aborted)):
            aborted = self.aborted[number]
            if aborted.first_offset < end:
                found.append(aborted)
            if aborted.stable_offset >= end:
                break
        return found

    def move_start(self, offset: int) -> None:
        self.log_start = offset
        at = bisect_left(self.aborted, offset, key=lambda aborted: aborted.last_offset)
        del self.aborted[:at]

    def idle_producers(self, before_ms: int) -> list[int]:
        """Those that have not been heard of since, and have nothing open."""
        return [
            producer_id
            for producer_id, known in self.producers.items()
            if known.heard_ms < before_ms and known.first_open_offset < 0
        ]

    def forget(self, producer_ids: Sequence[int]) -> None:
        for producer_id in producer_ids:
            self.producers.pop(producer_id, None)

    def recovered(self, now_ms: int) -> None:
        """When they were last heard of is not kept: it counts from here."""
        for known in self.producers.values():
            known.heard_ms = now_ms

    # Snapshots

    def known(self) -> PartitionKnown:
        return PartitionKnown(
            self.number,
            self.log_start,
            self.end,
            [
                (
                    producer_id,
                    known.epoch,
                    known.last_timestamp_ms,
                    known.coordinator_epoch,
                    known.first_open_offset,
                    [(b.first_sequence, b.last_sequence, b.offset) for b in known.batches],
                )
                for producer_id, known in self.producers.items()
            ],
            [(a.last_offset, a.first_offset, a.producer_id, a.stable_offset) for a in self.aborted],
        )

    def restore(self, entry: PartitionKnown) -> None:
        self.log_start = entry.log_start
        self.end = entry.end
        for producer_id, epoch, timestamp_ms, coordinator_epoch, first_open, batches in entry[3]:
            known = self.producers[producer_id] = ProducerState(epoch)
            known.last_timestamp_ms = timestamp_ms
            known.coordinator_epoch = coordinator_epoch
            known.first_open_offset = first_open
            known.batches = [KnownBatch(*batch) for batch in batches]
        still_open = [
            (known.first_open_offset, producer_id)
            for producer_id, known in self.producers.items()
            if known.first_open_offset >= 0
        ]
        self.open = {producer_id: first for first, producer_id in sorted(still_open)}
        self.aborted = [Aborted(*row) for row in entry.aborted]
