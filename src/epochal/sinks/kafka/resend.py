"""Rows sent again from the spool, where a broker aborted a decided transaction.

They are sent under an id that epoch and partition determine, and InitProducerId on it fences every
other driver that sends the same rows. A consumer group that only this id commits to, in the
transaction that sends the rows, records whether that was done:

    driver 1: InitProducerId(resend-e7-0) → (30, 0); the group is empty; sends the rows; stalls
    driver 2: InitProducerId(resend-e7-0) → (30, 1), which aborts (30, 0); the group is empty;
              sends the rows, commits rows and group together
    driver 1: EndTxn as (30, 0)                     PRODUCER_FENCED: the rows are there once
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from epochal.contract import Task
from epochal.kafka.client import Client
from epochal.kit.spool.rows import RowSpool
from epochal.sinks.kafka.ledger import Ledger, ledger_entry, ledger_metadata
from epochal.sinks.kafka.receipts import Handout, transaction_of
from epochal.sinks.kafka.transactional_ids import TransactionalIds
from epochal.sinks.kafka.transactions import add_offsets, commit_one, start_one
from epochal.sinks.kafka.writer import KafkaWriter
from epochal.terms import EpochNumber, Receipt

if TYPE_CHECKING:
    from epochal.sinks.kafka.sink import Kafka


class Resend:
    def __init__(self, sink: Kafka, ids: TransactionalIds, ledger: Ledger, spool: RowSpool) -> None:
        self._sink = sink
        self._ids = ids
        self._ledger = ledger
        self._spool = spool

    def is_done(self, client: Client, epoch: EpochNumber, receipt: Receipt) -> bool:
        """
        Whether the rows of a receipt were sent again and are visible. A later epoch proves it too:
        none begins before the one before it is settled.
        """
        proven = self._ledger.at(client, self._group(receipt))
        return proven is not None and proven >= epoch

    def send(self, client: Client, epoch: EpochNumber, receipt: Receipt, handout: Handout) -> None:
        """Send a receipt's rows again and commit them, unless that is done."""
        name = self._ids.resend(epoch, receipt.handle.partition)
        producer = start_one(client, name, handout.timeout_ms)
        if self.is_done(client, epoch, receipt):
            return
        known = transaction_of(receipt)
        rows = self._spool.read(receipt.handle, rows=0 if known is None else known.spooled)
        first = next(rows)
        task = Task(handle=receipt.handle, schema=first.schema, handout=handout.to_json())
        writer = KafkaWriter(self._sink, task, producer=(name, producer))
        for batch in chain([first], rows):
            writer.write(batch)
        txn = transaction_of(writer.prepare())
        if txn is None:
            return
        metadata = ledger_metadata(self._ids.identity.run)
        entry = ledger_entry(self._sink.topic, epoch, metadata)
        add_offsets(client, txn, self._group(receipt), entry)
        commit_one(client, txn, "committing rows that were sent again")

    def _group(self, receipt: Receipt) -> str:
        return self._ids.resend_group(receipt.handle.partition)
