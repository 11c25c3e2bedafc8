"""All that a broker knows, and how entries bring it back.

The owner calls a decision (`append`, `transactions.end`, …), which changes memory and emits
entries; at the end of its tick it calls `finish`, which writes the markers of what was decided; and
then it writes the tick's entries down, all or none, before an answer of the tick leaves.

`known` is the whole state as entries, for a snapshot; `apply` takes an entry of either.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

import google_crc32c

from epochal.broker.core.batch_check import BatchHeader
from epochal.broker.core.entries import (
    Appended,
    AppendedElsewhere,
    ConsumerGroupChanged,
    ConsumerMember,
    ConsumerMemberGone,
    Entry,
    GroupChanged,
    GroupConfigured,
    GroupForgotten,
    Identity,
    LogStartMoved,
    OffsetsCommitted,
    OffsetsDecided,
    OffsetsForgotten,
    OffsetsPending,
    PartitionKnown,
    Placed,
    ProducerIdsReserved,
    ProducersForgotten,
    SegmentKnown,
    SlotFilled,
    SlotTaken,
    TopicChanged,
    TopicDeleted,
    TxnChanged,
    TxnForgotten,
    TxnGrew,
)
from epochal.broker.core.groups import Groups
from epochal.broker.core.offsets import Offsets
from epochal.broker.core.partitions import Partition, Verdict
from epochal.broker.core.settings import Settings
from epochal.broker.core.topics import Topics
from epochal.broker.core.transaction_states import State
from epochal.broker.core.transactions import Transaction, Transactions
from epochal.kafka import batch_format
from epochal.kafka.batch_format import Marker, Producer
from epochal.kafka.codes import Code
from epochal.kafka.primitives import Records

COORDINATOR_EPOCH = 0
LEADER_EPOCH = 0
_FRONT = struct.Struct(">qii")
_FRONT_BYTES = _FRONT.size
_ATTRIBUTES_AT = 21
_MAX_TIMESTAMP_AT = 35


class BrokerState:
    def __init__(
        self,
        settings: Settings,
        emit: Callable[[Entry], None],
        moved: Callable[[Partition, int], None] = lambda _partition, _size: None,
    ) -> None:
        """`moved` is called for every partition with more to read, with the number of bytes."""
        self.settings = settings
        self.cluster_id = ""
        self.emit = emit
        self._moved = moved
        self._next_producer_id = 0
        self._reserved_before = 0
        self.topics = Topics(settings, emit)
        self.offsets = Offsets(emit)
        self.transactions = Transactions(settings, emit, self.new_producer_id)
        self.groups = Groups(settings, self.topics, emit)

    def new_producer_id(self) -> int:
        """Ids are reserved in blocks: after a crash the rest of a block is never used."""
        if self._next_producer_id >= self._reserved_before:
            self._reserved_before = self._next_producer_id + self.settings.producer_id_block
            self.emit(ProducerIdsReserved(self._reserved_before))
        found = self._next_producer_id
        self._next_producer_id += 1
        return found

    # Partitions

    def append(
        self,
        partition: Partition,
        head: BatchHeader,
        data: Records,
        *,
        now_ms: int,
        is_stamped: bool = False,
        is_newer_protocol: bool = False,
    ) -> tuple[Verdict, int]:
        """
        Append a batch that was inspected, if its sequence allows; and its offset.

        `is_newer_protocol`: it is of a transaction whose partitions are added by writing to them.
        """
        verdict = partition.judge(head, is_newer_protocol=is_newer_protocol)
        if verdict.code is not Code.NONE or verdict.duplicate_of >= 0:
            return verdict, verdict.duplicate_of
        offset = partition.append(head, now_ms)
        if is_stamped:
            data = _restamped(data, now_ms)
        front = _FRONT.pack(offset, head.length, LEADER_EPOCH)
        batch = b"".join((front, memoryview(data)[_FRONT_BYTES:]))
        self.emit(Appended(partition.number, batch))
        self._moved(partition, len(batch))
        return verdict, offset

    def write_marker(
        self, partition: Partition, producer_id: int, epoch: int, marker: Marker, now_ms: int
    ) -> None:
        offset = partition.end_transaction(producer_id, epoch, marker, COORDINATOR_EPOCH, now_ms)
        who = Producer(producer_id=producer_id, producer_epoch=epoch, is_transactional=True)
        parts = batch_format.encode_marker(
            marker, producer=who, coordinator_epoch=COORDINATOR_EPOCH, timestamp_ms=now_ms
        )
        head, section = bytes(parts[0]), parts[1]
        length = len(head) + len(section) - batch_format.LENGTH_FROM
        front = _FRONT.pack(offset, length, LEADER_EPOCH)
        batch = b"".join((front, head[_FRONT_BYTES:], section))
        self.emit(Appended(partition.number, batch))
        self._moved(partition, len(batch))

    def move_log_start(self, partition: Partition, offset: int) -> None:
        partition.move_start(offset)
        self.emit(LogStartMoved(partition.number, offset))

    # Transactions

    def finish(self, now_ms: int) -> bool:
        """
        Write markers of what is prepared, as many as one tick takes.

        True: there are more, and another tick is needed.
        """
        unfinished = self.transactions.unfinished
        if not unfinished:
            return False
        left = self.settings.markers_per_tick_max
        for txn in list(unfinished.values()):
            if left <= 0:
                break
            left -= self._finish_one(txn, left, now_ms)
        return bool(unfinished)

    def _finish_one(self, txn: Transaction, limit: int, now_ms: int) -> int:
        is_commit = txn.state is State.PREPARE_COMMIT
        marker = Marker.COMMIT if is_commit else Marker.ABORT
        written = 0
        while txn.unmarked and written < limit:
            partition = self.topics.partitions.get(txn.unmarked.pop())
            written += 1
            if partition is not None:  # else its topic was deleted meanwhile
                who = (txn.producer_id, txn.producer_epoch)
                self.write_marker(partition, *who, marker, now_ms)
        if not txn.unmarked:
            for group in sorted(txn.groups):
                self.offsets.decide(group, txn.producer_id, is_commit=is_commit)
            self.transactions.completed(txn, now_ms)
        return max(written, 1)

    # Entries

    def apply(self, entry: Entry) -> None:  # noqa: PLR0912  one case for each kind of entry
        match entry:
            case Appended():
                partition = self.topics.partitions.get(entry.partition)
                if partition is not None:
                    partition.apply(entry.batch)
            case TxnChanged():
                self.transactions.apply_changed(entry)
            case TxnGrew():
                self.transactions.apply_grew(entry)
            case TxnForgotten():
                self.transactions.ids.pop(entry.transactional_id, None)
            case ProducerIdsReserved():
                self._next_producer_id = self._reserved_before = entry.before
            case TopicChanged():
                self.topics.apply_changed(entry)
            case TopicDeleted():
                self.topics.apply_deleted(entry)
            case LogStartMoved():
                partition = self.topics.partitions.get(entry.partition)
                if partition is not None:
                    partition.move_start(entry.offset)
            case OffsetsCommitted():
                self.offsets.apply_committed(entry)
            case OffsetsPending():
                self.offsets.apply_pending(entry)
            case OffsetsDecided():
                self.offsets.apply_decided(entry)
            case OffsetsForgotten():
                self.offsets.apply_forgotten(entry)
            case GroupChanged():
                self.groups.classic.apply_changed(entry)
            case GroupForgotten():
                self.groups.apply_forgotten(entry)
            case GroupConfigured():
                self.groups.configs.apply(entry)
            case ConsumerGroupChanged() | ConsumerMember() | ConsumerMemberGone():
                self.groups.consumers.apply(entry)
            case PartitionKnown():
                self.topics.partitions[entry.partition].restore(entry)
            case Identity():
                self.cluster_id = entry.cluster_id
                self.topics.next_partition = entry.next_partition
            case ProducersForgotten():
                partition = self.topics.partitions.get(entry.partition)
                if partition is not None:
                    partition.forget(entry.producers)
            case Placed() | SegmentKnown() | SlotTaken() | SlotFilled() | AppendedElsewhere():
                pass  # where bytes are is the storage's business

    def recovered(self, now_ms: int) -> None:
        """All entries are applied; from here on time passes."""
        self.transactions.recovered()
        for partition in self.topics.partitions.values():
            partition.recovered(now_ms)
        self.groups.recovered(now_ms)

    def begin_reign(self, now_ms: int) -> None:
        """
        A member of a cluster has become the active: time passes from here on. What another clock
        has measured does not count: open transactions and sessions get their time anew.
        """
        self.transactions.restart_timeouts(now_ms)
        self.recovered(now_ms)

    def known(self) -> Iterator[Entry]:
        yield Identity(self.cluster_id, self.topics.next_partition)
        yield ProducerIdsReserved(self._reserved_before)
        yield from self.topics.known()
        for partition in self.topics.partitions.values():
            yield partition.known()
        yield from self.transactions.known()
        yield from self.offsets.known()
        yield from self.groups.known()

    # Time

    def pass_time(self, now_ms: int) -> None:
        """Whatever is due by now."""
        self.transactions.expire(now_ms)
        self.groups.expire(now_ms)

    def forget_idle(self, now_ms: int) -> None:
        """From time to time: expire ids, producers and groups that are no longer used."""
        self.transactions.forget_idle(now_ms)
        for partition in self.topics.partitions.values():
            idle = partition.idle_producers(now_ms - self.settings.producer_expiry_ms)
            if idle:
                partition.forget(idle)
                self.emit(ProducersForgotten(partition.number, idle))
        self._forget_offsets(now_ms - self.settings.offsets_retention_ms)

    def _forget_offsets(self, before_ms: int) -> None:
        for group, rows in list(self.offsets.groups.items()):
            idle_ms = self.groups.idle_since(group)
            if idle_ms is not None and idle_ms <= before_ms:
                old = [
                    place
                    for place, row in rows.items()
                    if row.committed_ms < before_ms and not self.offsets.is_unstable(group, place)
                ]
                self.offsets.forget(group, old)
        for group in self.groups:
            idle_ms = self.groups.idle_since(group)
            is_kept = group in self.offsets.groups or group in self.offsets.pending
            if idle_ms is not None and idle_ms <= before_ms and not is_kept:
                self.groups.forget(group)


def _restamped(data: Records, now_ms: int) -> Records:
    """The same batch with the broker's time in it, for topics that want that."""
    fresh = bytearray(data)
    (attributes,) = struct.unpack_from(">h", fresh, _ATTRIBUTES_AT)
    struct.pack_into(">h", fresh, _ATTRIBUTES_AT, attributes | batch_format.BIT_LOG_APPEND_TIME)
    struct.pack_into(">q", fresh, _MAX_TIMESTAMP_AT, now_ms)
    crc = google_crc32c.value(bytes(fresh[batch_format.CRC_FROM :]))
    struct.pack_into(">I", fresh, batch_format.CRC_AT, crc)
    return bytes(fresh)
