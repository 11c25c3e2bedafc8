"""Prepares rows on an executor: Arrow in, LOAD DATA LOCAL from memory, one transaction an attempt.

Staged: the rows go into a table of this attempt's own, and the transaction commits: durable and in
nobody's way. Prepared: they go into the table itself inside an XA transaction, which is left
prepared under the handle's name and belongs to no connection any more once that is answered.

LOAD DATA LOCAL turns errors into warnings, and cuts or skips what it can't take: so a load with a
single warning, or that brought fewer rows than were sent, is refused, with the row named.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from epochal.contract import Task
from epochal.errors import EpochalError, RowRejected
from epochal.sinks.mysql import connecting
from epochal.sinks.mysql.catalog import from_json
from epochal.sinks.mysql.connecting import Link
from epochal.sinks.mysql.dialect import DETACH_AT_PREPARE, DIALECT
from epochal.sinks.mysql.plan import Planned, plan, sent_fields
from epochal.sinks.mysql.types import TEXT, microseconds
from epochal.sinks.sql.keeping import Kept
from epochal.sinks.sql.names import staging_name
from epochal.sinks.sql.writing import TableWriter, whole_column

if TYPE_CHECKING:
    from epochal.sinks.mysql.sink import MySQL

_kept: Kept[Link] = Kept(answers=connecting.answers)
_AT_ROW = re.compile(r"at row (\d+)")
_NULL = "\\N"


class MySQLWriter(TableWriter[Link]):
    """What both strategies share: the plan, the load, and what is told of a bad row."""

    def __init__(self, sink: MySQL, task: Task) -> None:
        super().__init__(sink, task, DIALECT)
        self._sink = sink
        self._table = from_json(self._handout["table"])
        self._plan = plan(sent_fields(task.schema, sink), self._table, sink)

    @abstractmethod
    def _place(self) -> str:
        """The table that the rows are loaded into, quoted."""

    @abstractmethod
    def _column(self, one: Planned) -> str | None:
        """The column of that table for a field; None where the field does not go there."""

    def _connect(self) -> Link:
        server = self._sink.server
        return _kept.take(
            server,
            lambda: connecting.connect(server),
            idle_max_s=server.idle_max_s,
            lifetime_max_s=server.lifetime_max_s,
        )

    def _close(self, connection: Link) -> None:
        _kept.close(connection)

    # Sending

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
        whole = whole_column(values)
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
        column, field = one.column, one.field
        if one.sent.kind == "float":
            odd = pc.invert(pc.is_finite(values))
            self._require_none(odd, field, values, first, "MySQL has no NaN and no infinities")
        if column is None:
            return
        is_delete_stream = self._sink.write_mode.delete_when is not None
        if column.is_not_null and not is_delete_stream and values.null_count:
            why = f'column "{column.name}" is NOT NULL'
            self._require_none(values.is_null(), field, values, first, why)
        is_cut = column.data_type in {"datetime", "timestamp", "time"} and column.scale < 6
        if one.sent.kind in {"timestamp", "time"} and is_cut:
            self._require_whole_steps(
                microseconds(values),
                10 ** (6 - column.scale),
                field,
                values,
                first=first,
                why=f'column "{column.name}" is {column.ddl}, which would cut the second',
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

    def _run(self, link: Link, *statements: str) -> None:
        with link.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)


class StagedWriter(MySQLWriter):
    def _place(self) -> str:
        return DIALECT.quote(self._sink.meta, staging_name(self._task.handle))

    def _column(self, one: Planned) -> str:
        return one.field

    def _begin(self, connection: Link) -> None:
        columns = ", ".join(
            f"{DIALECT.quote(one.field)} {one.staging_ddl} NULL" for one in self._plan
        )
        at = DIALECT.quote(DIALECT.at)
        # One row of a private table can't break a key: without the checks an empty table is
        # filled page by page.
        self._run(
            connection,
            f"CREATE TABLE {self._place()} ({at} BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,"
            f" {columns}) ENGINE=InnoDB ROW_FORMAT=DYNAMIC",
            "SET SESSION unique_checks = 0, foreign_key_checks = 0",
            "START TRANSACTION",
        )

    def _finish(self, connection: Link) -> None:
        self._sorted("commit staging", lambda: self._run(connection, "COMMIT"), is_commit=True)
        _kept.keep(self._sink.server, connection)


class PreparedWriter(MySQLWriter):
    @property
    def _xid(self) -> str:
        return DIALECT.literal(staging_name(self._task.handle))

    def _place(self) -> str:
        return DIALECT.quote(self._table.schema, self._table.name)

    def _column(self, one: Planned) -> str | None:
        return None if one.column is None else one.column.name

    def _begin(self, connection: Link) -> None:
        self._run(
            connection,
            "SET SESSION unique_checks = 1, foreign_key_checks = 1",
            f"XA START {self._xid}",
        )

    def _finish(self, connection: Link) -> None:
        detach = (DETACH_AT_PREPARE,) if connection.is_mariadb else ()
        statements = (*self._ledger_row(), *detach, f"XA END {self._xid}")
        self._sorted("write the ledger", lambda: self._run(connection, *statements))
        prepare = f"XA PREPARE {self._xid}"
        self._sorted("prepare", lambda: self._run(connection, prepare), is_commit=True)
        _kept.close(connection)


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
