"""What writers of rows into tables share: the buffer, the connection, and what is told of a row."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from epochal.contract import Task
from epochal.errors import Misconfigured, RowRejected
from epochal.sinks.sql.buffer import Buffer, BufferLimits
from epochal.sinks.sql.declaring import TableSink
from epochal.sinks.sql.dialect import Dialect
from epochal.sinks.sql.ledger import Ledger
from epochal.sinks.sql.pressure import Pressure
from epochal.terms import Fingerprint, Identity, Receipt

C = TypeVar("C")


class TableWriter(ABC, Generic[C]):
    """One attempt of one task. A connection is opened with the first block that is sent."""

    def __init__(self, sink: TableSink, task: Task, dialect: Dialect) -> None:
        self._declared = sink
        self._task = task
        self._dialect = dialect
        self._connection: C | None = None
        if not isinstance(task.handout, Mapping):
            raise Misconfigured(
                f"{self._where()}: the driver handed nothing out for this epoch",
                "writers need what begin() returns",
            )
        self._handout: Mapping[str, Any] = task.handout
        self._pressure = Pressure(sink.pressure)
        self._limits = BufferLimits(
            rows=task.limits.buffer_rows,
            bytes=sink.buffer_bytes,
            flush_interval_s=sink.flush_interval_s,
        )
        self._buffer = Buffer(
            self._send, limits=self._limits, pressure=self._pressure, get_ready=self._get_ready
        )

    def write(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        try:
            self._buffer.add(batch)
        except BaseException:
            self.abort()
            raise

    def prepare(self) -> Receipt:
        try:
            self._buffer.drain()
            if self._connection is not None:
                self._finish(self._connection)
                self._connection = None
        except BaseException:
            self.abort()
            raise
        metrics = self._buffer.metrics
        return Receipt(
            handle=self._task.handle,
            fingerprint=Fingerprint(metrics.rows),
            bytes=metrics.bytes,
            token={
                "staged": metrics.rows > 0,
                "blocks": metrics.blocks,
                "efficiency": round(metrics.efficiency(self._limits), 3),
                "held_back_s": round(metrics.held_back_s, 3),
            },
        )

    def abort(self) -> None:
        """Closing the connection is what takes everything back that is not prepared."""
        self._buffer.close()
        if self._connection is not None:
            self._close(self._connection)
            self._connection = None

    # For each database and strategy to say

    @abstractmethod
    def _connect(self) -> C:
        """A connection, kept from an earlier task or new."""

    @abstractmethod
    def _close(self, connection: C) -> None: ...

    @abstractmethod
    def _begin(self, connection: C) -> None:
        """What goes before the rows."""

    @abstractmethod
    def _send(self, block: pa.Table, first: int) -> None:
        """Send one block; its first row is row `first` of this task."""

    @abstractmethod
    def _finish(self, connection: C) -> None:
        """Make durable what was sent, and let the connection go."""

    # Shared

    def _get_ready(self) -> C:
        if self._connection is None:
            self._connection = connection = self._connect()
            self._sorted("begin", lambda: self._begin(connection))
        return self._connection

    def _ledger_row(self) -> list[str]:
        """This attempt's own proof, for the transaction that holds its rows."""
        handle = self._task.handle
        identity = Identity(
            pipeline=self._handout["pipeline"],
            uid=handle.uid,
            sink=self._declared.name,
            generation=handle.generation,
            run=self._handout["run"],
        )
        ledger = Ledger(schema=self._declared.meta, identity=identity, dialect=self._dialect)
        rows = Fingerprint(self._buffer.metrics.rows)
        return ledger.record([Receipt(handle=handle, fingerprint=rows)])

    def _where(self) -> str:
        handle = self._task.handle
        return f"{self._declared.table}, epoch {handle.epoch}, partition {handle.partition}"

    def _require_none(
        self, bad: pa.Array, field: str, values: pa.Array, first: int, why: str
    ) -> None:
        """No row may be one of these; the first that is, is named."""
        place = pc.index(pc.fill_null(bad, False), True).as_py()
        if place >= 0:
            raise RowRejected(
                f'{self._where()}, row {first + place}: field "{field}" is '
                f"{values[place].as_py()}: {why}",
                "mend it in the query or with where=, or alter the column",
            )

    def _require_whole_steps(
        self, counted: pa.Array, step: int, field: str, values: pa.Array, *, first: int, why: str
    ) -> None:
        # Arrow has no remainder: whole steps, times the step, give the value back or don't.
        rest = pc.subtract(counted, pc.multiply(pc.divide(counted, step), step))
        self._require_none(pc.not_equal(rest, 0), field, values, first, why)

    def _sorted(self, verb: str, call: Callable[[], Any], *, is_commit: bool = False) -> Any:
        try:
            return call()
        except self._dialect.errors as error:
            self._pressure.failed(is_lock_wait=self._dialect.is_lock_wait(error))
            doing = f"{self._where()}: {verb}"
            raise self._dialect.sort(error, doing, is_commit=is_commit) from None


def whole_column(values: pa.ChunkedArray) -> pa.Array:
    """One array, whatever chunks it came in."""
    whole = values.combine_chunks()
    return pa.concat_arrays(whole.chunks) if isinstance(whole, pa.ChunkedArray) else whole
