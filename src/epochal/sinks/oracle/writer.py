"""Prepares rows on an executor: Arrow in, array inserts out, one transaction an attempt.

Staged: the rows go into a table of this attempt's own, and the transaction commits. Prepared: they
go into the table itself inside a global transaction, left prepared under the handle's name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from epochal.contract import Task
from epochal.kit.sql.keeping import Kept
from epochal.kit.sql.names import staging_name
from epochal.kit.sql.writing import TableWriter, not_in_steps
from epochal.sinks.oracle import connecting
from epochal.sinks.oracle.catalog import from_json
from epochal.sinks.oracle.connecting import Server
from epochal.sinks.oracle.dialect import DIALECT, XID_FORMAT
from epochal.sinks.oracle.plan import Planned, plan, sent_fields
from epochal.sinks.oracle.sorting import offset_of
from epochal.sinks.oracle.types import microseconds

if TYPE_CHECKING:
    from epochal.sinks.oracle.sink import Oracle

_kept: Kept[Any] = Kept(answers=connecting.answers)
_BATCH_ROWS = 10_000


class OracleWriter(TableWriter[Any, Planned]):
    """What both strategies share: the plan, the insert, and what is told of a bad row."""

    def __init__(self, sink: Oracle, task: Task) -> None:
        super().__init__(sink, task, DIALECT)
        self._sink = sink
        self._table = from_json(self._handout["table"])
        self._plan = plan(sent_fields(task.schema, sink), self._table, sink)

    @property
    def _idle(self) -> Kept[Any]:
        return _kept

    @property
    def _server(self) -> Server:
        return self._sink.server

    def _connect(self) -> Any:
        return connecting.connect(self._server)

    # Sending

    def _send(self, block: pa.Table, first: int) -> None:
        connection = self._get_ready()
        going = self._going()
        rows = pa.table(
            [self._converted(one, block, first) for one, _ in going],
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
                except DIALECT.errors as error:
                    if DIALECT.is_data_error(error):
                        # By the server's own count.
                        offset = offset_of(error)
                        place = None if offset is None else at + offset
                        raise self._refusal(block, place, first, DIALECT.told(error)) from None
                    raise

        self._sorted("insert", insert)

    def _convert(self, one: Planned, values: pa.Array) -> pa.Array:
        return one.sent.convert(values)

    def _unfitting(self, one: Planned, values: pa.Array) -> Iterator[tuple[pa.Array, str]]:
        column = one.column
        data_type = "" if column is None else column.data_type
        if one.sent.kind == "float" and data_type in {"NUMBER", "FLOAT"}:
            yield pc.invert(pc.is_finite(values)), "a NUMBER is no NaN and no infinity"
        if column is not None and column.is_not_null and one.sent.kind == "text":
            why = f'column "{column.name}" is NOT NULL, and Oracle takes it for null'
            yield pc.equal(values, ""), why
        fraction = 0 if data_type == "DATE" else 6 if column is None else column.scale
        if one.sent.kind == "timestamp" and fraction is not None and fraction < 6:
            yield (
                not_in_steps(microseconds(values), 10 ** (6 - fraction)),
                f"the column is {data_type}({fraction}), which would cut the second",
            )


class StagedWriter(OracleWriter):
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
        _kept.keep(self._server, connection)


class PreparedWriter(OracleWriter):
    def _begin(self, connection: Any) -> None:
        connection.tpc_begin(connection.xid(XID_FORMAT, staging_name(self._task.handle), ""))

    def _finish(self, connection: Any) -> None:
        self._sorted("write the ledger", lambda: self._run(connection, *self._ledger_row()))
        self._sorted("prepare", lambda: _prepare(connection), is_commit=True)
        _kept.close(connection)


def _prepare(connection: Any) -> None:
    connection.tpc_end()
    connection.tpc_prepare()
