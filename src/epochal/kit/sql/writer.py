"""The base of writers into tables: the buffer, the connection, and errors that name a row.

How blocks of rows are sent (COPY, LOAD DATA, array inserts) is each database's own.

A sink with `on_reject=<sink>` also stages rows that its columns can't hold: as JSON text and with
the reason, in two columns of their own (`UNFIT`). They are durable with the other rows, nothing is
applied from them, and the receipt reports their number.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from epochal.contract import Task
from epochal.errors import EpochalError, Misconfigured, RowRejected, TryAgain
from epochal.kit.sql.backpressure import Pressure
from epochal.kit.sql.buffer import Buffer, BufferLimits
from epochal.kit.sql.client import IdleConnections
from epochal.kit.sql.dialect import Dialect
from epochal.kit.sql.errors import BAD_ROWS
from epochal.kit.sql.ledger_rows import LedgerRows
from epochal.kit.sql.names import staging_name
from epochal.kit.sql.rejects import row_text, shown_rows, too_many
from epochal.kit.sql.table_sink import TableSink
from epochal.terms import Fingerprint, Identity, Json, Receipt

TASK_IDLE_MAX_S = 3600
"""How long the server waits for the next rows of a task, which may be slow to compute."""
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
        """Its name in the rows that arrive."""

    @property
    def column(self) -> Named | None: ...


C = TypeVar("C")
P = TypeVar("P", bound=Planned)


class BlockWriter(ABC, Generic[C]):
    """One attempt of one task: rows collected into blocks, all sent over one connection."""

    def __init__(self, sink: TableSink, task: Task, dialect: Dialect) -> None:
        self._declared = sink
        self._task = task
        self._dialect = dialect
        self._unfit_rows = 0
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
                **self._staged_at(),
                "unfit": self._unfit_rows,
                "blocks": metrics.blocks,
                "efficiency": round(metrics.efficiency(self._limits), 3),
                "held_back_s": round(metrics.held_back_s, 3),
            },
        )

    def abort(self) -> None:
        """Closing the connection rolls back everything that is not prepared."""
        self._buffer.close()
        if self._connection is not None:
            self._close(self._connection)
            self._connection = None

    @abstractmethod
    def _get_ready(self) -> C:
        """A connection that rows can be sent over; opened with the first block."""

    @abstractmethod
    def _send(self, block: pa.Table, first: int) -> None:
        """Send one block; its first row is row `first` of this task."""

    @abstractmethod
    def _finish(self, connection: C) -> None:
        """Make durable what was sent, and keep or close the connection."""

    @abstractmethod
    def _close(self, connection: C) -> None: ...

    def _staged_at(self) -> Mapping[str, Json]:
        """Where the rows wait, for the receipt: what `Staging.taking` needs."""
        return {}

    @property
    def _given(self) -> Mapping[str, Any]:
        """What `Committer.begin` returned."""
        if not isinstance(self._task.handout, Mapping):
            raise Misconfigured(
                f"{self._where()}: the driver handed nothing out for this epoch",
                "writers need what Committer.begin() returns",
            )
        return self._task.handout

    def _writes_for(self) -> Identity:
        """The identity that the ledger row is written under."""
        return Identity(
            pipeline=self._given["pipeline"],
            uid=self._task.handle.uid,
            sink=self._declared.name,
            generation=self._task.handle.generation,
            run=self._given["run"],
        )

    @property
    def _is_staged(self) -> bool:
        return self._declared.strategy == "staged"

    def _ledger_row(self) -> list[str]:
        """This attempt's own proof, for the transaction that holds its rows."""
        schema, identity = self._declared.meta, self._writes_for()
        ledger = LedgerRows(schema=schema, identity=identity, dialect=self._dialect)
        rows = Fingerprint(self._buffer.metrics.rows)
        return ledger.record([Receipt(handle=self._task.handle, fingerprint=rows)])

    # Rows that no column can hold

    @property
    def _keeps_unfit(self) -> bool:
        return self._is_staged and self._declared.rejects_to is not None

    def _keep_unfit(
        self, connection: C, rows: Mapping[int, Mapping[str, object]], reasons: Mapping[int, str]
    ) -> None:
        """Stage these rows as text, each under its number in this task, with the reason."""
        # In ASCII, as the server's encoding may lack characters of theirs.
        texts = {number: row_text(row, is_ascii=True) for number, row in sorted(rows.items())}
        kept = [(number, text, reasons[number]) for number, text in texts.items()]
        limit = self._declared.rejects_max
        self._unfit_rows += len(kept)
        if self._unfit_rows > limit:
            _, text, reason = kept[0]
            raise too_many(self._where(), self._declared.table, limit, f"row {text}: {reason}")
        self._classified("keep unfit rows", lambda: self._insert_unfit(connection, kept))

    @abstractmethod
    def _insert_unfit(self, connection: C, rows: Sequence[tuple[int, str, str]]) -> None:
        """Insert numbers, texts and reasons."""

    # Errors

    def _classified(self, verb: str, call: Callable[[], Any], *, is_commit: bool = False) -> Any:
        try:
            return call()
        except EpochalError:
            raise
        except Exception as error:
            if not self._dialect.is_from_database(error):
                raise
            self._pressure.failed(is_lock_wait=self._dialect.is_lock_wait(error))
            doing = f"{self._where()}: {verb}"
            raise self._dialect.classify(error, doing, is_commit=is_commit) from None

    def _where(self) -> str:
        handle = self._task.handle
        return f"{self._declared.table}, epoch {handle.epoch}, partition {handle.partition}"


