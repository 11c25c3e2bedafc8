"""Prepares rows in memory."""

from __future__ import annotations

import pyarrow as pa

from epochal.contract import Task
from epochal.sinks.memory.store import Store
from epochal.terms import Fingerprint, Receipt


class MemoryWriter:
    """Holds its rows until `prepare`: a target in memory has nowhere else to put them."""

    def __init__(self, task: Task, store: Store) -> None:
        self._task = task
        self._store = store
        self._batches: list[pa.RecordBatch] = []

    def write(self, batch: pa.RecordBatch) -> None:
        self._batches.append(batch)

    def prepare(self) -> Receipt:
        rows = pa.Table.from_batches(self._batches, schema=self._task.schema)
        self._store.prepare(str(self._task.handle), rows)
        return Receipt(
            handle=self._task.handle, fingerprint=Fingerprint(rows.num_rows), bytes=rows.nbytes
        )

    def abort(self) -> None:
        self._batches.clear()
        self._store.abort([str(self._task.handle)])
