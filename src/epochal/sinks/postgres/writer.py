"""Prepares rows on an executor: rows in, binary COPY out, one transaction per attempt.

Staged: the rows go into a slot (`slots`), and the transaction commits: durable and without locks
that others wait for. Prepared: they go into the table itself, or through a slot where a column's
type needs the server's cast, and the transaction is left prepared under the handle's name; attempts
that could wait for each other's keys stage their rows all the same (`prepares`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from epochal.contract import Task
from epochal.errors import EpochalError, Misconfigured, RowRejected, TryAgain
from epochal.kit.sql.apply import Apply, Source
from epochal.kit.sql.dialect import UNFIT
from epochal.kit.sql.names import staging_name
from epochal.kit.sql.rejects import shown_rows
from epochal.kit.sql.writer import TASK_IDLE_MAX_S, BlockWriter
from epochal.sinks.postgres.client import (
    BEGIN,
    ArrowConnection,
    BytesConnection,
    Server,
    TaskConnection,
)
from epochal.sinks.postgres.copy_format import read_row, rows_with_nul
from epochal.sinks.postgres.dialect import DIALECT
from epochal.sinks.postgres.errors import TOO_MANY_PREPARED, UNSUPPORTED
from epochal.sinks.postgres.slots import Claiming, Shape, column_shape, pool_of, shape_of
from epochal.sinks.postgres.types import (
    Sent,
    Table,
    arrow_of,
    from_json,
    may_go_direct,
    plan,
    sent_fields,
)
from epochal.terms import Json

if TYPE_CHECKING:
    from epochal.sinks.postgres.sink import Postgres

_SAVEPOINT = "epochal_block"
_FIRST_US = 946_684_800_000_000 - 2**63
"""What is counted from the year 2000 as the lowest number: for PostgreSQL, minus infinity."""
_NUL = "holds the character NUL (\\u0000), which PostgreSQL can't store in text"


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """One field on its way into a column."""

    field: str
    column: str
    sent: Sent
    wanted: pa.DataType | None = None
    """What the column reads, where numbers must be widened or narrowed."""

    def values(self, block: pa.Table) -> pa.ChunkedArray:
        values = block.column(self.field)
        if self.sent.convert is not None:
            values = self.sent.convert(values)
        return values if self.wanted in {None, values.type} else values.cast(self.wanted)


class Sending(Protocol):
    """How blocks leave a task: as columns, which are encoded here, or as bytes of whole rows."""

    def connect(self, server: Server, application: str) -> TaskConnection[Any]: ...

    def send(self, connection: Any, schema: str, table: str, block: pa.Table) -> None:
        """Copy one block; `pa.ArrowInvalid` where a value does not fit its column."""

    def nuls(self, block: pa.Table) -> Iterator[tuple[str, int]]:
        """Fields and rows of the block that hold the character NUL."""

    def rows(self, block: pa.Table) -> list[dict[str, object]]:
        """Rows of a block, for people."""


class SendingColumns:
    def __init__(self, copied: Sequence[Copied]) -> None:
        self._copied = copied

    connect = ArrowConnection

    def send(self, connection: ArrowConnection, schema: str, table: str, block: pa.Table) -> None:
        columns = {one.column: one.values(block) for one in self._copied}
        for name, values in columns.items():
            _require_countable(name, values)
        connection.ingest(schema, table, pa.table(columns))

    def nuls(self, block: pa.Table) -> Iterator[tuple[str, int]]:
        for one in self._copied:
            values = block.column(one.field)
            if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
                found = pc.match_substring(values, "\0")
                for row in pc.indices_nonzero(found).to_pylist():
                    yield one.field, int(row)

    def rows(self, block: pa.Table) -> list[dict[str, object]]:
        return shown_rows(block.select([one.field for one in self._copied]))


class SendingBytes:
    def __init__(self, copied: Sequence[Copied]) -> None:
        self._copied = copied

    connect = BytesConnection

    def send(self, connection: BytesConnection, schema: str, table: str, block: pa.Table) -> None:
        columns = ", ".join(DIALECT.quote(one.column) for one in self._copied)
        connection.copy(
            f"COPY {DIALECT.quote(schema, table)} ({columns}) FROM STDIN (FORMAT BINARY)",
            map(_bytes_of, block.column(0).chunks),
        )

    def nuls(self, block: pa.Table) -> Iterator[tuple[str, int]]:
        texts = [place for place, one in enumerate(self._copied) if one.sent.type.base == "text"]
        for place, row in rows_with_nul(block.column(0).to_pylist(), texts):
            yield self._copied[place].field, row

    def rows(self, block: pa.Table) -> list[dict[str, object]]:
        names = [one.field for one in self._copied]
        bases = [one.sent.type.base for one in self._copied]
        return [
            dict(zip(names, read_row(row, bases), strict=True))
            for row in block.column(0).to_pylist()
        ]


def _require_countable(column: str, values: pa.ChunkedArray) -> None:
    """
    PostgreSQL counts from the year 2000: Spark's first moments are before its first number. ADBC
    would report that as an error of the connection.
    """
    if pa.types.is_timestamp(values.type) and values.type.unit == "us":
        first = pc.min(values.cast(pa.int64())).as_py()
        if first is not None and first <= _FIRST_US:
            raise pa.ArrowInvalid(
                f'"{column}" holds a time before 4713 BC, PostgreSQL\'s first year'
            )


def _bytes_of(rows: pa.BinaryArray) -> memoryview:
    """The values of the array, which are adjacent in its buffer."""
    _, offsets, data = rows.buffers()
    if data is None:
        return memoryview(b"")
    first, last = np.frombuffer(offsets, np.int32)[[rows.offset, rows.offset + len(rows)]]
    return memoryview(data)[first:last]


class PostgresWriter(BlockWriter[TaskConnection[Any]]):
    """What both strategies share: the connection, and errors that name a row."""

    def __init__(self, sink: Postgres, task: Task) -> None:
        super().__init__(sink, task, DIALECT)
        self._sink = sink
        self._sent = sent_fields(task.schema, sink)
        self._slot: int | None = None

    # Of each strategy

    @abstractmethod
    def _copied(self) -> list[Copied]:
        """What is sent, in order."""

    @abstractmethod
    def _sent_to(self) -> tuple[str, str]:
        """The schema and table that rows are copied into."""

    @abstractmethod
    def _begin(self, connection: TaskConnection[Any]) -> None:
        """Begin the transaction, up to the rows."""

    @abstractmethod
    def _make_durable(self, connection: TaskConnection[Any]) -> None:
        """The last statements of the transaction."""

    def _finish(self, connection: TaskConnection[Any]) -> None:
        self._make_durable(connection)
        connection.done()

    def _close(self, connection: TaskConnection[Any]) -> None:
        connection.close()

    def _in_staging(self) -> list[Copied]:
        return [Copied(field=name, column=name, sent=one) for name, one in self._sent.items()]

    @property
    def _staging(self) -> tuple[str, str]:
        """The slot of this attempt, once it is claimed."""
        return self._sink.staging_schema, pool_of(self._sink).table(self._slot or 0)

    def _claim(self, connection: TaskConnection[Any], shape: Shape, *, is_listed: bool) -> None:
        """Begin, and claim a slot."""
        claiming = Claiming(
            sink=self._sink,
            pool=pool_of(self._sink),
            shape=shape,
            handle=self._task.handle,
            is_listed=is_listed,
        )
        self._slot = claiming.claim(connection, BEGIN, self._settings)

    @property
    def _settings(self) -> str:
        """With the attempt as the session's name: the driver ends those of attempts that lost."""
        name = staging_name(self._task.handle)
        return self._sink.server.settings(application=name, idle_max_s=TASK_IDLE_MAX_S)

    # Sending

    @cached_property
    def _sending(self) -> Sending:
        return (SendingBytes if self._task.is_packed else SendingColumns)(self._copied())

    def _send(self, block: pa.Table, first: int) -> None:
        connection = self._get_ready()
        if self._keeps_unfit:
            self._send_fitting(connection, block, first)
            return
        why = self._copy(connection, block)
        if why:
            raise self._unfit(block, first, why)

    def _copy(self, connection: TaskConnection[Any], block: pa.Table) -> str:
        """Why the server can't store some row of the block: then nothing was copied."""

        def copy() -> str:
            try:
                self._sending.send(connection, *self._sent_to(), block)
            except pa.ArrowInvalid as error:
                return str(error)
            except Exception as error:
                if DIALECT.is_data_error(error):
                    return DIALECT.text_of(error)
                raise
            return ""

        return str(self._classified("copy", copy))

    def _unfit(self, block: pa.Table, first: int, why: str) -> RowRejected:
        """The error that names the first row with a NUL of each column, where that is the cause."""
        found: dict[str, int] = {}
        for field, row in self._sending.nuls(block):
            found.setdefault(field, first + row)
        if not found:
            return RowRejected(
                f"{self._where()}: a value does not fit its column: {why}",
                "correct it in the query, drop it with where=, or send such rows elsewhere: "
                "on_reject=<sink>",
            )
        named = "; ".join(f'column "{field}", row {row}' for field, row in found.items())
        return RowRejected(
            f"{self._where()}: {named} {_NUL}",
            "take it out in the query (translate(x, '\\u0000', '')), or store the value as binary",
        )

    def _send_fitting(self, connection: TaskConnection[Any], block: pa.Table, first: int) -> None:
        """Copy a block without the rows that the server can't store, which are kept as text."""
        if self._copy_whole(connection, block):
            reasons = {row: f'field "{name}" {_NUL}' for name, row in self._sending.nuls(block)}
            places = [row for row in range(len(block)) if row not in reasons]
            self._copy_halves(connection, block, places, reasons)
            rows = self._sending.rows(block.take(list(reasons)))
            numbers = {first + row: reason for row, reason in reasons.items()}
            self._keep_unfit(connection, dict(zip(numbers, rows, strict=True)), numbers)

    def _copy_halves(
        self,
        connection: TaskConnection[Any],
        block: pa.Table,
        places: Sequence[int],
        reasons: dict[int, str],
    ) -> None:
        """Copy these rows, in their order, without those that the server refuses one by one."""
        is_too_many = len(reasons) > self._sink.rejects_max
        why = "" if is_too_many or not places else self._copy_whole(connection, block.take(places))
        if not why:
            return
        if len(places) == 1:
            reasons[places[0]] = why
            return
        middle = len(places) // 2
        for half in (places[:middle], places[middle:]):
            self._copy_halves(connection, block, half, reasons)

    def _copy_whole(self, connection: TaskConnection[Any], block: pa.Table) -> str:
        """All of it or nothing, in the transaction that stays open; the reason for nothing."""
        self._run(connection, f"SAVEPOINT {_SAVEPOINT}")
        why = self._copy(connection, block)
        if why:
            self._run(connection, f"ROLLBACK TO SAVEPOINT {_SAVEPOINT}")
        self._run(connection, f"RELEASE SAVEPOINT {_SAVEPOINT}")
        return why

    def _insert_unfit(
        self, connection: TaskConnection[Any], rows: Sequence[tuple[int, str, str]]
    ) -> None:
        names = ", ".join(map(DIALECT.quote, UNFIT))
        values = [f"{DIALECT.literal(text)}, {DIALECT.literal(why)}" for _, text, why in rows]
        into = DIALECT.quote(*self._staging)
        connection.execute(f"INSERT INTO {into} ({names}) {DIALECT.values(values)}")

    def _run(self, connection: TaskConnection[Any], statement: str) -> None:
        self._classified("copy", lambda: connection.execute(statement))

    # The connection

    def _get_ready(self) -> TaskConnection[Any]:
        """A connection with an open transaction; made with the first block."""
        return self._connection or self._open()

    def _open(self) -> TaskConnection[Any]:
        name = f"epochal-{self._task.handle.uid}-s{self._task.handle.sink}-task"
        self._connection = connection = self._sending.connect(self._sink.server, name)
        if not connection.is_reused or not self._has_begun(connection):
            self._classified("begin", lambda: self._begin(connection))
        return connection

    def _has_begun(self, connection: TaskConnection[Any]) -> bool:
        """Begin on a kept connection; where it is dead, which shows only now, open another one."""
        try:
            self._begin(connection)
        except EpochalError:
            raise
        except Exception:  # noqa: BLE001  whatever the error is, the other connection meets it, too
            connection.renew()
            return False
        return True

    def _classified(self, verb: str, call: Callable[[], Any], *, is_commit: bool = False) -> Any:
        """ADBC's messages may quote the password."""
        try:
            return super()._classified(verb, call, is_commit=is_commit)
        except EpochalError as error:
            text = self._sink.server.without_secret(error.message)
            if text != error.message:
                raise type(error)(text, error.hint) from None
            raise


