"""Prepares rows by spooling them: for targets that can't hold rows back themselves."""

from __future__ import annotations

from contextlib import suppress

import pyarrow as pa

from epochal.contract import Task
from epochal.kit.spool.rows import RowSpool
from epochal.terms import Fingerprint, Receipt


class SpoolingWriter:
    """The whole writer of a sink that delivers from a spool."""

    def __init__(self, task: Task, spool: RowSpool) -> None:
        self._task = task
        self._rows = spool.writer(task.handle, task.schema)

    def write(self, batch: pa.RecordBatch) -> None:
        self._rows.write(batch)

    def prepare(self) -> Receipt:
        spooled = self._rows.finish()
        return Receipt(
            handle=self._task.handle,
            fingerprint=Fingerprint(spooled.rows),
            bytes=spooled.bytes,
        )

    def abort(self) -> None:
        with suppress(OSError):
            self._rows.discard()
