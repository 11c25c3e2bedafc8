"""
What runs in a task, on an executor: rows of one partition to one sink, and a receipt back.

Few modules are imported here, as a fresh Python worker pays for each of them. What a task must know
travels in the pickled `Preparing`; what only Spark knows, the task asks of its context.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import pyarrow as pa

from epochal.contract import Limits, Sink, Task, Writer
from epochal.errors import EpochalError, InvariantBroken, TaskFailed
from epochal.protocol.records import receipt_out
from epochal.spark.arrow_transfer import PACKED, as_declared
from epochal.terms import FINGERPRINT_MODULUS, EpochNumber, Fingerprint, Identity, Json, Receipt

RECEIPT_COLUMN = "receipt"
RECEIPT_SCHEMA = f"{RECEIPT_COLUMN} string"
_RECEIPTS = pa.schema([pa.field(RECEIPT_COLUMN, pa.string())])


class CarriedError(Exception):
    """An error of ours on its way to the driver, which sees nothing but text: its line says all."""


@dataclass(frozen=True, kw_only=True)
class Preparing:
    """One sink's part of one epoch, for every task alike. Called by Spark with a task's rows."""

    sink: Sink
    identity: Identity
    epoch: EpochNumber
    schema: pa.Schema
    """The sink's rows as Arrow; timestamps are in UTC."""
    handout: Json
    limits: Limits
    is_narrow: bool = False
    """No stage of this job reads a shuffle, so that none runs again with attempts from zero."""
    is_hashed: bool
    """The last column that arrives is each row's hash, and is not the sink's."""
    is_packed: bool = False
    """Rows arrive as bytes, in one column."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext  # noqa: PLC0415  this module is importable without it

        context = TaskContext.get()
        if context is None:
            raise CarriedError(InvariantBroken("a writer runs outside of a Spark task").to_line())
        receipt = prepare(
            self,
            batches,
            partition=context.partitionId(),
            attempt=context.taskAttemptId(),
            is_first=self.is_narrow and context.attemptNumber() == 0,
        )
        told = json.dumps(receipt_out(receipt), ensure_ascii=False)
        yield pa.RecordBatch.from_pydict({RECEIPT_COLUMN: [told]}, schema=_RECEIPTS)


def prepare(
    job: Preparing,
    batches: Iterator[pa.RecordBatch],
    *,
    partition: int,
    attempt: int,
    is_first: bool = False,
) -> Receipt:
    """Write a partition's rows and prepare them; whatever fails leaves as one line of text."""
    try:
        handle = job.identity.handle(job.epoch, partition=partition, attempt=attempt)
        task = Task(
            handle=handle,
            schema=job.schema,
            handout=job.handout,
            is_first=is_first,
            is_packed=job.is_packed,
            limits=job.limits,
        )
        return _prepare(job, batches, task)
    except EpochalError as error:
        raise CarriedError(error.to_line()) from None
    except Exception as error:
        fact = f"sink {job.identity.sink!r}, partition {partition}: {type(error).__name__}: {error}"
        raise CarriedError(TaskFailed(fact).to_line()) from error


def _prepare(job: Preparing, batches: Iterator[pa.RecordBatch], task: Task) -> Receipt:
    writer = job.sink.writer(task)
    try:
        seen = _write(job, writer, batches)
        receipt = writer.prepare()
    except BaseException:
        with suppress(Exception):
            writer.abort()
        raise
    if receipt.rows != seen.rows:
        raise InvariantBroken(
            f"sink {job.identity.sink!r}: {seen.rows} rows were written, and the receipt of "
            f"{task.handle} says {receipt.rows}",
            "this is a defect of the sink; nothing was decided",
        )
    return replace(receipt, fingerprint=seen)


def _write(job: Preparing, writer: Writer, batches: Iterator[pa.RecordBatch]) -> Fingerprint:
    rows, hash_sum = 0, 0
    arriving = PACKED if job.is_packed else job.schema
    for batch in batches:
        columns = batch.columns
        if job.is_hashed:
            hash_sum += _sum_of(columns.pop())
        if batch.num_rows:
            writer.write(as_declared(columns, arriving))
            rows += batch.num_rows
    return Fingerprint(rows, hash_sum % FINGERPRINT_MODULUS if job.is_hashed else None)


def _sum_of(hashes: pa.Array) -> int:
    """The sum of 64-bit hashes, modulo 2^64."""
    if not len(hashes):
        return 0
    return int(hashes.to_numpy(zero_copy_only=True).view("uint64").sum(dtype="uint64"))
