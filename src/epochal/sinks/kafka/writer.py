"""`KafkaWriter`: one transaction per task attempt, all rows acknowledged, left open for the driver.

The transactional id is a slot of the driver's pool where this is the first attempt of its partition
and the pool has one; otherwise the attempt's own handle, used once. The reasons are in
`transactional_ids`. A task without rows opens nothing.

Rows of a partition are buffered until they fill a batch. They come in pieces, slices of the batches
that the task is given: a piece is cut where a batch is full, and only a batch of several pieces is
copied together.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from epochal.arrow_values import flags, number_array, numbers, scalar
from epochal.contract import Task
from epochal.errors import EpochalError, InvariantBroken, Misconfigured, RowRejected
from epochal.kafka import batches, partitioner
from epochal.kafka.batches import Columns
from epochal.kafka.client import Client, UnknownTopic
from epochal.kafka.cluster import Leader
from epochal.kafka.varints import Ints
from epochal.sinks.kafka.batch_sender import BatchSender
from epochal.sinks.kafka.client import borrow_client, return_client
from epochal.sinks.kafka.receipts import Handout, OpenTransaction
from epochal.sinks.kafka.records import Records, records_of, take_rows, value_type
from epochal.sinks.kafka.transactional_ids import slot_id
from epochal.sinks.kafka.transactions import add_offsets, end_transactions, start_one
from epochal.terms import Fingerprint, Json, Receipt

if TYPE_CHECKING:
    from epochal.sinks.kafka.sink import Kafka


class KafkaWriter:
    def __init__(
        self, sink: Kafka, task: Task, *, producer: tuple[str, tuple[int, int]] | None = None
    ) -> None:
        """`producer`: transactional id, producer id and epoch for spooled rows that are resent."""
        self._sink = sink
        self._given_producer = producer
        self._task = task
        self._handout = Handout.from_json(task.handout)
        self._client: Client | None = None
        self._open: OpenTransaction | None = None
        self._sender: BatchSender | None = None
        self._buffers: dict[Leader, Buffer] = {}
        self._rows = 0
        self._bytes = 0
        """Buffered since everything was sent: one buffered row keeps its whole batch in memory."""
        self._turn = task.handle.partition
        """Rows without a key go to the partitions in turn."""
        self._batch_bytes = min(sink.batch_bytes, self._handout.batch_bytes_max)
        spool = None if producer else sink.row_spool(self._handout.location)
        self._spool = None if spool is None else spool.writer(task.handle, task.schema)

    def write(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        sender = self._begun()
        if self._spool is not None:
            self._spool.write(batch)
        records = records_of(self._sink, batch, self._encoder(batch.schema))
        for target, rows, sizes in self._assigned(records):
            self._buffers.setdefault(target, Buffer()).add(rows, sizes)
            self._bytes += int(sizes.sum())
        self._flush_full(sender)
        self._rows += batch.num_rows

    def prepare(self) -> Receipt:
        if self._open is None or self._sender is None or self._client is None:
            return Receipt(handle=self._task.handle, fingerprint=Fingerprint(0))
        txn, sender = self._open, self._sender
        self._flush(sender)
        self._prove(self._client, txn)
        witnesses = sender.finish()
        spooled = 0 if self._spool is None else self._spool.finish().rows
        return_client(self._sink.server, self._client)
        self._client = None
        open_s = 0.0 if sender.opened_s is None else time.monotonic() - sender.opened_s
        left_open = replace(
            txn,
            cluster=self._handout.cluster,
            partitions=sender.partitions,
            witnesses=witnesses,
            opened_at_s=time.time() - open_s,
            open_s=open_s,
            spooled=spooled,
        )
        return Receipt(
            handle=self._task.handle,
            fingerprint=Fingerprint(self._rows),
            bytes=sender.bytes,
            token=left_open.to_token(),
        )

    def abort(self) -> None:
        """Readers wait as long as the transaction stays open; the driver would abort it later."""
        if self._spool is not None:
            with suppress(EpochalError, OSError):
                self._spool.discard()
        if self._client is None or self._open is None:
            return
        # A batch under way must not arrive after the abort, which could overtake it on another
        # connection. The driver's abort raises the producer epoch and has no such limit.
        client, self._client = self._client, None
        with suppress(EpochalError):
            if self._sender is not None:
                self._sender.drain()
            end_transactions(client, [self._open], is_commit=False)
        client.close()

    def _encoder(self, schema: pa.Schema) -> Json:
        """
        What `Value.ready` returned on the driver. A session and `resend` know the columns only when
        rows arrive: then it is asked here, and this is the driver's process.
        """
        if self._handout.value is None:
            kind = value_type(self._sink, schema)
            value = self._sink.encoding.ready(self._sink.topic, kind)
            self._handout = replace(self._handout, value=value)
        return self._handout.value

    def _begun(self) -> BatchSender:
        if self._sender is not None:
            return self._sender
        self._client = borrow_client(self._sink.server)
        # A client kept from an earlier epoch does not know partitions added since.
        self._client.await_topic(self._sink.topic, self._handout.partitions)
        if self._sink.topic_from is not None:
            with suppress(UnknownTopic):
                self._client.refresh(self._client.cluster.topics)
        is_v2 = self._handout.is_v2 and self._client.transaction_version() >= 2
        name, (producer_id, producer_epoch) = self._producer(self._client)
        self._open = OpenTransaction(
            transactional_id=name,
            producer_id=producer_id,
            producer_epoch=producer_epoch,
            is_v2=is_v2,
            timeout_ms=self._handout.timeout_ms,
        )
        self._sender = BatchSender(
            self._client,
            self._open,
            compression=self._sink.codec,
            batch_bytes_max=self._handout.batch_bytes_max,
            limit_of=self._limit_of,
        )
        return self._sender

    def _producer(self, client: Client) -> tuple[str, tuple[int, int]]:
        if self._given_producer is not None:
            return self._given_producer
        handle, prefix = self._task.handle, self._sink.transactional_id_prefix
        slot = self._handout.slots.get(handle.partition) if self._task.is_first else None
        if slot is not None:
            return slot_id(prefix, handle), slot
        name = f"{prefix}{handle}"
        return name, start_one(client, name, self._handout.timeout_ms)

    def _prove(self, client: Client, txn: OpenTransaction) -> None:
        """Write the epoch to the ledger in the same transaction as its rows."""
        epoch = int(self._task.handle.epoch)
        entry = {self._sink.topic: {0: (epoch, self._handout.metadata)}}
        add_offsets(client, txn, self._handout.group, entry)

    # Partitions

    def _assigned(self, records: Records) -> Iterator[tuple[Leader, Columns, Ints]]:
        """Rows by partition, and the bytes of each row."""
        for topic, part in self._by_topic(records):
            yield from self._by_partition(topic, part)

    def _by_topic(self, records: Records) -> Iterator[tuple[str, Records]]:
        if records.topic is None:
            yield self._sink.topic, records
            return
        kind = records.topic.type
        named = pc.fill_null(records.topic, scalar(self._sink.topic, kind))
        for topic in pc.unique(named).to_pylist():
            indexes = pc.indices_nonzero(pc.equal(named, scalar(topic, kind)))
            yield str(topic), records.take(indexes)

    def _by_partition(self, topic: str, records: Records) -> Iterator[tuple[Leader, Columns, Ints]]:
        count = self._partition_count(topic)
        rows = records.columns
        sizes = batches.row_bytes(rows)
        if records.partition is None and rows.key is None:
            for ((_, start, end),) in batches.portions([sizes], self._batch_bytes):
                self._turn += 1
                target = Leader(topic, self._turn % count)
                yield target, rows.slice(start, end - start), sizes[start:end]
            return
        found = self._partitions(topic, records, count)
        if count == 1:
            yield Leader(topic, 0), rows, sizes
            return
        order, spans = partitioner.group(found)
        rows, sizes = take_rows(rows, number_array(order)), sizes[order]
        for partition, start, length in spans:
            part = rows.slice(start, length)
            yield Leader(topic, partition), part, sizes[start : start + length]

    def _partitions(self, topic: str, records: Records, count: int) -> npt.NDArray[np.int32]:
        rows = records.columns
        self._turn += 1
        unkeyed = self._turn % count
        if rows.key is None:
            found = np.full(len(rows), unkeyed, dtype=np.int32)
        else:
            found = partitioner.assign(rows.key, count, unkeyed=unkeyed)
        if records.partition is None:
            return found
        is_given = flags(records.partition.is_valid())
        wanted: Ints = numbers(pc.fill_null(records.partition, scalar(0, pa.int64())))
        wrong = wanted[is_given & ((wanted < 0) | (wanted >= count))]
        if len(wrong):
            raise RowRejected(
                f"a row wants partition {int(wrong[0])} of {topic}, which has {count}",
                "partition= must give a number from 0 on and below that, or null",
            )
        return np.where(is_given, wanted, found).astype(np.int32)

    def _partition_count(self, topic: str) -> int:
        if topic == self._sink.topic:
            return self._handout.partitions
        if self._client is None:
            raise InvariantBroken("a partition was asked for before the transaction began")
        found = self._client.await_topic(topic).partition_count
        if not found:
            raise Misconfigured(f"there is no topic {topic!r}", "create it, or correct its name")
        return found

    # Batches

    def _limit_of(self, topic: str) -> int:
        """The largest batch that a topic accepts; the driver has asked for the sink's own."""
        if topic == self._sink.topic or self._client is None:
            return self._handout.batch_bytes_max
        from epochal.sinks.kafka.check import batch_bytes_max  # noqa: PLC0415  few rows need it

        return batch_bytes_max(self._client, topic)

    def _flush_full(self, sender: BatchSender) -> None:
        if self._bytes > self._sink.buffer_bytes:
            self._flush(sender)
            return
        full = [at for at, held in self._buffers.items() if held.bytes >= self._batch_bytes]
        self._send(sender, full, with_rest=False)

    def _flush(self, sender: BatchSender) -> None:
        """Send everything buffered, also batches that are not full."""
        self._send(sender, [at for at, held in self._buffers.items() if held], with_rest=True)
        self._bytes = 0

    def _send(self, sender: BatchSender, targets: list[Leader], *, with_rest: bool) -> None:
        sender.join(set(targets))
        for target in targets:
            for rows in self._buffers[target].take(self._batch_bytes, with_rest=with_rest):
                sender.send(target, rows)


