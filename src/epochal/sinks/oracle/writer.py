"""Prepares rows on an executor: Arrow in, array inserts out, one transaction per attempt.

Staged: the rows go into a table of this attempt's own, and the transaction commits. Prepared: they
go into the table itself inside a global transaction, left prepared under the handle's name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import oracledb
import pyarrow as pa
import pyarrow.compute as pc

from epochal.contract import Task
from epochal.kit.sql.client import IdleConnections
from epochal.kit.sql.dialect import UNFIT
from epochal.kit.sql.names import staging_name
from epochal.kit.sql.types import microseconds, not_in_steps, outside_years
from epochal.kit.sql.writer import TableWriter
from epochal.sinks.oracle import client
from epochal.sinks.oracle.client import Server
from epochal.sinks.oracle.dialect import DIALECT, XID_FORMAT
from epochal.sinks.oracle.errors import offset_of
from epochal.sinks.oracle.types import Planned, from_json, plan, sent_fields

if TYPE_CHECKING:
    from epochal.sinks.oracle.sink import Oracle

_connections: IdleConnections[Any] = IdleConnections(answers=client.answers)
_BATCH_ROWS = 10_000


class OracleWriter(TableWriter[Any, Planned]):
    """What both strategies share: the plan, the insert, and errors that name a row."""

    def __init__(self, sink: Oracle, task: Task) -> None:
        super().__init__(sink, task, DIALECT)
        self._sink = sink
        self._table = from_json(self._handout["table"])
        self._plan = plan(sent_fields(task.schema, sink), self._table, sink)

    @property
    def _idle(self) -> IdleConnections[Any]:
        return _connections

    @property
    def _server(self) -> Server:
        return self._sink.server

    def _connect(self) -> Any:
        return client.connect(self._server)

    # Sending

    def _send(self, block: pa.Table, first: int) -> None:
        connection = self._get_ready()
        if not self._keeps_unfit:
            self._insert(connection, block, first)
            return
        reasons = self._unfit_values(block)
        places = [place for place in range(block.num_rows) if place not in reasons]
        if places:
            fitting = block.take(places) if reasons else block
            refused = self._insert(connection, fitting, first)
            reasons |= {places[place]: reason for place, reason in refused.items()}
        if reasons:
            self._keep_places(connection, block, first, reasons)

    def _insert(self, connection: Any, block: pa.Table, first: int) -> dict[int, str]:
        """Insert a block; the places of refused rows with the reasons, where those are kept."""
        sent = self._sent_columns()
        rows = pa.table(
            [self._converted(one, block, first) for one, _ in sent],
            names=[name for _, name in sent],
        )
        columns = ", ".join(DIALECT.quote(name) for _, name in sent)
        marks = ", ".join(f":{place}" for place in range(1, len(sent) + 1))
        statement = f"INSERT INTO {self._table_sent_to()} ({columns}) VALUES ({marks})"
        refused: dict[int, str] = {}

        def insert() -> None:
            for at in range(0, rows.num_rows, _BATCH_ROWS):
                piece = rows.slice(at, _BATCH_ROWS)
                with connection.cursor() as cursor:
                    try:
                        if self._keeps_unfit:
                            cursor.executemany(statement, piece, batcherrors=True)
                            refused.update(_refused(cursor, at))
                        else:
                            cursor.executemany(statement, piece)
                    except DIALECT.errors as error:
                        if DIALECT.is_data_error(error):
                            offset = offset_of(error)
                            place = None if offset is None else at + offset
                            reason = DIALECT.text_of(error)
                            raise self._refusal(block, place, first, reason) from None
                        raise

        self._classified("insert", insert)
        return refused

    def _insert_unfit(self, connection: Any, rows: Sequence[tuple[int, str, str]]) -> None:
        names = ", ".join(map(DIALECT.quote, UNFIT))
        statement = f"INSERT INTO {self._table_sent_to()} ({names}) VALUES (:1, :2)"
        texts = pa.table(
            [[text for _, text, _ in rows], [why for _, _, why in rows]], names=list(UNFIT)
        )
        with connection.cursor() as cursor:
            cursor.executemany(statement, texts)

    def _convert(self, one: Planned, values: pa.Array) -> pa.Array:
        return one.sent.convert(values) if one.sent.convert else values

    def _unfitting(self, one: Planned, values: pa.Array) -> Iterator[tuple[pa.Array, str]]:
        column = one.column
        data_type = "" if column is None else column.data_type
        if one.sent.family == "float" and data_type in {"NUMBER", "FLOAT"}:
            yield pc.invert(pc.is_finite(values)), "a NUMBER is no NaN and no infinity"
        if column is not None and column.is_not_null and one.sent.family == "text":
            why = f'column "{column.name}" is NOT NULL, and Oracle takes it for null'
            yield pc.equal(values, ""), why
        if one.sent.family in {"timestamp", "date"}:
            yield outside_years(values), "Oracle's dates are those of the years 1 to 9999"
        fraction = 0 if data_type == "DATE" else 6 if column is None else column.scale
        if one.sent.family == "timestamp" and fraction is not None and fraction < 6:
            yield (
                not_in_steps(microseconds(values), 10 ** (6 - fraction)),
                f"the column is {data_type}({fraction}), which would truncate the second",
            )


class StagedWriter(OracleWriter):
    def _begin(self, connection: Any) -> None:
        columns = [f"{DIALECT.quote(one.field)} {one.staging_ddl}" for one in self._plan]
        if self._keeps_unfit:
            columns += [f"{DIALECT.quote(name)} CLOB" for name in UNFIT]
        self._run(
            connection,
            f"CREATE TABLE {self._table_sent_to()} ({DIALECT.place} NUMBER(19) GENERATED ALWAYS"
            f" AS IDENTITY, {', '.join(columns)})",
        )

    def _finish(self, connection: Any) -> None:
        self._classified("commit staging", connection.commit, is_commit=True)
        _connections.keep(self._server, connection)


class PreparedWriter(OracleWriter):
    def _begin(self, connection: Any) -> None:
        connection.tpc_begin(connection.xid(XID_FORMAT, staging_name(self._task.handle), ""))

    def _finish(self, connection: Any) -> None:
        self._classified("compare columns", lambda: self._require_layout(connection))
        self._classified("write the ledger", lambda: self._run(connection, *self._ledger_row()))
        self._classified("prepare", lambda: _prepare(connection), is_commit=True)
        _connections.close(connection)


def _refused(cursor: Any, first: int) -> dict[int, str]:
    """Refused rows of a batch, by their places; an error of another kind is raised."""
    refused: dict[int, str] = {}
    for error in cursor.getbatcherrors():
        wrapped = oracledb.DatabaseError(error)
        if not DIALECT.is_data_error(wrapped):
            raise wrapped
        refused[first + error.offset] = DIALECT.text_of(wrapped)
    return refused


def _prepare(connection: Any) -> None:
    connection.tpc_end()
    connection.tpc_prepare()
