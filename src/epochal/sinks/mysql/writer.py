"""Prepares rows on an executor: Arrow in, LOAD DATA LOCAL from memory, one transaction per attempt.

Staged: the rows go into a staging table, and the transaction commits: durable and without locks
that others wait for. Prepared: they go into the table itself inside an XA transaction, which is
left prepared under the handle's name and belongs to no connection any more once that is answered.

LOAD DATA LOCAL turns errors into warnings, and truncates or skips what it can't take: so a load
with a single warning, or with fewer rows than were sent, is refused, with the row named. Where
refused rows go to another sink, every row is loaded under a number of its own; rows that the server
warned of are deleted again and kept as text (`UNFIT`), under numbers below 0. On MySQL text that is
no JSON is an error here, too, and none of the rows are loaded: they are searched for it by halves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from epochal.arrow_values import number_array, scalar
from epochal.contract import Task
from epochal.errors import EpochalError, RowRejected
from epochal.kit.sql.client import IdleConnections
from epochal.kit.sql.dialect import UNFIT
from epochal.kit.sql.writer import TASK_IDLE_MAX_S, TableWriter
from epochal.sinks.mysql import client
from epochal.sinks.mysql.client import MySQLConnection, Server
from epochal.sinks.mysql.dialect import AT, DETACH_AT_PREPARE, DIALECT
from epochal.sinks.mysql.slots import BYTES_MAX, ROWS_MAX, claim_slot, pool_of
from epochal.sinks.mysql.types import TEXT, Planned, Table, changed, from_json, plan, sent_fields
from epochal.terms import Json

if TYPE_CHECKING:
    from epochal.sinks.mysql.sink import MySQL

_connections: IdleConnections[MySQLConnection] = IdleConnections(answers=client.answers)
_AT_ROW = re.compile(r" at row (\d+)")
_NULL = "\\N"
_WARNINGS_MAX = 65_535
"""No server lists more than this."""
_NOT_ALLOWED = 1227
_NO_JSON = 3140
_LOCK_WAIT_S = 1
"""How long a session that was closed may take to end."""


class MySQLWriter(TableWriter[MySQLConnection, Planned]):
    """What both strategies share: the plan, the load, and errors that name a row."""

    def __init__(self, sink: MySQL, task: Task) -> None:
        super().__init__(sink, task, DIALECT)
        self._sink = sink
        self._table: Table = from_json(self._handout["table"])
        self._plan = plan(sent_fields(task.schema, sink), self._table, sink)

    @property
    def _idle(self) -> IdleConnections[MySQLConnection]:
        return _connections

    @property
    def _server(self) -> Server:
        return self._sink.server

    def _connect(self) -> MySQLConnection:
        return client.connect(self._server, idle_max_s=TASK_IDLE_MAX_S)

    # Sending

    def _send(self, block: pa.Table, first: int) -> None:
        connection = self._get_ready()
        sent = self._sent_columns()
        data = rows_of([self._converted(one, block, first) for one, _ in sent])
        statement = load_statement(
            self._table_sent_to(), [(name, one.expression) for one, name in sent]
        )
        arrived, warnings = self._classified("load", lambda: connection.load(statement, data))
        if warnings or arrived != block.num_rows:
            raise self._refused(connection, block, first, arrived)

    def _convert(self, one: Planned, values: pa.Array) -> pa.Array:
        return one.sent.convert(values) if one.sent.convert else values

    def _unfitting(self, one: Planned, values: pa.Array) -> Iterator[tuple[pa.Array, str]]:
        column = one.column
        if one.sent.family == "float":
            yield pc.invert(pc.is_finite(values)), "MySQL has no NaN and no infinities"
        if column is None:
            return
        is_delete_stream = self._sink.write_mode.delete_when is not None
        if column.is_not_null and not is_delete_stream and values.null_count:
            yield values.is_null(), f'column "{column.name}" is NOT NULL'
        yield from changed(one.sent, column, values)

    def _insert_unfit(
        self, connection: MySQLConnection, rows: Sequence[tuple[int, str, str]]
    ) -> None:
        names = ", ".join(map(DIALECT.quote, (AT, *UNFIT)))
        statement = f"INSERT INTO {self._table_sent_to()} ({names}) VALUES (%s, %s, %s)"
        with connection.cursor() as cursor:
            cursor.executemany(statement, [(-number - 1, text, why) for number, text, why in rows])

    def _refused(
        self, connection: MySQLConnection, block: pa.Table, first: int, arrived: int
    ) -> EpochalError:
        """Which row it was, from the server's first warning."""
        with connection.cursor() as cursor:
            cursor.execute("SHOW WARNINGS LIMIT 1")
            warning = cursor.fetchone()
        if warning is None:
            return RowRejected(
                f"{self._where()}: {arrived} of {block.num_rows} rows arrived, and no warning "
                "gives the reason",
                "a trigger may have skipped rows",
            )
        _, number, text = warning
        found = _AT_ROW.search(text)
        place = None if found is None else int(found[1]) - 1
        return self._refusal(block, place, first, f"{text} [{number}]")