class Buffer:
    """Rows of one partition that don't fill a batch yet."""

    __slots__ = ("_pieces", "_sizes", "bytes")

    def __init__(self) -> None:
        self._pieces: list[Columns] = []
        self._sizes: list[Ints] = []
        self.bytes = 0
        """At least what all of them take as records."""

    def add(self, rows: Columns, sizes: Ints) -> None:
        """`sizes`: the bytes of each row, from `batches.row_bytes`."""
        self._pieces.append(rows)
        self._sizes.append(sizes)
        self.bytes += int(sizes.sum())

    def take(self, batch_bytes_max: int, *, with_rest: bool) -> Iterator[Columns]:
        """Remove full batches; rows that fill none stay, or come last `with_rest`."""
        pieces, sizes = self._pieces, self._sizes
        self._pieces, self._sizes, self.bytes = [], [], 0
        *full, rest = batches.portions(sizes, batch_bytes_max)
        for portion in full:
            yield _joined([pieces[at].slice(start, end - start) for at, start, end in portion])
        for at, start, end in rest:
            self.add(pieces[at].slice(start, end - start), sizes[at][start:end])
        if with_rest or self.bytes >= batch_bytes_max:
            last, self._pieces, self._sizes, self.bytes = self._pieces, [], [], 0
            yield _joined(last)

    def __bool__(self) -> bool:
        return bool(self._pieces)


def _joined(pieces: Sequence[Columns]) -> Columns:
    if len(pieces) == 1:
        return pieces[0]

    def both(name: str) -> pa.Array | None:
        columns = [getattr(piece, name) for piece in pieces]
        return None if columns[0] is None else pa.concat_arrays(columns)

    return Columns(
        value=both("value"),
        key=both("key"),
        timestamp_ms=both("timestamp_ms"),
        headers=both("headers"),
    )
