"""Prepares rows: one transaction a task attempt, every row acknowledged, left open for the driver.

The id is the pool's where the driver has kept a slot for this partition and no other attempt can
come to use it; else it is the attempt's own name, used once and never again. A task without rows
opens nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from epochal.contract import Task
from epochal.errors import EpochalError, Misconfigured, RowRejected
from epochal.kafka import batches, partitioner
from epochal.kafka.batches import Columns
from epochal.kafka.client import Client
from epochal.kafka.cluster import Leader
from epochal.kafka.varints import Ints
from epochal.sinks.kafka import ending
from epochal.sinks.kafka.connecting import borrow, give_back
from epochal.sinks.kafka.gathering import Waiting
from epochal.sinks.kafka.names import slot_id
from epochal.sinks.kafka.sending import Sending
from epochal.sinks.kafka.shaping import Records, records_of, value_type
from epochal.sinks.kafka.tokens import Handout, Open
from epochal.terms import Fingerprint, Json, Receipt

if TYPE_CHECKING:
    from epochal.sinks.kafka.sink import Kafka


class KafkaWriter:
    def __init__(
        self, sink: Kafka, task: Task, *, again: tuple[str, tuple[int, int]] | None = None
    ) -> None:
        """`again` is the id and producer under which spooled rows are sent another time."""
        self._sink = sink
        self._again = again
        self._task = task
        self._handout = Handout.from_json(task.handout)
        self._client: Client | None = None
        self._open: Open | None = None
        self._sending: Sending | None = None
        self._opened_s = 0.0
        self._waiting: dict[Leader, Waiting] = {}
        self._rows = 0
        self._bytes = 0
        """
        What came in since all was sent: a row that waits keeps the whole batch that it came in.
        """
        self._turn = task.handle.partition
        """Whose turn it is among partitions to get rows without a key."""
        self._batch_bytes = min(sink.batch_bytes, self._handout.batch_bytes_max)
        spool = None if again else sink.row_spool(self._handout.location)
        self._spool = None if spool is None else spool.writer(task.handle, task.schema)

    def write(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        sending = self._begun()
        if self._spool is not None:
            self._spool.write(batch)
        records = records_of(self._sink, batch, self._value_with(batch.schema))
        for target, rows, sizes in self._assigned(records):
            self._waiting.setdefault(target, Waiting()).add(rows, sizes)
            self._bytes += int(sizes.sum())
        self._flush_full(sending)
        self._rows += batch.num_rows

    def prepare(self) -> Receipt:
        if self._open is None or self._sending is None or self._client is None:
            return Receipt(handle=self._task.handle, fingerprint=Fingerprint(0))
        txn, sending = self._open, self._sending
        self._flush(sending)
        self._prove(txn)
        witnesses = sending.finish()
        spooled = 0 if self._spool is None else self._spool.finish().rows
        give_back(self._sink.server, self._client)
        self._client = None
        left = Open(
            transactional_id=txn.transactional_id,
            producer_id=txn.producer_id,
            producer_epoch=txn.producer_epoch,
            is_v2=txn.is_v2,
            cluster=self._handout.cluster,
            partitions=sending.partitions,
            witnesses=witnesses,
            timeout_ms=self._handout.timeout_ms,
            open_s=time.monotonic() - self._opened_s,
            spooled=spooled,
        )
        return Receipt(
            handle=self._task.handle,
            fingerprint=Fingerprint(self._rows),
            bytes=sending.bytes,
            token=left.to_token(),
        )

    def abort(self) -> None:
        """Only a courtesy: readers wait for as long as it stays open."""
        if self._spool is not None:
            with suppress(EpochalError, OSError):
                self._spool.discard()
        if self._client is None or self._open is None:
            return
        # What went out and was not answered must not arrive behind the abort: a fresh connection
        # could overtake it. The driver's abort, which raises the producer epoch, has no such limit.
        client, self._client = self._client, None
        with suppress(EpochalError):
            if self._sending is not None:
                self._sending.drain()
            ending.end(client, [self._open], is_commit=False)
        client.close()

    def __del__(self) -> None:
        """An attempt that neither prepared nor aborted was given up by its engine."""
        client = getattr(self, "_client", None)
        if client is not None:
            client.close()

    def _value_with(self, schema: pa.Schema) -> Json:
        """
        What the driver handed for values. Rows of a session and rows that are sent again come to
        it with columns of their own: there it is asked for here, in the driver's process.
        """
        if self._handout.value is None:
            kind = value_type(self._sink, schema)
            value = self._sink.made_of.ready(self._sink.topic, kind)
            self._handout = replace(self._handout, value=value)
        return self._handout.value

    def _begun(self) -> Sending:
        if self._sending is not None:
            return self._sending
        self._client = borrow(self._sink.server)
        known = self._client.await_topic(self._sink.topic)
        if known.partition_count < self._handout.partitions:
            # A client that is kept in its process has not seen the partitions that were added.
            self._client.forget(Leader(self._sink.topic, 0))
        is_v2 = self._handout.is_v2 and self._client.transaction_version() >= 2
        name, (producer_id, producer_epoch) = self._producer(self._client)
        self._open = Open(
            transactional_id=name,
            producer_id=producer_id,
            producer_epoch=producer_epoch,
            is_v2=is_v2,
            timeout_ms=self._handout.timeout_ms,
        )
        self._opened_s = time.monotonic()
        self._sending = Sending(
            self._client,
            self._open,
            compression=self._sink.codec,
            batch_bytes_max=self._handout.batch_bytes_max,
        )
        return self._sending

    def _producer(self, client: Client) -> tuple[str, tuple[int, int]]:
        if self._again is not None:
            return self._again
        handle, prefix = self._task.handle, self._sink.transactional_id_prefix
        kept = self._handout.slots.get(handle.partition) if self._task.is_first else None
        if kept is not None:
            return slot_id(prefix, handle), kept
        name = f"{prefix}{handle}"
        return name, ending.start_one(client, name, self._handout.timeout_ms)

    def _prove(self, txn: Open) -> None:
        """The epoch, in the ledger, by the very transaction that makes its rows visible."""
        if self._client is None:
            return
        epoch = int(self._task.handle.epoch)
        entry = {self._sink.topic: {0: (epoch, self._handout.word)}}
        ending.add_offsets(self._client, txn, self._handout.group, entry)

    # Which rows go where

    def _assigned(self, records: Records) -> Iterator[tuple[Leader, Columns, Ints]]:
        """Rows of one partition each, and what each row takes."""
        for topic, part in self._by_topic(records):
            yield from self._by_partition(topic, part)

    def _by_topic(self, records: Records) -> Iterator[tuple[str, Records]]:
        if records.topic is None:
            yield self._sink.topic, records
            return
        named = pc.fill_null(records.topic, self._sink.topic)
        for topic in pc.unique(named).to_pylist():
            indexes = pc.indices_nonzero(pc.equal(named, topic))
            yield str(topic), _taken(records, indexes)

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
        rows, sizes = _columns_taken(rows, pa.array(order)), sizes[order]
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
        wanted: npt.NDArray[np.int32] = pc.fill_null(records.partition, -1).to_numpy()
        beyond = wanted[wanted >= count]
        if len(beyond):
            raise RowRejected(
                f"a row wants partition {int(beyond[0])} of {topic}, which has {count}",
                "partition= must give a number below that, or null",
            )
        return np.where(wanted >= 0, wanted, found).astype(np.int32)

    def _partition_count(self, topic: str) -> int:
        if topic == self._sink.topic:
            return self._handout.partitions
        if self._client is None:
            raise Misconfigured("nothing has been begun")
        found = self._client.await_topic(topic).partition_count
        if not found:
            raise Misconfigured(f"there is no topic {topic!r}", "create it, or correct its name")
        return found

    # Batches

    def _flush_full(self, sending: Sending) -> None:
        if self._bytes > self._sink.buffer_bytes:
            self._flush(sending)
            return
        full = [at for at, held in self._waiting.items() if held.bytes >= self._batch_bytes]
        self._send(sending, full, with_rest=False)

    def _flush(self, sending: Sending) -> None:
        """All that waits, whether it fills a batch or not."""
        self._send(sending, [at for at, held in self._waiting.items() if held], with_rest=True)
        self._bytes = 0

    def _send(self, sending: Sending, targets: list[Leader], *, with_rest: bool) -> None:
        sending.join(set(targets))
        for target in targets:
            for rows in self._waiting[target].take(self._batch_bytes, with_rest=with_rest):
                sending.send(target, rows)


def _columns_taken(rows: Columns, indexes: pa.Array) -> Columns:
    def part(column: pa.Array | None) -> pa.Array | None:
        return None if column is None else column.take(indexes)

    return Columns(
        value=rows.value.take(indexes),
        key=part(rows.key),
        timestamp_ms=part(rows.timestamp_ms),
        headers=part(rows.headers),
    )


def _taken(records: Records, indexes: pa.Array) -> Records:
    partition = None if records.partition is None else records.partition.take(indexes)
    return Records(columns=_columns_taken(records.columns, indexes), partition=partition)