class StagedWriter(MySQLWriter):
    def _begin(self, connection: MySQLConnection) -> None:
        if self._sink.is_fixed or self._is_small:
            self._claim_slot(connection)
            return
        # Rows of a private table can't violate a key: without the checks InnoDB fills an empty
        # table page by page.
        self._run(
            connection,
            pool_of(self._sink, self._plan).create_slot(self._staging_table),
            "SET SESSION unique_checks = 0, foreign_key_checks = 0",
            "START TRANSACTION",
        )

    def _claim_slot(self, connection: MySQLConnection) -> None:
        run, ask = partial(self._run, connection), partial(self._ask, connection)
        pool = pool_of(self._sink, self._plan)
        self._staging_table = claim_slot(self._sink, pool, self._task.handle, ask, run)

    @property
    def _is_small(self) -> bool:
        """Whether all rows are known by now, and few: then they use a slot."""
        whole = self._buffer.metrics
        is_few = whole.rows <= ROWS_MAX and whole.bytes <= BYTES_MAX
        return bool(self._handout["slots"]) and self._buffer.is_single and is_few

    def _finish(self, connection: MySQLConnection) -> None:
        self._classified("commit staging", lambda: self._run(connection, "COMMIT"), is_commit=True)
        _connections.keep(self._server, connection)


class KeepingWriter(StagedWriter):
    """Also stages rows that their columns can't hold."""

    _listed_max: int = _WARNINGS_MAX
    """How many warnings of a load the server lists."""

    def _begin(self, connection: MySQLConnection) -> None:
        try:
            self._run(connection, f"SET SESSION max_error_count = {_WARNINGS_MAX}")
        except DIALECT.errors as error:
            # MySQL lets only administrators of sessions set it.
            if DIALECT.code_of(error) != _NOT_ALLOWED:
                raise
            ((listed,),) = self._ask(connection, "SELECT @@SESSION.max_error_count")
            self._listed_max = int(listed)
        super()._begin(connection)

    def _send(self, block: pa.Table, first: int) -> None:
        connection = self._get_ready()
        reasons = self._unfit_values(block)
        places = [place for place in range(block.num_rows) if place not in reasons]
        if places:
            fitting = block.take(places) if reasons else block
            numbers = [first + place for place in places]
            load = partial(self._load, connection, fitting, numbers, first)
            reasons |= self._classified("load", load)
        if reasons:
            self._keep_places(connection, block, first, reasons)

    def _load(
        self, connection: MySQLConnection, rows: pa.Table, numbers: Sequence[int], first: int
    ) -> dict[int, str]:
        """Load rows under these numbers of this task; the places of those that did not fit."""
        sent = self._sent_columns()
        at = number_array(np.array(numbers, dtype=np.int64) + 1)
        data = rows_of([at.cast(TEXT), *(self._converted(one, rows, first) for one, _ in sent)])
        columns = [(AT, None), *((name, one.expression) for one, name in sent)]
        statement = load_statement(self._table_sent_to(), columns)
        try:
            arrived, warnings = connection.load(statement, data)
        except DIALECT.errors as error:
            if DIALECT.code_of(error) != _NO_JSON:
                raise
            if rows.num_rows == 1:
                return {numbers[0] - first: DIALECT.text_of(error)}
            return self._load_halves(connection, rows, numbers, first)
        if arrived != rows.num_rows:
            raise self._refused(connection, rows, first, arrived)
        if not warnings:
            return {}
        changed = self._warned(connection, rows, first)
        places = DIALECT.at_places([str(numbers[place] + 1) for place in changed])
        self._run(connection, f"DELETE FROM {self._table_sent_to()} WHERE {places}")
        return {numbers[place] - first: why for place, why in changed.items()}

    def _load_halves(
        self, connection: MySQLConnection, rows: pa.Table, numbers: Sequence[int], first: int
    ) -> dict[int, str]:
        """No further than there may be rejected rows."""
        reasons: dict[int, str] = {}
        middle = rows.num_rows // 2
        for at, end in ((0, middle), (middle, rows.num_rows)):
            if len(reasons) <= self._sink.rejects_max:
                half = rows.slice(at, end - at)
                reasons |= self._load(connection, half, numbers[at:end], first)
        return reasons

    def _warned(self, connection: MySQLConnection, rows: pa.Table, first: int) -> dict[int, str]:
        """The server's warnings, by the places of the rows in the load."""
        with connection.cursor() as cursor:
            cursor.execute("SHOW WARNINGS")
            listed = cursor.fetchall()
        reasons: dict[int, str] = {}
        for _, number, text in listed:
            reason, found = f"{_AT_ROW.sub('', text)} [{number}]", _AT_ROW.search(text)
            if found is None or len(listed) >= self._listed_max:
                place = None if found is None else int(found[1]) - 1
                raise self._refusal(rows, place, first, reason)
            reasons.setdefault(int(found[1]) - 1, reason)
        return reasons


