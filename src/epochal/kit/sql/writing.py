"""What writers of rows into tables share: the buffer, the connection, and what is told of a row."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from epochal.contract import Task
from epochal.errors import Misconfigured, RowRejected
from epochal.kit.sql.buffer import Buffer, BufferLimits
from epochal.kit.sql.declaring import TableSink
from epochal.kit.sql.dialect import Dialect
from epochal.kit.sql.keeping import Kept
from epochal.kit.sql.ledger import Ledger
from epochal.kit.sql.names import staging_name
from epochal.kit.sql.pressure import Pressure
from epochal.terms import Fingerprint, Identity, Receipt

_SHOWN_CHARS_MAX = 300


class Named(Protocol):
    @property
    def name(self) -> str: ...


class Located(Named, Protocol):
    @property
    def schema(self) -> str: ...


class Planned(Protocol):
    """One field that travels, and the column that takes it, if there is one."""

    @property
    def field(self) -> str: ...

    @property
    def arrives_as(self) -> str:
        """What the rows that come call it."""

    @property
    def column(self) -> Named | None: ...


C = TypeVar("C")
P = TypeVar("P", bound=Planned)


class BlockWriter(ABC, Generic[C]):
    """One attempt of one task: rows gathered into blocks, all sent by one connection."""

    def __init__(self, sink: TableSink, task: Task) -> None:
        self._declared = sink
        self._task = task
        self._connection: C | None = None
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

    @abstractmethod
    def _get_ready(self) -> C:
        """A connection that rows can be sent by; opened with the first block."""

    @abstractmethod
    def _send(self, block: pa.Table, first: int) -> None:
        """Send one block; its first row is row `first` of this task."""

    @abstractmethod
    def _finish(self, connection: C) -> None:
        """Make durable what was sent, and let the connection go."""

    @abstractmethod
    def _close(self, connection: C) -> None: ...

    @property
    def _given(self) -> Mapping[str, Any]:
        """What the driver handed out."""
        if not isinstance(self._task.handout, Mapping):
            raise Misconfigured(
                f"{self._where()}: the driver handed nothing out for this epoch",
                "writers need what begin() returns",
            )
        return self._task.handout

    def _writes_for(self) -> Identity:
        """Who the rows are written for: a ledger is kept by name."""
        return Identity(
            pipeline=self._given["pipeline"],
            uid=self._task.handle.uid,
            sink=self._declared.name,
            generation=self._task.handle.generation,
            run=self._given["run"],
        )

    def _where(self) -> str:
        handle = self._task.handle
        return f"{self._declared.table}, epoch {handle.epoch}, partition {handle.partition}"


class TableWriter(BlockWriter[C], Generic[C, P]):
    """Into a database whose connections are kept in the task's process from epoch to epoch."""

    _table: Located
    _plan: Sequence[P]

    def __init__(self, sink: TableSink, task: Task, dialect: Dialect) -> None:
        super().__init__(sink, task)
        self._dialect = dialect
        self._handout = self._given

    def _close(self, connection: C) -> None:
        self._idle.close(connection)

    # For each database and strategy to say

    @property
    @abstractmethod
    def _idle(self) -> Kept[Any]:
        """Connections of earlier tasks."""

    @property
    @abstractmethod
    def _server(self) -> object:
        """What they go by."""

    @abstractmethod
    def _connect(self) -> C:
        """A new connection."""

    @abstractmethod
    def _begin(self, connection: C) -> None:
        """What goes before the rows."""

    @abstractmethod
    def _unfitting(self, one: P, values: pa.Array) -> Iterator[tuple[pa.Array, str]]:
        """Values that the server would take, and change without a word; and why it would."""

    @abstractmethod
    def _convert(self, one: P, values: pa.Array) -> pa.Array:
        """Values as they travel."""

    # Shared

    def _get_ready(self) -> C:
        if self._connection is None:
            self._connection = connection = self._idle.take(
                self._server,
                self._connect,
                idle_max_s=self._declared.idle_max_s,
                lifetime_max_s=self._declared.lifetime_max_s,
            )
            self._sorted("begin", lambda: self._begin(connection))
        return self._connection

    def _run(self, connection: Any, *statements: str) -> None:
        with connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)

    @property
    def _is_staged(self) -> bool:
        return self._declared.strategy == "staged"

    def _place(self) -> str:
        """The table that the rows are sent to, quoted: one of this attempt's own, or the table."""
        if self._is_staged:
            return self._dialect.quote(self._declared.meta, staging_name(self._task.handle))
        return self._dialect.quote(self._table.schema, self._table.name)

    def _going(self) -> list[tuple[P, str]]:
        """What is sent, and to which column there: only staging has one for every field."""
        if self._is_staged:
            return [(one, one.field) for one in self._plan]
        return [(one, one.column.name) for one in self._plan if one.column is not None]

    def _converted(self, one: P, block: pa.Table, first: int) -> pa.Array:
        """A column as it travels, or the first row named that can't."""
        values = whole_column(block.column(one.arrives_as))
        for bad, why in self._unfitting(one, values):
            self._require_none(bad, one.arrives_as, values, first, why)
        try:
            return self._convert(one, values)
        except pa.ArrowInvalid as error:
            raise RowRejected(
                f'{self._where()}: a value of "{one.field}" does not fit: {error}',
                "cast it in the query",
            ) from None

    def _refusal(self, block: pa.Table, place: int | None, first: int, told: str) -> RowRejected:
        """A row that the server refuses, shown where its place in the block is known."""
        named = ""
        if place is not None and 0 <= place < block.num_rows:
            row = block.slice(place, 1).to_pylist()[0]
            shown = json.dumps(row, default=str, ensure_ascii=False)[:_SHOWN_CHARS_MAX]
            named = f", row {first + place} {shown}"
        return RowRejected(
            f"{self._where()}{named}: {told}",
            "mend the row in the query or with where=, or alter the column",
        )

    def _ledger_row(self) -> list[str]:
        """This attempt's own proof, for the transaction that holds its rows."""
        schema, identity = self._declared.meta, self._writes_for()
        ledger = Ledger(schema=schema, identity=identity, dialect=self._dialect)
        rows = Fingerprint(self._buffer.metrics.rows)
        return ledger.record([Receipt(handle=self._task.handle, fingerprint=rows)])

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

    def _sorted(self, verb: str, call: Callable[[], Any], *, is_commit: bool = False) -> Any:
        try:
            return call()
        except self._dialect.errors as error:
            self._pressure.failed(is_lock_wait=self._dialect.is_lock_wait(error))
            doing = f"{self._where()}: {verb}"
            raise self._dialect.sort(error, doing, is_commit=is_commit) from None


def not_in_steps(counted: pa.Array, step: int) -> pa.Array:
    """Which of these numbers are no multiples of a step."""
    # Arrow has no remainder: whole steps, times the step, give the value back or don't.
    return pc.not_equal(pc.multiply(pc.divide(counted, step), step), counted)


def whole_column(values: pa.ChunkedArray) -> pa.Array:
    """One array, whatever chunks it came in."""
    whole = values.combine_chunks()
    return pa.concat_arrays(whole.chunks) if isinstance(whole, pa.ChunkedArray) else whole
