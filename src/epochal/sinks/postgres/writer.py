"""Prepares rows on an executor: rows in, binary COPY out, one transaction an attempt.

Staged: the rows go into a table of this attempt's own, logged, and the transaction commits: durable
and in nobody's way. Prepared: they go into the table itself, or through a staging table that lives
and dies in the same transaction where a column's type needs the server's own cast, and the
transaction is left prepared under the handle's name.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from psycopg import sql

from epochal.contract import Task
from epochal.errors import EpochalError, Misconfigured, RowRejected
from epochal.kit.sql.names import staging_name
from epochal.kit.sql.writing import BlockWriter
from epochal.sinks.postgres import meta
from epochal.sinks.postgres.catalog import from_json
from epochal.sinks.postgres.checking import sent_fields
from epochal.sinks.postgres.ledger import Ledger
from epochal.sinks.postgres.plan import may_go_direct, plan
from epochal.sinks.postgres.sending import ByBytes, ByColumns, Copied, Sending, to_staging
from epochal.sinks.postgres.sorting import (
    BAD_ENCODING,
    TOO_MANY_PREPARED,
    is_lock_wait,
    is_of_server,
    sorted_error,
    sqlstate_of,
)
from epochal.sinks.postgres.sql import Apply, Source
from epochal.sinks.postgres.tasks import Place, TaskConnection
from epochal.sinks.postgres.types import arrow_of
from epochal.terms import Fingerprint, Receipt

if TYPE_CHECKING:
    from epochal.sinks.postgres.sink import Postgres


_BEGIN = sql.SQL("BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE")


class PostgresWriter(BlockWriter[TaskConnection[Any]]):
    """What both strategies share: the connection, and what is told of a bad row."""

    def __init__(self, sink: Postgres, task: Task) -> None:
        super().__init__(sink, task)
        self._sink = sink
        self._sent = sent_fields(task.schema, sink)

    # For each strategy to say

    @abstractmethod
    def _copied(self) -> list[Copied]:
        """What is sent, in order."""

    @abstractmethod
    def _place(self) -> Place:
        """Where the rows are copied into."""

    @abstractmethod
    def _begin(self, connection: TaskConnection[Any]) -> None:
        """What goes before the rows, in their transaction."""

    @abstractmethod
    def _make_durable(self, connection: TaskConnection[Any]) -> None:
        """The last statements of the transaction."""

    def _finish(self, connection: TaskConnection[Any]) -> None:
        self._make_durable(connection)
        connection.done()

    def _close(self, connection: TaskConnection[Any]) -> None:
        connection.close()

    # Sending

    @cached_property
    def _sending(self) -> Sending:
        return (ByBytes if self._task.is_packed else ByColumns)(self._copied())

    def _send(self, block: pa.Table, first: int) -> None:
        """Copy one block; its first row is row `first` of this task."""
        connection = self._get_ready()

        def send() -> None:
            self._sending.send(connection, self._place(), block)

        try:
            self._sorted("copy", send, block, first)
        except pa.ArrowInvalid as error:
            raise RowRejected(
                f"{self._where()}: a value does not fit its column: {error}",
                "cast it in the query, or widen the column",
            ) from None

    def _get_ready(self) -> TaskConnection[Any]:
        """A connection with an open transaction; made with the first block."""
        return self._connection or self._open()

    def _open(self) -> TaskConnection[Any]:
        name = f"epochal-{self._task.handle.uid}-s{self._task.handle.sink}-task"
        self._connection = connection = self._sending.connect(self._sink.server, name)
        if connection.is_reused and not self._answers(connection):
            connection.renew()
        if not connection.is_reused:
            self._sorted("begin", lambda: connection.execute(_BEGIN))
        self._sorted("begin", lambda: self._begin(connection))
        return connection

    def _answers(self, connection: TaskConnection[Any]) -> bool:
        """Whether a kept connection is still alive: its first statement tells."""
        try:
            connection.execute(_BEGIN)
        except Exception:  # noqa: BLE001  whatever it says, another connection is opened
            return False
        return True

    def _sorted(
        self,
        verb: str,
        call: Callable[[], None],
        block: pa.Table | None = None,
        first: int = 0,
        *,
        is_commit: bool = False,
    ) -> None:
        try:
            call()
        except EpochalError:
            raise
        except Exception as error:
            if not is_of_server(error):
                raise
            self._pressure.failed(is_lock_wait=is_lock_wait(error))
            if sqlstate_of(error) == BAD_ENCODING and block is not None:
                raise self._with_nul(block, first) from None
            doing = f"{self._where()}: {verb}"
            secret = self._sink.server.secret()
            raise sorted_error(error, doing, is_commit=is_commit, secret=secret) from None

    def _with_nul(self, block: pa.Table, first: int) -> RowRejected:
        """PostgreSQL has no text with a NUL in it: which column and row is it?"""
        found = [
            f'column "{name}", row {first + place}' for name, place in self._sending.nuls(block)
        ]
        return RowRejected(
            f"{self._where()}: {'; '.join(found) or 'a string'} holds the character NUL (\\u0000), "
            "which PostgreSQL can't store in text",
            "take it out in the query (translate(x, '\\u0000', '')), or store the value as binary",
        )


class StagedWriter(PostgresWriter):
    def _copied(self) -> list[Copied]:
        return to_staging(self._sent)

    def _place(self) -> Place:
        return self._sink.meta_schema, staging_name(self._task.handle)

    def _begin(self, connection: TaskConnection[Any]) -> None:
        connection.execute(_create_staging(self._sink, self._task, _ddl(self._sent)))

    def _make_durable(self, connection: TaskConnection[Any]) -> None:
        commit = sql.SQL("COMMIT")
        self._sorted("commit staging", lambda: connection.execute(commit), is_commit=True)


class PreparedWriter(PostgresWriter):
    def __init__(self, sink: Postgres, task: Task) -> None:
        super().__init__(sink, task)
        self._table = from_json(self._given["table"])
        types = {name: sent.type for name, sent in self._sent.items()}
        self._plan = plan(types, self._table, sink.column_map, sink.write_mode)
        self._is_direct = may_go_direct(self._plan, self._table)

    def _copied(self) -> list[Copied]:
        if not self._is_direct:
            return to_staging(self._sent)
        return [
            Copied(
                field=one.field,
                column=one.column.name,
                sent=self._sent[one.field],
                wanted=arrow_of(one.column.type),
            )
            for one in self._plan.mapped
        ]

    def _place(self) -> Place:
        if self._is_direct:
            return self._table.schema, self._table.name
        return self._sink.meta_schema, staging_name(self._task.handle)

    def _begin(self, connection: TaskConnection[Any]) -> None:
        if self._is_direct:
            connection.execute(self._sink.server.settings())
        else:
            connection.execute(_create_staging(self._sink, self._task, _ddl(self._sent)))

    def _make_durable(self, connection: TaskConnection[Any]) -> None:
        self._sorted("apply", lambda: self._apply(connection))
        gid = sql.Literal(str(self._task.handle))
        statement = sql.SQL("PREPARE TRANSACTION {}").format(gid)
        try:
            self._sorted("prepare", lambda: connection.execute(statement), is_commit=True)
        except EpochalError as error:
            if f"[{TOO_MANY_PREPARED}]" in error.message:
                raise Misconfigured(
                    error.message,
                    "more tasks than max_prepared_transactions: raise it on the server, fewer "
                    "partitions (coalesce), or strategy='staged'",
                ) from None
            raise

    def _apply(self, connection: TaskConnection[Any]) -> None:
        rows = self._buffer.metrics.rows
        if not self._is_direct:
            schema, table = self._sink.meta_schema, staging_name(self._task.handle)
            source = Source(schema=schema, table=table, part=self._task.handle.partition)
            apply = Apply(
                plan=self._plan, mode=self._sink.write_mode, table=self._table, sources=[source]
            )
            for statement in apply.statements():
                connection.execute(statement)
            connection.execute(meta.drop(schema, [table]))
        ledger = Ledger(schema=self._sink.meta_schema, identity=self._writes_for())
        receipt = Receipt(handle=self._task.handle, fingerprint=Fingerprint(rows))
        connection.execute(ledger.record([receipt]))


def _ddl(sent: Mapping[str, Any]) -> sql.Composed:
    return sql.SQL(", ").join(
        sql.SQL("{} {}").format(sql.Identifier(name), sql.SQL(one.ddl))
        for name, one in sent.items()
    )


def _create_staging(sink: Postgres, task: Task, columns: sql.Composed) -> sql.Composed:
    """One statement: limits for this transaction, the table, and since when it is there."""
    table = sql.Identifier(sink.meta_schema, staging_name(task.handle))
    body = sql.SQL(
        "BEGIN PERFORM 1 FROM ({}) q; CREATE TABLE {} ({}) WITH (autovacuum_enabled = false);"
        " COMMENT ON TABLE {} IS {}; END"
    ).format(sink.server.settings(), table, columns, table, sql.Literal(meta.comment(task.handle)))
    return sql.SQL("DO {}").format(sql.Literal(body.as_string(None)))
