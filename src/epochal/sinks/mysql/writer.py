"""Prepares rows on an executor: Arrow in, LOAD DATA LOCAL from memory, one transaction an attempt.

Staged: the rows go into a table of this attempt's own, and the transaction commits: durable and in
nobody's way. Prepared: they go into the table itself inside an XA transaction, which is left
prepared under the handle's name; its connection is closed, as nobody else can end it before.

LOAD DATA LOCAL turns errors into warnings, and cuts or skips what it can't take: so a load with a
single warning, or that brought fewer rows than were sent, is refused, with the row named.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from epochal.contract import Task
from epochal.errors import EpochalError, Misconfigured, RowRejected
from epochal.sinks.mysql import connecting
from epochal.sinks.mysql.catalog import from_json
from epochal.sinks.mysql.connecting import Link
from epochal.sinks.mysql.dialect import DIALECT
from epochal.sinks.mysql.plan import Planned, plan, sent_fields
from epochal.sinks.mysql.sorting import ERRORS, is_lock_wait, sorted_error
from epochal.sinks.mysql.types import TEXT, microseconds
from epochal.sinks.sql.buffer import Buffer, BufferLimits
from epochal.sinks.sql.keeping import Kept
from epochal.sinks.sql.ledger import Ledger
from epochal.sinks.sql.names import staging_name
from epochal.sinks.sql.pressure import Pressure
from epochal.terms import Fingerprint, Identity, Receipt

if TYPE_CHECKING:
    from epochal.sinks.mysql.sink import MySQL

_kept: Kept[Link] = Kept(answers=connecting.answers)
_AT_ROW = re.compile(r"at row (\d+)")
_NULL = "\\N"


class MySQLWriter(ABC):
    """What both strategies share: the connection, the buffer, and what is told of a bad row."""

    def __init__(self, sink: MySQL, task: Task) -> None:
        self._sink = sink
        self._task = task
        self._link: Link | None = None
        if not isinstance(task.handout, Mapping):
            raise Misconfigured(
                f"{self._where()}: the driver handed nothing out for this epoch",
                "writers need what begin() returns",
            )
        handout: Mapping[str, Any] = task.handout
        self._identity = Identity(
            pipeline=handout["pipeline"],
            uid=task.handle.uid,
            sink=sink.name,
            generation=task.handle.generation,
            run=handout["run"],
        )
        self._table = from_json(handout["table"])
        self._plan = plan(sent_fields(task.schema, sink), self._table, sink)
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
            if self._link is not None:
                self._finish(self._link)
                self._link = None
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
        if self._link is not None:
            _kept.close(self._link)
            self._link = None

    # For each strategy to say

    @abstractmethod
    def _begin(self, link: Link) -> None:
        """What goes before the rows."""

    @abstractmethod
    def _place(self) -> str:
        """The table that the rows are loaded into, quoted."""

    @abstractmethod
    def _column(self, one: Planned) -> str | None:
        """The column of that table for a field; None where the field does not go there."""

    @abstractmethod
    def _finish(self, link: Link) -> None:
        """Make durable what was loaded, and let the connection go."""

    # Sending

    def _get_ready(self) -> Link:
        """A connection with an open transaction; made with the first block."""
        if self._link is None:
            server = self._sink.server
            self._link = link = _kept.take(
                server,
                lambda: connecting.connect(server),
                idle_max_s=server.idle_max_s,
                lifetime_max_s=server.lifetime_max_s,
            )
            self._sorted("begin", lambda: self._begin(link))
        return self._link

    def _send(self, block: pa.Table, first: int) -> None:
        """Load one block; its first row is row `first` of this task."""
        link = self._get_ready()
        going = [(one, name) for one in self._plan if (name := self._column(one)) is not None]
        columns = [self._as_text(one, block.column(one.field), first) for one, _ in going]
        statement = _load_statement(self._place(), going)
        data = _rows_of(columns)
        arrived, warnings = self._sorted("load", lambda: link.load(statement, data))
        if warnings or arrived != block.num_rows:
            raise self._refused(link, block, first, arrived)

    def _as_text(self, one: Planned, values: pa.ChunkedArray, first: int) -> pa.Array:
        whole = values.combine_chunks()
        if isinstance(whole, pa.ChunkedArray):
            whole = (
                pa.concat_arrays(whole.chunks) if whole.num_chunks else pa.array([], values.type)
            )
        self._require_fitting(one, whole, first)
        try:
            return one.sent.to_text(whole)
        except pa.ArrowInvalid as error:
            raise RowRejected(
                f'{self._where()}: a value of "{one.field}" does not fit: {error}',
                "cast it in the query",
            ) from None

    def _require_fitting(self, one: Planned, values: pa.Array, first: int) -> None:
        """What the server would take, and change without a word."""
        column = one.column
        if one.sent.kind == "float":
            odd = pc.invert(pc.is_finite(values))
            self._require_none(odd, one, values, first, "MySQL has no NaN and no infinities")
        if column is None:
            return
        is_delete_stream = self._sink.write_mode.delete_when is not None
        if column.is_not_null and not is_delete_stream and values.null_count:
            self._require_none(
                values.is_null(), one, values, first, f'column "{column.name}" is NOT NULL'
            )
        is_cut = column.data_type in {"datetime", "timestamp", "time"} and column.scale < 6
        if one.sent.kind in {"timestamp", "time"} and is_cut:
            step = 10 ** (6 - column.scale)
            counted = microseconds(values)
            # Arrow has no remainder: whole steps, times the step, give the value back or don't.
            rest = pc.subtract(counted, pc.multiply(pc.divide(counted, step), step))
            self._require_none(
                pc.not_equal(rest, 0),
                one,
                values,
                first,
                f'column "{column.name}" is {column.ddl}, which would cut the second',
            )

    def _require_none(
        self, bad: pa.Array, one: Planned, values: pa.Array, first: int, why: str
    ) -> None:
        place = pc.index(pc.fill_null(bad, False), True).as_py()
        if place >= 0:
            raise RowRejected(
                f'{self._where()}, row {first + place}: field "{one.field}" is '
                f"{values[place].as_py()}: {why}",
                "mend it in the query or with where=, or alter the column",
            )

    def _refused(self, link: Link, block: pa.Table, first: int, arrived: int) -> EpochalError:
        """Which row it was, from the server's first warning."""
        with link.cursor() as cursor:
            cursor.execute("SHOW WARNINGS LIMIT 1")
            told = cursor.fetchone()
        if told is None:
            return RowRejected(
                f"{self._where()}: {arrived} of {block.num_rows} rows arrived, and no warning says "
                "why",
                "a trigger may have skipped rows",
            )
        _, number, words = told
        found = _AT_ROW.search(words)
        named = ""
        if found is not None and 0 < int(found[1]) <= block.num_rows:
            place = int(found[1]) - 1
            row = block.slice(place, 1).to_pylist()[0]
            shown = json.dumps(row, default=str, ensure_ascii=False)[:300]
            named = f", row {first + place} {shown}"
        return RowRejected(
            f"{self._where()}{named}: {words} [{number}]",
            "mend the row in the query or with where=, or alter the column",
        )

    def _where(self) -> str:
        handle = self._task.handle
        return f"{self._sink.table}, epoch {handle.epoch}, partition {handle.partition}"

    def _run(self, link: Link, *statements: str) -> None:
        with link.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)

    def _sorted(self, verb: str, call: Callable[[], Any], *, is_commit: bool = False) -> Any:
        try:
            return call()
        except ERRORS as error:
            self._pressure.failed(is_lock_wait=is_lock_wait(error))
            doing = f"{self._where()}: {verb}"
            raise sorted_error(error, doing, is_commit=is_commit) from None


