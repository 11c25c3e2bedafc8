"""Random histories of a broker, what they promise, and a judge who looks whether it holds.

The promise of everything that was acknowledged:
    J1  a plain row is visible
    J2  all rows of a committed transaction are visible
    J3  no row of an aborted transaction is visible
    J4  a transaction whose end was not acknowledged is visible as a whole or not at all
    J5  no row is there twice
    J6  what was open can still be committed, with all its rows
    J7  a group's offset is the newest committed one; one of a transaction came or went with it
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from memory_disk import Crash, MemoryDisk
from table import Table

from epochal.broker.core.settings import Settings
from epochal.kafka import batch_reader, batches
from epochal.kafka.batches import Columns, Producer
from epochal.kafka.messages import create_topics, fetch, offset_fetch, produce, txn_offset_commit
from epochal.kafka.messages.end_txn import EndTxnRequest
from epochal.kafka.messages.init_producer_id import InitProducerIdRequest

TOPIC = "rows"
PARTITIONS = 3
SETTINGS = Settings(markers_per_tick_max=2, producer_id_block=3)
LIMITS = {"tail_bytes_max": 400, "journal_bytes_max": 6_000, "journal_entries_max": 60}


@dataclass(slots=True)
class Open:
    """A transaction as its producer knows it."""

    name: str
    producer_id: int
    epoch: int
    rows: dict[bytes, int] = field(default_factory=dict)
    sequences: dict[int, int] = field(default_factory=dict)
    offset: int = -1


@dataclass(slots=True)
class Promise:
    """What was acknowledged."""

    visible: set[bytes] = field(default_factory=set)
    hidden: set[bytes] = field(default_factory=set)
    in_doubt: list[set[bytes]] = field(default_factory=list)
    maybe: set[bytes] = field(default_factory=set)
    """Plain rows without an answer."""
    offsets: dict[str, set[int]] = field(default_factory=dict)
    """Group → what its offset may be."""


class History:
    def __init__(self, seed: int, disk: MemoryDisk, *, is_synced: bool) -> None:
        self._chance = random.Random(seed)
        self.disk = disk
        self.is_synced = is_synced
        self.promise = Promise()
        self.open: dict[str, Open] = {}
        self._rows = 0
        self.sent: Any = None
        self.table: Table | None = None

    def run(self, steps: int) -> None:
        """Raises `Crash` where the disk does."""
        self.table = Table(self.disk, is_synced=self.is_synced, settings=SETTINGS, **LIMITS)
        config = create_topics.CreatableTopicConfig(name="segment.bytes", value="900")
        wanted = create_topics.CreatableTopic(
            name=TOPIC, num_partitions=PARTITIONS, replication_factor=1, configs=[config]
        )
        self.table.ask(create_topics.CreateTopicsRequest(topics=[wanted]))
        for _ in range(steps):
            self._step()

    def _step(self) -> None:
        act = self._chance.choices(
            [self._plain, self._write, self._end, self._begin, self._idle, self._commit_offset],
            [3, 8, 4, 2, 1, 2],
        )[0]
        act()

    def _row(self) -> bytes:
        self._rows += 1
        return b"row %d " % self._rows + b"." * self._chance.choice((0, 10, 200, 700))

    def _plain(self) -> None:
        row = self._row()
        self.promise.maybe.add(row)
        self._produce(row, self._chance.randrange(PARTITIONS), None)
        self.promise.maybe.discard(row)
        self.promise.visible.add(row)

    def _begin(self) -> None:
        assert self.table is not None
        name = f"txn-{self._chance.randrange(4)}"
        was = self.open.pop(name, None)
        if was is not None:
            # Whatever happens from here on, it is never committed again.
            self.promise.hidden.update(was.rows)
        request = InitProducerIdRequest(transactional_id=name, transaction_timeout_ms=60_000)
        answer = self.table.ask(request)
        while answer.error_code == 51:
            answer = self.table.ask(request)
        assert answer.error_code == 0, answer
        self.open[name] = Open(name, answer.producer_id, answer.producer_epoch)

    def _write(self) -> None:
        if not self.open:
            return
        txn = self._chance.choice(list(self.open.values()))
        row, partition = self._row(), self._chance.randrange(PARTITIONS)
        # Unacknowledged, it may or may not be part of the transaction.
        self.sent = (txn, row)
        answer = self._produce(row, partition, txn)
        while answer == 51:
            self.table.tick()
            answer = self._produce(row, partition, txn)
        self.sent = None
        assert answer == 0, answer
        txn.rows[row] = partition
        txn.sequences[partition] = txn.sequences.get(partition, 0) + 1

    def _produce(self, row: bytes, partition: int, txn: Open | None) -> int:
        assert self.table is not None
        who = batches.ANYBODY
        if txn is not None:
            who = Producer(
                producer_id=txn.producer_id,
                producer_epoch=txn.epoch,
                base_sequence=txn.sequences.get(partition, 0),
                is_transactional=True,
            )
        columns = Columns(value=pa.array([row], pa.binary()))
        records = b"".join(
            batches.encode(columns, default_timestamp_ms=self.table.now_ms, producer=who)
        )
        part = produce.PartitionProduceData(index=partition, records=records)
        request = produce.ProduceRequest(
            transactional_id=None if txn is None else txn.name,
            acks=-1,
            topic_data=[produce.TopicProduceData(name=TOPIC, partition_data=[part])],
        )
        return self.table.ask(request).responses[0].partition_responses[0].error_code

    def _commit_offset(self) -> None:
        if not self.open:
            return
        assert self.table is not None
        txn = self._chance.choice(list(self.open.values()))
        self._rows += 1
        place = txn_offset_commit.TxnOffsetCommitRequestPartition(
            partition_index=0, committed_offset=self._rows
        )
        request = txn_offset_commit.TxnOffsetCommitRequest(
            transactional_id=txn.name,
            group_id=f"group-of-{txn.name}",
            producer_id=txn.producer_id,
            producer_epoch=txn.epoch,
            topics=[txn_offset_commit.TxnOffsetCommitRequestTopic(name=TOPIC, partitions=[place])],
        )
        before, txn.offset = txn.offset, -2
        code = self.table.ask(request).topics[0].partitions[0].error_code
        txn.offset = before
        if code == 51:
            return
        assert code == 0, code
        txn.offset = self._rows

    def _end(self) -> None:
        if not self.open:
            return
        assert self.table is not None
        txn = self.open.pop(self._chance.choice(list(self.open)))
        is_commit = self._chance.random() < 0.6
        rows = set(txn.rows)
        if not rows and txn.offset < 0:
            return
        group = f"group-of-{txn.name}"
        known = self.promise.offsets.setdefault(group, {-1})
        if txn.offset >= 0 and is_commit:
            known.add(txn.offset)
        if is_commit:
            self.promise.in_doubt.append(rows)
        else:
            self.promise.hidden |= rows
        request = EndTxnRequest(
            transactional_id=txn.name,
            producer_id=txn.producer_id,
            producer_epoch=txn.epoch,
            committed=is_commit,
        )
        answer = self.table.ask(request)
        assert answer.error_code == 0, answer
        if is_commit:
            self.promise.in_doubt.remove(rows)
            self.promise.visible |= rows
            if txn.offset >= 0:
                self.promise.offsets[group] = {txn.offset}
        # The newer protocol goes on under the raised epoch.
        self.open[txn.name] = Open(txn.name, answer.producer_id, answer.producer_epoch)

    def _idle(self) -> None:
        assert self.table is not None
        self.table.pass_time(10)


def judge(history: History, disk: MemoryDisk) -> Table:
    """A broker started on `disk`, all promises looked after."""
    table = Table(disk, is_synced=history.is_synced, settings=SETTINGS, **LIMITS)
    promise = history.promise
    for _ in range(PARTITIONS * 4):
        table.tick()
    if TOPIC not in table.broker.state.topics.by_name:
        assert not promise.visible
        return table
    lost = history.sent
    for txn in history.open.values():
        _commit(table, txn, promise, None if lost is None or lost[0] is not txn else lost[1])
    for name in [txn.transactional_id for txn in table.broker.open_transactions()]:
        # Its producer does not know how it ended, and asks for the next epoch: it ends now.
        request = InitProducerIdRequest(transactional_id=name, transaction_timeout_ms=60_000)
        while table.ask(request).error_code:
            pass
    rows = read(table)
    assert len(rows) == len(set(rows)), "J5"
    found = set(rows)
    assert promise.visible <= found, ("J1, J2", promise.visible - found)
    assert not promise.hidden & found, ("J3", promise.hidden & found)
    for whole in promise.in_doubt:
        assert whole <= found or not whole & found, "J4"
    allowed = promise.visible | promise.maybe | set().union(*promise.in_doubt)
    assert found <= allowed, ("only what was sent", found - allowed)
    for group, wanted in promise.offsets.items():
        assert offset_of(table, group) in wanted, ("J7", group)
    return table


def _commit(table: Table, txn: Open, promise: Promise, lost: bytes | None) -> None:
    """J6: it is as its producer left it."""
    if not txn.rows and txn.offset == -1:
        return
    state = table.broker.state.transactions.ids.get(txn.name)
    assert state is not None, "J6"
    request = EndTxnRequest(
        transactional_id=txn.name,
        producer_id=txn.producer_id,
        producer_epoch=txn.epoch,
        committed=True,
    )
    answer = table.ask(request)
    group = f"group-of-{txn.name}"
    if txn.offset == -2:
        promise.offsets.pop(group, None)  # the crash left the newest one in doubt
    if not txn.rows and txn.offset < 0:
        return
    assert answer.error_code == 0, ("J6", answer)
    for _ in range(PARTITIONS):
        table.tick()
    promise.visible |= set(txn.rows)
    if lost is not None:
        promise.maybe.add(lost)
    if txn.offset >= 0:
        promise.offsets[group] = {txn.offset}


def read(table: Table) -> list[bytes]:
    """Everything that a reader of committed rows gets."""
    rows: list[bytes] = []
    for partition in range(PARTITIONS):
        offset = 0
        while True:
            part = fetch.FetchPartition(
                partition=partition, fetch_offset=offset, partition_max_bytes=700
            )
            request = fetch.FetchRequest(
                max_bytes=1 << 20,
                isolation_level=1,
                topics=[fetch.FetchTopic(topic=TOPIC, partitions=[part])],
            )
            result = table.ask(request).responses[0].partitions[0]
            assert result.error_code == 0, result
            found = list(batch_reader.read(result.records or b""))
            if not found:
                break
            aborted = [(a.producer_id, a.first_offset) for a in result.aborted_transactions or ()]
            for batch in batch_reader.committed(found, aborted):
                if not batch.is_control:
                    rows += batch.columns()["value"].to_pylist()
            offset = found[-1].last_offset + 1
    return rows


def offset_of(table: Table, group: str) -> int:
    topic = offset_fetch.OffsetFetchRequestTopics(name=TOPIC, partition_indexes=[0])
    asked = offset_fetch.OffsetFetchRequestGroup(group_id=group, topics=[topic])
    (found,) = table.ask(offset_fetch.OffsetFetchRequest(groups=[asked])).groups
    return found.topics[0].partitions[0].committed_offset


__all__ = ["Crash", "History", "judge", "offset_of", "read"]