class PreparedWriter(StagedWriter):
    """
    Where keys can collide only the first attempt of a task prepares: a later one would wait for the
    locks of an attempt that nobody ends. Its rows wait in a slot, and are applied in the rehearsal.

    A first attempt holds a named lock, by which the driver finds it as long as it is not prepared.
    Where an attempt of an older driver still has the lock, it stages its rows, too.
    """

    def __init__(self, sink: MySQL, task: Task) -> None:
        super().__init__(sink, task)
        written = frozenset(one.column.name for one in self._plan if one.column is not None)
        self._may_collide = self._table.may_collide(written)
        self._is_late = self._may_collide and not task.is_first

    @property
    def _is_staged(self) -> bool:
        return self._is_late

    @property
    def _xid(self) -> str:
        return DIALECT.literal(DIALECT.transaction_name(self._task.handle))

    def _begin(self, connection: MySQLConnection) -> None:
        if self._may_collide and not self._is_late:
            task = self._task.handle
            lock = DIALECT.task_lock(task.uid, task.sink, task.epoch, task.partition)
            get = f"SELECT GET_LOCK({DIALECT.literal(lock)}, {_LOCK_WAIT_S})"
            ((is_held,),) = self._ask(connection, get)
            self._is_late = not is_held
        if self._is_late:
            self._claim_slot(connection)
            return
        self._run(
            connection,
            "SET SESSION unique_checks = 1, foreign_key_checks = 1",
            f"XA START {self._xid}",
        )

    def _staged_at(self) -> Mapping[str, Json]:
        is_staged = self._is_late and self._buffer.metrics.rows > 0
        return {"slot": self._staging_table} if is_staged else {}

    def _finish(self, connection: MySQLConnection) -> None:
        if self._is_late:
            super()._finish(connection)
            return
        self._classified("compare columns", lambda: self._require_layout(connection))
        detach = (DETACH_AT_PREPARE,) if connection.is_mariadb else ()
        statements = (*self._ledger_row(), *detach, f"XA END {self._xid}")
        self._classified("write the ledger", lambda: self._run(connection, *statements))
        prepare = f"XA PREPARE {self._xid}"
        self._classified("prepare", lambda: self._run(connection, prepare), is_commit=True)
        _connections.close(connection)


def load_statement(table: str, sent: Sequence[tuple[str, str | None]]) -> str:
    """Columns in the order of the data, each with what is made of its text, if anything is."""
    read, made = [], []
    for number, (column, expression) in enumerate(sent):
        name = DIALECT.quote(column)
        if expression is None:
            read.append(name)
        else:
            read.append(f"@v{number}")
            made.append(f"{name} = {expression.format(f'@v{number}')}")
    return (
        f"LOAD DATA LOCAL INFILE 'epochal' INTO TABLE {table} CHARACTER SET utf8mb4"
        " FIELDS TERMINATED BY '\\t' ESCAPED BY '\\\\' LINES TERMINATED BY '\\n'"
        f" ({', '.join(read)})" + (f" SET {', '.join(made)}" if made else "")
    )


def rows_of(columns: list[pa.Array]) -> memoryview:
    """Tabs between, a newline after each row. What Arrow joined lies in one buffer."""

    def joined(parts: list[Any], between: str) -> pa.Array:
        return pc.binary_join_element_wise(
            *parts, scalar(between, TEXT), null_handling="replace", null_replacement=_NULL
        )

    last = joined([columns[-1], scalar("", TEXT)], "\n")
    lines = joined([*columns[:-1], last], "\t") if len(columns) > 1 else last
    data = lines.buffers()[2]
    if data is None:
        return memoryview(b"")
    return memoryview(data)[: pc.sum(pc.binary_length(lines)).as_py() or 0]