class StagedWriter(MySQLWriter):
    def _place(self) -> str:
        return DIALECT.quote(self._sink.meta, staging_name(self._task.handle))

    def _column(self, one: Planned) -> str:
        return one.field

    def _begin(self, link: Link) -> None:
        columns = ", ".join(
            f"{DIALECT.quote(one.field)} {one.staging_ddl} NULL" for one in self._plan
        )
        at = DIALECT.quote(DIALECT.at)
        # One row of a private table can't break a key: without the checks an empty table is
        # filled page by page.
        self._run(
            link,
            f"CREATE TABLE {self._place()} ({at} BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,"
            f" {columns}) ENGINE=InnoDB ROW_FORMAT=DYNAMIC",
            "SET SESSION unique_checks = 0, foreign_key_checks = 0",
            "START TRANSACTION",
        )

    def _finish(self, link: Link) -> None:
        self._sorted("commit staging", lambda: self._run(link, "COMMIT"), is_commit=True)
        _kept.keep(self._sink.server, link)


class PreparedWriter(MySQLWriter):
    @property
    def _xid(self) -> str:
        return DIALECT.literal(staging_name(self._task.handle))

    def _place(self) -> str:
        return DIALECT.quote(self._table.schema, self._table.name)

    def _column(self, one: Planned) -> str | None:
        return None if one.column is None else one.column.name

    def _begin(self, link: Link) -> None:
        self._run(
            link, "SET SESSION unique_checks = 1, foreign_key_checks = 1", f"XA START {self._xid}"
        )

    def _finish(self, link: Link) -> None:
        ledger = Ledger(schema=self._sink.meta, identity=self._identity, dialect=DIALECT)
        rows = Fingerprint(self._buffer.metrics.rows)
        receipt = Receipt(handle=self._task.handle, fingerprint=rows)
        statements = (*ledger.record([receipt]), f"XA END {self._xid}")
        self._sorted("write the ledger", lambda: self._run(link, *statements))
        prepare = f"XA PREPARE {self._xid}"
        self._sorted("prepare", lambda: self._run(link, prepare), is_commit=True)
        _kept.close(link)


def _load_statement(place: str, going: list[tuple[Planned, str]]) -> str:
    read, made = [], []
    for number, (one, column) in enumerate(going):
        name = DIALECT.quote(column)
        if one.expression is None:
            read.append(name)
        else:
            read.append(f"@v{number}")
            made.append(f"{name} = {one.expression.format(f'@v{number}')}")
    return (
        f"LOAD DATA LOCAL INFILE 'epochal' INTO TABLE {place} CHARACTER SET utf8mb4"
        " FIELDS TERMINATED BY '\\t' ESCAPED BY '\\\\' LINES TERMINATED BY '\\n'"
        f" ({', '.join(read)})" + (f" SET {', '.join(made)}" if made else "")
    )


def _rows_of(columns: list[pa.Array]) -> memoryview:
    """Tabs between, a newline after each row. What Arrow joined lies in one buffer."""

    def joined(parts: list[Any], between: str) -> pa.Array:
        return pc.binary_join_element_wise(
            *parts, pa.scalar(between, TEXT), null_handling="replace", null_replacement=_NULL
        )

    last = joined([columns[-1], pa.scalar("", TEXT)], "\n")
    lines = joined([*columns[:-1], last], "\t") if len(columns) > 1 else last
    data = lines.buffers()[2]
    if data is None:
        return memoryview(b"")
    return memoryview(data)[: pc.sum(pc.binary_length(lines)).as_py() or 0]