class TableWriter(BlockWriter[C], Generic[C, P]):
    """A writer that converts each column by a plan before it is sent."""

    _table: Located
    _plan: Sequence[P]

    def __init__(self, sink: TableSink, task: Task, dialect: Dialect) -> None:
        super().__init__(sink, task, dialect)
        self._handout = self._given
        self._staging_table = staging_name(task.handle)

    def _close(self, connection: C) -> None:
        self._idle.close(connection)

    # Of each database and strategy

    @property
    @abstractmethod
    def _idle(self) -> IdleConnections[Any]:
        """Connections of earlier tasks."""

    @property
    @abstractmethod
    def _server(self) -> object:
        """The key that they are kept under."""

    @abstractmethod
    def _connect(self) -> C:
        """A new connection."""

    @abstractmethod
    def _begin(self, connection: C) -> None:
        """The statements before the rows."""

    @abstractmethod
    def _unfitting(self, one: P, values: pa.Array) -> Iterator[tuple[pa.Array, str]]:
        """Values that the server would silently change, and the reason."""

    @abstractmethod
    def _convert(self, one: P, values: pa.Array) -> pa.Array:
        """Values as they are sent."""

    # Shared

    def _get_ready(self) -> C:
        if self._connection is None:
            self._connection = connection = self._idle.take(
                self._server,
                self._connect,
                idle_max_s=self._declared.idle_max_s,
                lifetime_max_s=self._declared.lifetime_max_s,
            )
            self._classified("begin", lambda: self._begin(connection))
        return self._connection

    def _run(self, connection: Any, *statements: str) -> None:
        with connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)

    def _ask(self, connection: Any, statement: str) -> Sequence[Sequence[Any]]:
        with connection.cursor() as cursor:
            cursor.execute(statement)
            rows: Sequence[Sequence[Any]] = cursor.fetchall()
            return rows

    def _require_layout(self, connection: Any) -> None:
        """Rows that are in the table hold a lock under which nobody alters it."""

        schema, name = self._table.schema, self._table.name
        query = partial(self._ask, connection)
        if self._dialect.layout(query, schema, name) != self._handout["layout"]:
            raise TryAgain(
                f"{self._where()}: the columns of {schema}.{name} were altered while rows were "
                "written",
                "the epoch is written again to its new columns",
            )

    def _table_sent_to(self) -> str:
        """Quoted: a staging table, or the table itself."""
        if self._is_staged:
            return self._dialect.quote(self._declared.staging_schema, self._staging_table)
        return self._dialect.quote(self._table.schema, self._table.name)

    def _sent_columns(self) -> list[tuple[P, str]]:
        """What is sent, and its column there: only staging has one for every field."""
        if self._is_staged:
            return [(one, one.field) for one in self._plan]
        return [(one, one.column.name) for one in self._plan if one.column is not None]

    def _converted(self, one: P, block: pa.Table, first: int) -> pa.Array:
        """A column as it is sent; `RowRejected` names the first row that does not fit."""
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

    def _refusal(self, block: pa.Table, place: int | None, first: int, reason: str) -> RowRejected:
        """The error for a row that the server refuses, named where its place is known."""
        named = ""
        if place is not None and 0 <= place < block.num_rows:
            row = shown_rows(block.slice(place, 1))[0]
            shown = json.dumps(row, default=str, ensure_ascii=False)[:_SHOWN_CHARS_MAX]
            named = f", row {first + place} {shown}"
        return RowRejected(
            f"{self._where()}{named}: {reason}",
            f"{BAD_ROWS}; or alter the column",
        )

    def _unfit_values(self, block: pa.Table) -> dict[int, str]:
        """The places of rows whose values the server would silently change, with the reasons."""
        reasons: dict[int, str] = {}
        for one in self._plan:
            values = whole_column(block.column(one.arrives_as))
            for bad, why in self._unfitting(one, values):
                for place in pc.indices_nonzero(bad).to_pylist():
                    value = _shown_value(values, place)
                    reasons.setdefault(place, f'field "{one.arrives_as}" is {value}: {why}')
        return reasons

    def _keep_places(
        self, connection: C, block: pa.Table, first: int, reasons: Mapping[int, str]
    ) -> None:
        """Stage rows of a block as text, by their places in it."""
        places = sorted(reasons)
        fields = list(dict.fromkeys(one.arrives_as for one in self._plan))
        rows = shown_rows(block.select(fields).take(places))
        numbers = [first + place for place in places]
        by_number = {first + place: reason for place, reason in reasons.items()}
        self._keep_unfit(connection, dict(zip(numbers, rows, strict=True)), by_number)

    def _require_none(
        self, bad: pa.Array, field: str, values: pa.Array, first: int, why: str
    ) -> None:
        """`RowRejected` with the first row that is one of these."""
        places = pc.indices_nonzero(bad)
        if len(places):
            place = places[0].as_py()
            raise RowRejected(
                f'{self._where()}, row {first + place}: field "{field}" is '
                f"{_shown_value(values, place)}: {why}",
                f"{BAD_ROWS}; or alter the column",
            )


def _shown_value(values: pa.Array, place: int) -> object:
    return shown_rows(pa.table([values.slice(place, 1)], names=["value"]))[0]["value"]


def whole_column(values: pa.ChunkedArray) -> pa.Array:
    """One array, whatever chunks it came in."""
    whole = values.combine_chunks()
    return pa.concat_arrays(whole.chunks) if isinstance(whole, pa.ChunkedArray) else whole