class StagedWriter(PostgresWriter):
    def _copied(self) -> list[Copied]:
        return self._in_staging()

    def _sent_to(self) -> tuple[str, str]:
        return self._staging

    def _begin(self, connection: TaskConnection[Any]) -> None:
        self._claim(connection, self._shape(), is_listed=True)

    def _shape(self) -> Shape:
        return shape_of(self._sent, self._sink)

    def _staged_at(self) -> Mapping[str, Json]:
        return {} if self._slot is None else {"slot": self._slot}

    def _make_durable(self, connection: TaskConnection[Any]) -> None:
        self._classified("commit staging", lambda: connection.execute("COMMIT"), is_commit=True)


class ToTable:
    """How rows fit the columns of the table, as the driver read it for this epoch."""

    def __init__(self, sink: Postgres, sent: Mapping[str, Sent], table: Table) -> None:
        self.table = table
        self.plan = plan({name: one.type for name, one in sent.items()}, table, sink)
        self.is_direct = may_go_direct(self.plan, table)
        """Whether rows are sent as the columns keep them; else they are cast from a slot."""
        self._sent = sent

    def copied(self, *, is_staged: bool) -> list[Copied]:
        """Into the table itself, or into a slot with columns of its types, named by the fields."""
        return [
            Copied(
                field=one.field,
                column=one.field if is_staged else one.column.name,
                sent=self._sent[one.field],
                wanted=arrow_of(one.column.type),
            )
            for one in self.plan
        ]

    def shape(self) -> Shape:
        return column_shape(self.plan)


