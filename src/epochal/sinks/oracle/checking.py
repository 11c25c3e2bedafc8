"""What is asked of a server before the first row, and made on it before the first epoch."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from random import getrandbits
from typing import TYPE_CHECKING

import pyarrow as pa

from epochal.errors import Misconfigured
from epochal.kit.sql.committing import Checker, abilities, handout
from epochal.kit.sql.dialect import Session
from epochal.kit.sql.incoming import Incoming
from epochal.kit.sql.ledger import Ledger
from epochal.kit.sql.names import staging_name
from epochal.sinks.oracle import connecting
from epochal.sinks.oracle.catalog import Column, Table, read_table, to_json
from epochal.sinks.oracle.dialect import DIALECT, XID_FORMAT
from epochal.sinks.oracle.plan import Arriving, plan, sent_fields
from epochal.terms import NO_ROWS, Ability, EpochNumber, Handle, Identity, Json, Receipt

if TYPE_CHECKING:
    from epochal.sinks.oracle.sink import Oracle

_NAME_EXISTS = 955
_KEY_CHARS = 255
_TRIED = 9_999_999
"""The partition of the attempt that tries two-phase commit out: no task has it."""


class OracleChecker(Checker):
    """Remembers what rows will come, so that what they need can be made once the start is sure."""

    def __init__(self, sink: Oracle, identity: Identity) -> None:
        self._sink = sink
        self._identity = identity
        self._incoming: Incoming[Arriving] | None = None

    # Asking

    def check(self, session: Session, schema: pa.Schema | None) -> list[Ability]:
        sink = self._sink
        self.is_ready = False
        self._incoming = incoming = (
            None if schema is None else Incoming(sent=sent_fields(schema, sink), sink=sink)
        )
        there = self._read(session)
        table = self._expected(there)
        if table is not None and incoming is not None:
            plan(incoming.sent, table, sink)
        if there is not None and sink.strategy == "prepared":
            self._require_no_unique(self._unique(session))
        if there is not None and sink.mode == "upsert":
            self._require_key(self._unique(session))
        return abilities(sink)

    def _read(self, session: Session) -> Table | None:
        return read_table(session, self._sink.table_schema, self._sink.table_name.table)

    def _expected(self, table: Table | None) -> Table | None:
        """The table as it will be at the first epoch."""
        sink, incoming = self._sink, self._incoming
        if table is None:
            if sink.create_table == "never":
                raise self._no_table()
            if incoming is None:
                return None
            columns = {one.name: one for one in _new_columns(incoming)}
            return Table(schema=sink.table_schema, name=sink.table_name.table, columns=columns)
        if incoming is None or sink.evolve == "never":
            return table
        added = {
            name: _new_column(name, how, is_key=False)
            for name, how in incoming.missing(table.columns).items()
        }
        return replace(table, columns={**table.columns, **added})

    def _no_table(self) -> Misconfigured:
        return Misconfigured(
            f"there is no table {self._sink.table} on {self._sink.place}, or it may not be seen",
            "create it, or create_table='if_missing'; names without quotes are in capitals",
        )

    def _require_no_unique(self, unique: dict[str, set[str]]) -> None:
        for index in unique:
            raise Misconfigured(
                f"strategy='prepared' on {self._sink.table}, which has the unique index {index}: a "
                "task that is tried again would wait for its own first attempt",
                "strategy='staged' (the default) needs none of this; or drop the index",
            )

    def _require_key(self, unique: dict[str, set[str]]) -> None:
        sink = self._sink
        keys = [(sink.column_map or {}).get(key, key) for key in sink.write_mode.keys]
        if set(keys) not in unique.values():
            written = ", ".join(map(DIALECT.quote, keys))
            raise Misconfigured(
                f"table {sink.table}: an upsert by {written} can't tell which row is meant: there "
                "is no primary key or unique index on exactly these columns",
                f"ALTER TABLE {DIALECT.quote(sink.table_schema, sink.table_name.table)} ADD "
                f"PRIMARY KEY ({written}), or mode='replace'",
            )

    def _unique(self, session: Session) -> dict[str, set[str]]:
        """The columns of each unique index of the table."""
        sink = self._sink
        rows = session.query(
            "SELECT i.index_name, c.column_name FROM all_indexes i JOIN all_ind_columns c"
            " ON c.index_owner = i.owner AND c.index_name = i.index_name"
            " WHERE i.uniqueness = 'UNIQUE'"
            f" AND i.table_owner = {DIALECT.literal(sink.table_schema)}"
            f" AND i.table_name = {DIALECT.literal(sink.table_name.table)} ORDER BY i.index_name"
        )
        indexes: dict[str, set[str]] = {}
        for index, column in rows:
            indexes.setdefault(index, set()).add(column)
        return indexes

    # Making

    def make_ready(self, session: Session) -> None:
        sink = self._sink
        if not DIALECT.present(session, sink.meta, [DIALECT.ledger]):
            for statement in DIALECT.create_ledger(sink.meta):
                _create(session, statement)
        if self._incoming is not None:
            self._make_table(session, self._incoming)
        if sink.strategy == "prepared" and not self.is_ready:
            self._try_two_phases(session)

    def _make_table(self, session: Session, incoming: Incoming[Arriving]) -> None:
        sink, table = self._sink, self._read(session)
        target = DIALECT.quote(sink.table_schema, sink.table_name.table)
        if table is None and sink.create_table == "if_missing":
            parts = [
                f"{DIALECT.quote(one.name)} {one.ddl}{' NOT NULL' if one.is_not_null else ''}"
                for one in _new_columns(incoming)
            ]
            if incoming.keys:
                parts.append(f"PRIMARY KEY ({', '.join(map(DIALECT.quote, incoming.keys))})")
            _create(session, f"CREATE TABLE {target} ({', '.join(parts)})")
        elif table is not None and sink.evolve == "add_columns":
            for name, how in incoming.missing(table.columns).items():
                ddl = _new_column(name, how, is_key=False).ddl
                session.execute(f"ALTER TABLE {target} ADD ({DIALECT.quote(name)} {ddl})")

    def _try_two_phases(self, session: Session) -> None:
        """Prepare something, close the connection, and roll it back from another one."""
        handle = self._identity.handle(EpochNumber(0), partition=_TRIED, attempt=getrandbits(40))
        name = staging_name(handle)
        try:
            self._prepare_nothing(handle)
            try:
                is_listed = name in DIALECT.prepared(session)
            finally:
                DIALECT.end_prepared(session, name, is_commit=False)
        except DIALECT.errors as error:
            if DIALECT.is_network(error):
                raise
            raise _no_two_phases(DIALECT.told(error), self._sink) from error
        if not is_listed:
            raise _no_two_phases("DBA_PENDING_TRANSACTIONS does not list it", self._sink)

    def _prepare_nothing(self, handle: Handle) -> None:
        """As a task does, but for its rows."""
        ledger = Ledger(schema=self._sink.meta, identity=self._identity, dialect=DIALECT)
        with closing(connecting.connect(self._sink.server)) as other:
            other.tpc_begin(other.xid(XID_FORMAT, staging_name(handle), ""))
            with other.cursor() as cursor:
                for statement in ledger.record([Receipt(handle=handle, fingerprint=NO_ROWS)]):
                    cursor.execute(statement)
            other.tpc_end()
            other.tpc_prepare()

    # What the apply and the tasks need

    def handout(self, session: Session) -> Json:
        return handout(to_json(self._must_read(session)), self._identity)

    def columns(self, session: Session) -> dict[str, bool]:
        table = self._must_read(session)
        return {column.name: column.is_not_null for column in table.columns.values()}

    def _must_read(self, session: Session) -> Table:
        table = self._read(session)
        if table is None:
            raise self._no_table()
        return table


def _create(session: Session, statement: str) -> None:
    """Whoever comes second finds it made."""
    try:
        session.execute(statement)
    except DIALECT.errors as error:
        if DIALECT.number_of(error) != _NAME_EXISTS:
            raise


def _no_two_phases(why: str, sink: Oracle) -> Misconfigured:
    return Misconfigured(
        f"strategy='prepared' on {sink.place}: a prepared transaction could not be ended from "
        f"another connection: {why}",
        "; ".join(sink.grants()) + "; strategy='staged' (the default) needs none of this",
    )


def _new_columns(incoming: Incoming[Arriving]) -> list[Column]:
    return [
        _new_column(name, how, is_key=name in incoming.keys)
        for name, how in incoming.created().items()
    ]


def _new_column(name: str, arriving: Arriving, *, is_key: bool) -> Column:
    ddl = arriving.sent.ddl
    if is_key and ddl in {"CLOB", "BLOB"}:
        # A key needs a length.
        ddl = f"VARCHAR2({_KEY_CHARS} CHAR)" if ddl == "CLOB" else f"RAW({_KEY_CHARS})"
    scale = 6 if ddl == "TIMESTAMP(6)" else arriving.sent.scale
    return Column(name=name, data_type=ddl.split("(")[0], ddl=ddl, scale=scale, is_not_null=is_key)
