"""The differences between SQL databases, as far as the engine needs them.

The engine (`ledger`, `apply`, `staged_table`, `staged`, `prepared`) exists once; a `Dialect`
supplies what differs: quoting and literals, whether DDL is part of a transaction, where a row's
place in its staging table is found, savepoints, deferred constraints, the statements of two-phase
commit, the server's clock, and the classes of its errors.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from epochal.kit.sql.client import Session
from epochal.kit.sql.errors import ErrorTable
from epochal.kit.sql.names import (
    NameRule,
    parse_staging_name,
    staging_name,
    staging_prefix,
)
from epochal.kit.sql.rejects import NumberedRows, Rows, row_text
from epochal.terms import EpochNumber, Handle, Identity, InDoubt, Json

if TYPE_CHECKING:
    from epochal.kit.sql.apply import Apply, Source

Query: TypeAlias = Callable[[str], Sequence[Sequence[Any]]]
"""Runs a statement in some session, and returns its rows."""
UNFIT = ("epochal_row", "epochal_why")
"""
Columns of a staging table whose sink sends refused rows elsewhere: a row that the other columns
could not hold, as text, and the reason. Both are null for every row that fits.
"""


_ORDER_COPY = "epochal_order_"
_STATED_CHARS_MAX = 4096
"""A longer list of transactions is not kept in the log."""


def order_copy(number: int) -> str:
    """
    A column of a staging table for a field of `order_by` whose own has the type of its target: the
    same value as it arrived, as 9 is less than 10, and '9' is not.
    """
    return f"{_ORDER_COPY}{number}"


class Dialect(ErrorTable):
    """One database's SQL."""

    names: ClassVar[NameRule]
    ledger: ClassVar[str] = "ledger"
    dual: ClassVar[str] = " FROM DUAL"
    """What follows a SELECT of values alone."""
    place: ClassVar[str]
    """The expression for a row's place in its staging table, in the order of arrival."""
    own_columns: ClassVar[frozenset[str]]
    """Columns that staging tables have beside the fields."""
    ddl_commits: ClassVar[bool] = True
    """Whether CREATE and DROP commit the transaction that they are run in."""
    on_ledger_conflict: ClassVar[str] = ""
    """What makes an INSERT skip a row whose key exists; without it the error is caught."""
    replaces_nulls: ClassVar[bool] = False
    """Whether a null for a column that is NOT NULL may become a number or a time."""
    deletes_lock_beyond: ClassVar[bool] = False
    """Whether a DELETE also locks rows that it only looks at."""

    def quote(self, *parts: str) -> str:
        return self.names.quote(*parts)

    @abstractmethod
    def literal(self, value: str | int | None) -> str:
        """A value as part of a statement."""

    def values(self, rows: Sequence[str]) -> str:
        """Rows for an INSERT; each is a list of literals."""
        return "VALUES " + ", ".join(f"({row})" for row in rows)

    @abstractmethod
    def first(self, query: str, count: int) -> str:
        """The same query, limited to so many rows."""

    @property
    @abstractmethod
    def clock(self) -> str:
        """A query for the server's time, in seconds since 1970."""

    # The server's identity and history

    server_sql: ClassVar[Mapping[str, str]] = {}
    """
    Queries for `server`, which one it is; `timeline`, which history of it; `position`, a number
    that only grows along that history; and `transactions`, those that are part of it, as text.
    """

    def server(self, query: Query) -> dict[str, Json]:
        """What the server says of itself. What it lacks, or may not be asked for, is left out."""
        found: dict[str, Json] = {}
        for name, statement in self.server_sql.items():
            try:
                rows = query(statement)
            except self.errors as error:
                if self.is_network(error):
                    raise
                continue
            values = [row[-1] for row in rows if row[-1] not in {None, ""}]
            if values and len(str(values[0])) <= _STATED_CHARS_MAX:
                found[name] = int(values[0]) if name == "position" else str(values[0])
        return found

    def server_change(self, query: Query, before: Mapping[str, Json]) -> str:
        """What it means that the server is another than `before`; empty where it is the same."""
        now = self.server(query)
        known = before.get("transactions"), now.get("transactions")
        are_missing = None if None in known else self.are_missing(query, *map(str, known))
        if are_missing:
            return (
                f"its history lacks transactions that it had at the last start ({known[0]}; now "
                f"{known[1]}): a backup was restored, or a replica that lagged behind took over"
            )
        complete = "; all transactions of the last start are there" if are_missing is False else ""
        if now.get("server") != before.get("server", now.get("server")):
            return (
                f"another server answers: {now.get('server')}, and at the last start "
                f"{before['server']}. A replica took over, or it was made from a backup or a dump: "
                f"what had not reached it yet is missing{complete}"
            )
        if now.get("timeline") != before.get("timeline", now.get("timeline")):
            return (
                f"its history is another one: timeline {now.get('timeline')}, and at the last "
                f"start {before['timeline']}. A replica was promoted, or a backup was recovered up "
                f"to some time: what the old primary committed last may be missing{complete}"
            )
        position, was_at = now.get("position"), before.get("position")
        if isinstance(position, int) and isinstance(was_at, int) and position < was_at:
            return (
                f"its history ends at {position}, and at the last start it had reached {was_at}: "
                "its files were put back from a backup or a snapshot"
            )
        return ""

    def are_missing(self, query: Query, before: str, now: str) -> bool:
        """Whether some of the transactions `before` are not among those of `now`."""
        raise NotImplementedError

    @abstractmethod
    def create_ledger(self, schema: str) -> list[str]:
        """Statements that create the ledger; run only where it is missing."""

    def create_table(self, target: str, definitions: Sequence[str]) -> str:
        return f"CREATE TABLE IF NOT EXISTS {target} ({', '.join(definitions)})"

    moment: ClassVar[str] = "TIMESTAMP NOT NULL DEFAULT CURRENT_TIMESTAMP"
    """A column that keeps when its row was written."""

    def add_columns(self, target: str, definitions: Sequence[str]) -> str:
        return f"ALTER TABLE {target} " + ", ".join(f"ADD COLUMN {one}" for one in definitions)

    def layout(self, query: Query, schema: str | None, table: str) -> str:
        """The columns of a table, by schema and name: another text once one was altered."""
        return str([tuple(row) for row in query(self.layout_sql(schema, table))])

    @abstractmethod
    def layout_sql(self, schema: str | None, table: str) -> str:
        """A query for the names and types of the columns; without a schema, of this session's."""

    # Applying

    insert_alias: ClassVar[str] = ""
    """What names the table `t` in an INSERT, where that can be."""
    checks_keys_in_upsert: ClassVar[bool] = False
    """
    Whether an upsert fails where two of its rows have one key (`is_repeated_key`), and reports the
    number of its keys: then both need no query of their own.
    """

    def is_repeated_key(self, error: BaseException) -> bool:  # noqa: ARG002
        return False

    def descending(self, expression: str) -> str:
        """Highest first, nulls last."""
        return f"{expression} DESC NULLS LAST"

    def ascending(self, expression: str) -> str:
        """The reverse of `descending`."""
        return f"{expression} ASC NULLS FIRST"

    def as_text(self, expression: str) -> str:
        """A value for a message, where the client could not read some values as they are."""
        return expression

    def first_per_key(self, rows: str, keys: str, order: str) -> str:
        """One row of the query `rows` per key: the first in this order."""
        return (
            f"SELECT w.* FROM (SELECT r.*, ROW_NUMBER() OVER (PARTITION BY {keys} ORDER BY"
            f" {order}) place FROM ({rows}) r) w WHERE w.place = 1"
        )

    @abstractmethod
    def upsert(self, apply: Apply) -> str:
        """Insert winners; where a key is there, change its row, unless the first one stays."""

    @abstractmethod
    def update(self, apply: Apply, changes: Sequence[str], condition: str) -> str:
        """Change rows `t` of winners `i` that meet a condition; each change is `column = value`."""

    @abstractmethod
    def delete(self, apply: Apply, condition: str) -> str:
        """Delete rows `t` of winners `i` that meet a condition."""

    def differs(self, apply: Apply, come: str) -> str:
        """Whether a winner would change its row `t`. A sink of Oracle refuses to be asked."""
        raise NotImplementedError

    def default(self, column: str) -> str:  # noqa: ARG002
        """The default of a quoted column, as a value to assign."""
        return "DEFAULT"

    # Tombstones: the keys that were deleted, and the version of the delete

    def bury(self, apply: Apply) -> str:
        """
        Remember the deletes among the winners, each unless a newer one is remembered. A sink of
        Oracle refuses tombstones.
        """
        raise NotImplementedError

    def unearth(self, apply: Apply) -> str:
        """Forget the deletes of keys that a newer row brought back."""
        tombstones = replace(apply, target=apply.tombstones)
        return self.delete(tombstones, " AND ".join(["i.is_delete = 0", *apply.newer_condition()]))

    def delete_superseded(self, apply: Apply, source: Source) -> str:
        """Delete the staged rows of one source that another row of their key wins over."""
        return (
            f"DELETE FROM {self.quote(source.schema, source.table)} s WHERE NOT EXISTS"
            f" (SELECT 1 FROM ({apply.winners()}) w"
            f" WHERE w.part = {source.part} AND w.came = s.{apply.arrived})"
        )

    now_constraints: ClassVar[str] = ""
    """Checks what would be checked at COMMIT, which must not fail any more (I3)."""
    later_constraints: ClassVar[str] = ""
    """Lets rows of the next table refer to rows that are yet to come."""

    def check_constraints(self, session: Session) -> None:
        if self.now_constraints:
            session.execute(self.now_constraints)

    def defer_constraints(self, session: Session) -> None:
        if self.later_constraints:
            session.defer(self.later_constraints)

    def require_rows(self, changes: Sequence[tuple[str, int]]) -> str | None:  # noqa: ARG002
        """
        One statement that runs these, and fails (`is_short`) where one does not change so many
        rows: then an epoch can be applied in one message, none of whose statements waits for the
        answer to another. None where the server can't.
        """
        return None

    def is_short(self, error: BaseException) -> bool:  # noqa: ARG002
        return False

    # Staging tables

    present_sql: ClassVar[str]
    """A query for the names of the tables that are in `{schema}` and in `{tables}`."""
    columns_sql: ClassVar[str]
    """A query for the names of the columns of `{table}` in `{schema}`, in their order."""

    def present(self, session: Session, schema: str, tables: Collection[str]) -> frozenset[str]:
        """Which of these tables exist."""
        if not tables:
            return frozenset()
        listed = ", ".join(map(self.literal, tables))
        query = self.present_sql.format(schema=self.literal(schema), tables=listed)
        return frozenset(name for (name,) in session.query(query))

    def columns(self, session: Session, schema: str, table: str) -> list[str]:
        """The columns of a staging table, in their order."""
        named = {"schema": self.literal(schema), "table": self.literal(table)}
        return [name for (name,) in session.query(self.columns_sql.format(**named))]

    def fields_of(self, columns: Iterable[str]) -> list[str]:
        """The columns of a staging table that are fields of the rows."""
        ours = {*self.own_columns, *UNFIT}
        return [name for name in columns if name not in ours and not name.startswith(_ORDER_COPY)]

    # Single rows of staging tables

    def all_rows(self, session: Session, source: Source) -> Rows | None:
        """The rows of a staging table, for the search by halves; None where there are none."""
        ((first, last),) = session.query(
            f"SELECT MIN(s.{self.place}), MAX(s.{self.place})"
            f" FROM {self.quote(source.schema, source.table)} s WHERE {source.condition}"
        )
        return None if first is None else NumberedRows(self.place, int(first), int(last))

    def at_places(self, places: Sequence[str]) -> str:
        """The condition for rows of a staging table at these places."""
        return f"{self.place} IN ({', '.join(places)})"

    def row_text(self, session: Session, source: Source) -> str:
        """The only row of this source, as JSON text."""
        names = self.fields_of(self.columns(session, source.schema, source.table))
        rows = session.query(
            f"SELECT {', '.join(map(self.quote, names))}"
            f" FROM {self.quote(source.schema, source.table)} s WHERE {source.condition}"
        )
        return row_text(dict(zip(names, rows[0], strict=True))) if rows else ""

    def release_savepoint(self, session: Session, name: str) -> None:
        """Forget a savepoint, where setting another of the same name does not replace it."""

    # Prepared transactions

    def transaction_name(self, handle: Handle) -> str:
        """The name of a task's prepared transaction."""
        return staging_name(handle)

    @abstractmethod
    def prepared_names(self, session: Session) -> Collection[str]:
        """The names of the server's prepared transactions: all that are, or may be, ours."""

    def prepared(self, session: Session, identity: Identity) -> list[InDoubt]:
        """The prepared transactions of this sink."""
        prefix = staging_prefix(identity)
        return [
            InDoubt(name=name, handle=parse_staging_name(name))
            for name in sorted(self.prepared_names(session))
            if name.startswith(prefix)
        ]

    def is_prepared(self, session: Session, name: str) -> bool:
        return name in self.prepared_names(session)

    @abstractmethod
    def end_prepared(self, session: Session, name: str, *, is_commit: bool) -> None:
        """Commit or roll back one that another session prepared."""

    def end_tasks(
        self,
        session: Session,
        identity: Identity,
        epoch: EpochNumber,
        partitions: int,
        is_lost: Callable[[Handle], bool],
    ) -> None:
        """
        End sessions of tasks of this sink that are not done yet, and whose attempts are lost.

        Every task of the epoch, which has so many partitions, has handed its receipt in by now.
        Returns once these sessions hold no locks, or after some seconds. Only called where
        `TableSink.stages_late`.
        """

    # Sessions of drivers that died

    def end_older_sessions(self, session: Session, identities: Sequence[Identity]) -> None:
        """
        End transactions that an earlier driver of these sinks left open, where that is allowed.

        Nothing is lost: a decided epoch is applied again from staging, by any later driver (I7).
        Only sessions up to this driver's generation are ended; if a later one holds the lock, this
        driver is the zombie.
        """


class OwnTablesDialect(Dialect):
    """The SQL of a database where each attempt stages its rows in a table of its own."""

    @abstractmethod
    def staged(self, session: Session, schema: str, identity: Identity) -> list[InDoubt]:
        """Every staging table of this sink, found by name alone (I6)."""

    def drop(self, session: Session, schema: str, tables: Sequence[str]) -> None:
        """Drop these tables, which were there a moment ago."""
        listed = ", ".join(self.quote(schema, name) for name in tables)
        session.execute(f"DROP TABLE IF EXISTS {listed}")