class LateWriter(StagedWriter):
    """
    Under `strategy="prepared"`, an attempt that may find its rows' keys locked, or all prepared
    transactions in use: its rows wait in a slot, and are applied in the rehearsal.
    """

    def __init__(self, sink: Postgres, task: Task) -> None:
        super().__init__(sink, task)
        self._to = ToTable(sink, self._sent, from_json(self._given["table"]))

    def _copied(self) -> list[Copied]:
        return self._to.copied(is_staged=True) if self._to.is_direct else self._in_staging()

    def _shape(self) -> Shape:
        return self._to.shape() if self._to.is_direct else super()._shape()


class PreparedWriter(PostgresWriter):
    def __init__(self, sink: Postgres, task: Task) -> None:
        super().__init__(sink, task)
        to = ToTable(sink, self._sent, from_json(self._given["table"]))
        self._to, self._table, self._is_direct = to, to.table, to.is_direct

    def _copied(self) -> list[Copied]:
        return self._to.copied(is_staged=False) if self._is_direct else self._in_staging()

    def _sent_to(self) -> tuple[str, str]:
        return (self._table.schema, self._table.name) if self._is_direct else self._staging

    def _begin(self, connection: TaskConnection[Any]) -> None:
        if self._is_direct:
            connection.ask(BEGIN, self._settings)
        else:
            self._claim(connection, shape_of(self._sent, self._sink), is_listed=False)

    def _make_durable(self, connection: TaskConnection[Any]) -> None:
        self._classified("apply", lambda: self._apply(connection))
        gid = DIALECT.literal(DIALECT.transaction_name(self._task.handle))
        prepare = f"PREPARE TRANSACTION {gid}"
        try:
            self._classified("prepare", lambda: connection.execute(prepare), is_commit=True)
        except EpochalError as error:
            if f"[{TOO_MANY_PREPARED}]" in error.message:
                # Of others, perhaps, and free in a moment; the check has counted them.
                raise TryAgain(
                    error.message,
                    "all max_prepared_transactions are in use: raise it on the server, a smaller "
                    "tasks_max, or strategy='staged'",
                ) from None
            if f"[{UNSUPPORTED}]" in error.message:
                raise Misconfigured(
                    error.message,
                    "of what triggers do, some can't be prepared (NOTIFY, temporary tables): "
                    "strategy='staged' (the default) has no such limits",
                ) from None
            raise

    def _apply(self, connection: TaskConnection[Any]) -> None:
        if not self._is_direct:
            schema, table = self._staging
            apply = Apply(
                dialect=DIALECT,
                mode=self._sink.write_mode,
                target=self._table.quoted,
                mapped=[one.mapped for one in self._to.plan],
                sources=[Source(schema=schema, table=table, part=self._task.handle.partition)],
                arrived=DIALECT.place,
            )
            for statement in apply.statements():
                connection.execute(statement)
        # The rows hold a lock under which nobody alters the table.
        layout, target = self._given["layout"], (self._table.schema, self._table.name)
        connection.execute(DIALECT.require_layout(layout, *target))
        for statement in self._ledger_row():
            connection.execute(statement)


def prepares(sink: Postgres, task: Task) -> bool:
    """
    Whether an attempt leaves a prepared transaction. Where keys can collide only the first one of a
    task does: a later one would wait for the locks of an attempt that nobody ends.
    """
    if sink.strategy == "staged" or task.handle.partition >= sink.tasks_max:
        return False
    given: Any = task.handout
    return task.is_first or given is None or not from_json(given["table"]).may_collide


def writer_of(sink: Postgres, task: Task) -> PostgresWriter:
    if sink.strategy == "staged":
        return StagedWriter(sink, task)
    return (PreparedWriter if prepares(sink, task) else LateWriter)(sink, task)
