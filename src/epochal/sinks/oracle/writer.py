"""Prepares rows on an executor: Arrow in, array inserts out, one transaction an attempt.

Staged: the rows go into a table of this attempt's own, and the transaction commits. Prepared: they
go into the table itself inside a global transaction, left prepared under the handle's name.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from epochal.contract import Task
from epochal.errors import RowRejected
from epochal.sinks.oracle import connecting
from epochal.sinks.oracle.catalog import from_json
from epochal.sinks.oracle.dialect import DIALECT, XID_FORMAT
from epochal.sinks.oracle.plan import Planned, plan, sent_fields
from epochal.sinks.oracle.sorting import ERRORS, is_data_error, offset_of, told
from epochal.sinks.oracle.types import microseconds
from epochal.sinks.sql.keeping import Kept
from epochal.sinks.sql.names import staging_name
from epochal.sinks.sql.writing import TableWriter, whole_column

if TYPE_CHECKING:
    from epochal.sinks.oracle.sink import Oracle

_kept: Kept[Any] = Kept(answers=connecting.answers)
_BATCH_ROWS = 10_000


class OracleWriter(TableWriter[Any]):
    """What both strategies share: the plan, the insert, and what is told of a bad row."""

    def __init__(self, sink: Oracle, task: Task) -> None:
        super().__init__(sink, task, DIALECT)
        self._sink = sink
        self._table = from_json(self._handout["table"])
        self._plan = plan(sent_fields(task.schema, sink), self._table, sink)

    @abstractmethod
    def _place(self) -> str:
        """The table that the rows are inserted into, quoted."""

    @abstractmethod
    def _column(self, one: Planned) -> str | None:
        """The column of that table for a field; None where the field does not go there."""

    def _connect(self) -> Any:
        server = self._sink.server
        return _kept.take(
            server,
            lambda: connecting.connect(server),
            idle_max_s=server.idle_max_s,
            lifetime_max_s=server.lifetime_max_s,
        )

    def _close(self, connection: Any) -> None:
        _kept.close(connection)

    # Sending

    def _send(self, block: pa.Table, first: int) -> None:
        connection = self._get_ready()
        going = [(one, name) for one in self._plan if (name := self._column(one)) is not None]
        rows = pa.table(
            [self._converted(one, block.column(one.arrives_as), first) for one, _ in going],
            names=[name for _, name in going],
        )
        columns = ", ".join(DIALECT.quote(name) for _, name in going)
        marks = ", ".join(f":{place}" for place in range(1, len(going) + 1))
        statement = f"INSERT INTO {self._place()} ({columns}) VALUES ({marks})"

        def insert() -> None:
            for at in range(0, rows.num_rows, _BATCH_ROWS):
                piece = rows.slice(at, _BATCH_ROWS)
                try:
                    with connection.cursor() as cursor:
                        cursor.executemany(statement, piece)
                except ERRORS as error:
                    if is_data_error(error):
                        raise self._refused(error, block, at, first) from None
                    raise

        self._sorted("insert", insert)

    def _converted(self, one: Planned, values: pa.ChunkedArray, first: int) -> pa.Array:
        whole = whole_column(values)
        self._require_fitting(one, whole, first)
        try:
            return one.sent.convert(whole)
        except pa.ArrowInvalid as error:
            raise RowRejected(
                f'{self._where()}: a value of "{one.field}" does not fit: {error}',
                "cast it in the query",
            ) from None

    def _require_fitting(self, one: Planned, values: pa.Array, first: int) -> None:
        """What the server would take, and change without a word."""
        column, field = one.column, one.arrives_as
        data_type = "" if column is None else column.data_type
        if one.sent.kind == "float" and data_type in {"NUMBER", "FLOAT"}:
            odd = pc.invert(pc.is_finite(values))
            self._require_none(odd, field, values, first, "a NUMBER is no NaN and no infinity")
        if column is not None and column.is_not_null and one.sent.kind == "text":
            why = f'column "{column.name}" is NOT NULL, and Oracle takes it for null'
            self._require_none(pc.equal(values, ""), field, values, first, why)
        fraction = 0 if data_type == "DATE" else 6 if column is None else column.scale
        if one.sent.kind == "timestamp" and fraction is not None and fraction < 6:
            self._require_whole_steps(
                microseconds(values),
                10 ** (6 - fraction),
                field,
                values,
                first=first,
                why=f"the column is {data_type}({fraction}), which would cut the second",
            )

    def _refused(self, error: Exception, block: pa.Table, at: int, first: int) -> RowRejected:
        """Which row it was, by the server's own count."""
        offset, named = offset_of(error), ""
        if offset is not None and at + offset < block.num_rows:
            row = block.slice(at + offset, 1).to_pylist()[0]
            shown = json.dumps(row, default=str, ensure_ascii=False)[:300]
            named = f", row {first + at + offset} {shown}"
        return RowRejected(
            f"{self._where()}{named}: {told(error)}",
            "mend the row in the query or with where=, or alter the column",
        )

    def _run(self, connection: Any, *statements: str) -> None:
        with connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)


class StagedWriter(OracleWriter):
    def _place(self) -> str:
        return DIALECT.quote(self._sink.meta, staging_name(self._task.handle))

    def _column(self, one: Planned) -> str:
        return one.field

    def _begin(self, connection: Any) -> None:
        columns = ", ".join(f"{DIALECT.quote(one.field)} {one.staging_ddl}" for one in self._plan)
        at = DIALECT.quote(DIALECT.at)
        self._run(
            connection,
            f"CREATE TABLE {self._place()} ({at} NUMBER(19) GENERATED ALWAYS AS IDENTITY,"
            f" {columns})",
        )

    def _finish(self, connection: Any) -> None:
        self._sorted("commit staging", connection.commit, is_commit=True)
        _kept.keep(self._sink.server, connection)


class PreparedWriter(OracleWriter):
    def _place(self) -> str:
        return DIALECT.quote(self._table.schema, self._table.name)

    def _column(self, one: Planned) -> str | None:
        return None if one.column is None else one.column.name

    def _begin(self, connection: Any) -> None:
        connection.tpc_begin(connection.xid(XID_FORMAT, staging_name(self._task.handle), ""))

    def _finish(self, connection: Any) -> None:
        self._sorted("write the ledger", lambda: self._run(connection, *self._ledger_row()))
        self._sorted("prepare", lambda: _prepare(connection), is_commit=True)
        _kept.close(connection)


def _prepare(connection: Any) -> None:
    connection.tpc_end()
    connection.tpc_prepare()
