"""
What runs in a task, on an executor: one partition's rows go to one sink, and a receipt comes back.

A fresh Python worker pays for every module that is imported here, so these are few, and pandas is
not among them (see `arrow_values`). What a task must know travels in the pickled `PrepareTask`;
what only Spark knows, the task asks of its context.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from epochal import arrow_values
from epochal.contract import Sink, Task, prepare_rows
from epochal.errors import EpochalError, InvariantBroken, TaskFailed
from epochal.protocol.receipts import receipt_out
from epochal.spark.arrow_transfer import PACKED, as_declared
from epochal.terms import (
    FINGERPRINT_MODULUS,
    EpochNumber,
    Fingerprint,
    Identity,
    Json,
    Limits,
    Receipt,
)

RECEIPT_COLUMN = "receipt"
_RECEIPTS = pa.schema([pa.field(RECEIPT_COLUMN, pa.string())])


class CarriedError(Exception):
    """An error of ours on its way to the driver, where only its text arrives: one line."""


@dataclass(frozen=True, kw_only=True)
class PrepareTask:
    """One sink's part of one epoch, the same for every task. Spark calls it with a task's rows."""

    sink: Sink
    identity: Identity
    epoch: EpochNumber
    schema: pa.Schema
    """The sink's rows as Arrow; timestamps are in UTC."""
    handout: Json
    limits: Limits
    is_narrow: bool = False
    """No stage of this job reads a shuffle, so that none runs again with attempts from zero."""
    is_hashed: bool = False
    """The last column that arrives is each row's hash, and is not the sink's."""
    hashes_here: bool = False
    """No such column arrives, and the rows are hashed as they pass."""
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
        yield _text_batch(json.dumps(receipt_out(receipt), ensure_ascii=False))
        spare_modules_from_collection()


_modules_spared = 0


def spare_modules_from_collection() -> None:
    """
    Take what is loaded in this worker out of the garbage collector's sight.

    PySpark collects garbage after every task, which looks at all objects of all modules: 30 to
    100 ms, in which the worker takes no other task. Again only where modules have come since.
    """
    global _modules_spared  # noqa: PLW0603  one per worker process
    if len(sys.modules) != _modules_spared:
        _modules_spared = len(sys.modules)
        gc.collect()
        gc.freeze()


def prepare(
    job: PrepareTask,
    batches: Iterator[pa.RecordBatch],
    *,
    partition: int,
    attempt: int,
    is_first: bool = False,
) -> Receipt:
    """Write a partition's rows and prepare them. Every error is raised as one line of text."""
    try:
        return prepared(job, batches, partition=partition, attempt=attempt, is_first=is_first)
    except EpochalError as error:
        raise CarriedError(error.to_line()) from None
    except Exception as error:
        fact = f"sink {job.identity.sink!r}, partition {partition}: {type(error).__name__}: {error}"
        raise CarriedError(TaskFailed(fact).to_line()) from error


def prepared(
    job: PrepareTask,
    batches: Iterable[pa.RecordBatch],
    *,
    partition: int,
    attempt: int,
    is_first: bool,
) -> Receipt:
    """The same, with errors as they are."""
    task = Task(
        handle=job.identity.handle(job.epoch, partition=partition, attempt=attempt),
        schema=job.schema,
        handout=job.handout,
        is_first=is_first,
        is_packed=job.is_packed,
        limits=job.limits,
    )
    arriving = _Arriving(job, batches)
    receipt = prepare_rows(job.sink, task, arriving)
    return replace(receipt, fingerprint=arriving.fingerprint)


class _Arriving:
    """The batches of one task under the sink's schema; sums up rows and hashes as they pass."""

    def __init__(self, job: PrepareTask, batches: Iterable[pa.RecordBatch]) -> None:
        self._job = job
        self._schema = PACKED if job.is_packed else job.schema
        self._batches = batches
        self._rows = 0
        self._hash_sum = 0

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for batch in self._batches:
            columns = batch.columns
            if self._job.is_hashed:
                self._hash_sum += _sum_of(columns.pop())
            if batch.num_rows:
                self._rows += batch.num_rows
                rows = as_declared(columns, self._schema)
                if self._job.hashes_here:
                    self._hash_sum += _sum_of_rows(rows)
                yield rows

    @property
    def fingerprint(self) -> Fingerprint:
        is_summed = self._job.is_hashed or self._job.hashes_here
        return Fingerprint(self._rows, self._hash_sum % FINGERPRINT_MODULUS if is_summed else None)


def _sum_of(hashes: pa.Array) -> int:
    """The sum of 64-bit hashes, modulo 2^64. None of them is null."""
    return int(arrow_values.numbers(hashes).view(np.uint64).sum(dtype=np.uint64))


def _sum_of_rows(rows: pa.RecordBatch) -> int:
    from epochal.row_hash import row_hashes  # noqa: PLC0415  Spark hashes what a worker gets

    return int(row_hashes(rows).sum(dtype=np.uint64))


def _text_batch(text: str) -> pa.RecordBatch:
    """One row with one text."""
    return pa.RecordBatch.from_arrays([arrow_values.texts([text], pa.string())], schema=_RECEIPTS)
