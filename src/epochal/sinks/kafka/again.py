"""Sends rows again from the spool, where a broker threw a decided transaction away.

Under an id that epoch and partition determine: whoever begins it fences every other driver that
does the same. A group that only this id commits to tells, once the id is begun, whether the rows
are there already; it is written by the transaction that sends them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from epochal.contract import Task
from epochal.errors import EpochalError
from epochal.kafka.client import Client
from epochal.kit.spool import RowSpool
from epochal.sinks.kafka import ending
from epochal.sinks.kafka.ledger import Ledger, word
from epochal.sinks.kafka.names import Names
from epochal.sinks.kafka.tokens import Handout, Open, open_in
from epochal.sinks.kafka.writer import KafkaWriter
from epochal.terms import EpochNumber, Receipt

if TYPE_CHECKING:
    import pyarrow as pa

    from epochal.sinks.kafka.sink import Kafka


class Resending:
    def __init__(self, sink: Kafka, names: Names, ledger: Ledger, spool: RowSpool) -> None:
        self._sink = sink
        self._names = names
        self._ledger = ledger
        self._spool = spool

    def is_done(self, client: Client, epoch: EpochNumber, receipt: Receipt) -> bool:
        """
        Whether the rows of a receipt were sent again, and are visible. A later epoch proves it too:
        none begins before the one before it is settled.
        """
        proven = self._ledger.at(client, self._group(receipt))
        return proven is not None and proven >= epoch

    def send(self, client: Client, epoch: EpochNumber, receipt: Receipt, handout: Handout) -> None:
        """Send a receipt's rows again and commit them, unless that is done."""
        partition = receipt.handle.partition
        name = self._names.again(epoch, partition)
        producer = ending.start_one(client, name, handout.timeout_ms)
        if self.is_done(client, epoch, receipt):
            return
        rows = self._rows(receipt)
        first = next(rows)
        task = Task(handle=receipt.handle, schema=first.schema, handout=handout.to_json())
        writer = KafkaWriter(self._sink, task, again=(name, producer))
        for batch in _behind(first, rows):
            writer.write(batch)
        sent = writer.prepare()
        txn = open_in(sent)
        if txn is None:
            return
        entry = {self._sink.topic: {0: (int(epoch), word(self._names.identity.run))}}
        ending.add_offsets(client, txn, self._group(receipt), entry)
        self._commit(client, txn)

    def _commit(self, client: Client, txn: Open) -> None:
        (answer,) = ending.end(client, [txn], is_commit=True)
        if isinstance(answer, EpochalError):
            raise answer
        ending.require_going_on(answer.error_code, txn, "committing rows that were sent again")

    def _rows(self, receipt: Receipt) -> Iterator[pa.RecordBatch]:
        txn = open_in(receipt)
        return self._spool.read(receipt.handle, rows=0 if txn is None else txn.spooled)

    def _group(self, receipt: Receipt) -> str:
        return self._names.group_again(receipt.handle.partition)


def _behind(first: pa.RecordBatch, rest: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield first
    yield from rest
