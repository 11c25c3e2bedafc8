"""Prepares rows on an executor: Arrow in, LOAD DATA LOCAL from memory, one transaction an attempt.

Staged: the rows go into a table of this attempt's own, and the transaction commits: durable and in
nobody's way. Prepared: they go into the table itself inside an XA transaction, which is left
prepared under the handle's name and belongs to no connection any more once that is answered.

LOAD DATA LOCAL turns errors into warnings, and cuts or skips what it can't take: so a load with a
single warning, or that brought fewer rows than were sent, is refused, with the row named.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from epochal.contract import Task
from epochal.errors import EpochalError, RowRejected
from epochal.kit.sql.keeping import Kept
from epochal.kit.sql.names import staging_name
from epochal.kit.sql.writing import TableWriter, not_in_steps
from epochal.sinks.mysql import connecting
from epochal.sinks.mysql.catalog import from_json
from epochal.sinks.mysql.connecting import Link, Server
from epochal.sinks.mysql.dialect import DETACH_AT_PREPARE, DIALECT
from epochal.sinks.mysql.plan import Planned, plan, sent_fields
from epochal.sinks.mysql.types import TEXT, microseconds

if TYPE_CHECKING:
    from epochal.sinks.mysql.sink import MySQL

_kept: Kept[Link] = Kept(answers=connecting.answers)
AT_ROW = re.compile(r" at row (\d+)")
_NULL = "\\N"


class MySQLWriter(TableWriter[Link, Planned]):
    """What both strategies share: the plan, the load, and what is told of a bad row."""

    def __init__(self, sink: MySQL, task: Task) -> None:
        super().__init__(sink, task, DIALECT)
        self._sink = sink
        self._table = from_json(self._handout["table"])
        self._plan = plan(sent_fields(task.schema, sink), self._table, sink)

    @property
    def _idle(self) -> Kept[Link]:
        return _kept

    @property
    def _server(self) -> Server:
        return self._sink.server

    def _connect(self) -> Link:
        return connecting.connect(self._server)

    # Sending

    def _send(self, block: pa.Table, first: int) -> None:
        """Load one block; its first row is row `first` of this task."""
        link = self._get_ready()
        going = self._going()
        data = rows_of([self._converted(one, block, first) for one, _ in going])
        statement = load_statement(self._place(), [(name, one.expression) for one, name in going])
        arrived, warnings = self._sorted("load", lambda: link.load(statement, data))
        if warnings or arrived != block.num_rows:
            raise self._refused(link, block, first, arrived)

    def _convert(self, one: Planned, values: pa.Array) -> pa.Array:
        return one.sent.to_text(values)

    def _unfitting(self, one: Planned, values: pa.Array) -> Iterator[tuple[pa.Array, str]]:
        column = one.column
        if one.sent.kind == "float":
            yield pc.invert(pc.is_finite(values)), "MySQL has no NaN and no infinities"
        if column is None:
            return
        is_delete_stream = self._sink.write_mode.delete_when is not None
        if column.is_not_null and not is_delete_stream and values.null_count:
            yield values.is_null(), f'column "{column.name}" is NOT NULL'
        is_cut = column.data_type in {"datetime", "timestamp", "time"} and column.scale < 6
        if one.sent.kind in {"timestamp", "time"} and is_cut:
            yield (
                not_in_steps(microseconds(values), 10 ** (6 - column.scale)),
                f'column "{column.name}" is {column.ddl}, which would cut the second',
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
        found = AT_ROW.search(words)
        place = None if found is None else int(found[1]) - 1
        return self._refusal(block, place, first, f"{words} [{number}]")


class StagedWriter(MySQLWriter):
    _numbering: ClassVar[str] = " AUTO_INCREMENT"

    def _columns(self) -> list[tuple[str, str]]:
        """Of the staging table: names and types."""
        return [(one.field, one.staging_ddl) for one in self._plan]

    def _begin(self, connection: Link) -> None:
        columns = ", ".join(f"{DIALECT.quote(name)} {ddl} NULL" for name, ddl in self._columns())
        at = DIALECT.quote(DIALECT.at)
        # One row of a private table can't break a key: without the checks an empty table is
        # filled page by page.
        self._run(
            connection,
            f"CREATE TABLE {self._place()} ({at} BIGINT NOT NULL{self._numbering} PRIMARY KEY,"
            f" {columns}) ENGINE=InnoDB ROW_FORMAT=DYNAMIC",
            "SET SESSION unique_checks = 0, foreign_key_checks = 0",
            "START TRANSACTION",
        )

    def _finish(self, connection: Link) -> None:
        self._sorted("commit staging", lambda: self._run(connection, "COMMIT"), is_commit=True)
        _kept.keep(self._server, connection)


class PreparedWriter(MySQLWriter):
    @property
    def _xid(self) -> str:
        return DIALECT.literal(staging_name(self._task.handle))

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


def load_statement(place: str, going: Sequence[tuple[str, str | None]]) -> str:
    """Columns in the order of the data, each with what is made of its text, if anything is."""
    read, made = [], []
    for number, (column, expression) in enumerate(going):
        name = DIALECT.quote(column)
        if expression is None:
            read.append(name)
        else:
            read.append(f"@v{number}")
            made.append(f"{name} = {expression.format(f'@v{number}')}")
    return (
        f"LOAD DATA LOCAL INFILE 'epochal' INTO TABLE {place} CHARACTER SET utf8mb4"
        " FIELDS TERMINATED BY '\\t' ESCAPED BY '\\\\' LINES TERMINATED BY '\\n'"
        f" ({', '.join(read)})" + (f" SET {', '.join(made)}" if made else "")
    )


def rows_of(columns: list[pa.Array]) -> memoryview:
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
