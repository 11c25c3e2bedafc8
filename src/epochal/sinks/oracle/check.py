"""The checks before the first row, what is created before the first epoch, and grants."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from random import getrandbits
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from epochal.errors import Misconfigured
from epochal.kit.sql.check import (
    Checker,
    ExpectedColumns,
    abilities,
    exact_values,
    must_not_collide,
)
from epochal.kit.sql.client import Session
from epochal.kit.sql.columns import no_key
from epochal.kit.sql.ledger_rows import LedgerRows
from epochal.kit.sql.names import staging_name
from epochal.sinks.oracle import client
from epochal.sinks.oracle.dialect import DIALECT, XID_FORMAT
from epochal.sinks.oracle.types import Arriving, Column, Planned, Table, plan, sent_fields
from epochal.terms import NO_ROWS, Ability, EpochNumber, Handle, Identity, Receipt

if TYPE_CHECKING:
    from epochal.sinks.oracle.sink import Oracle

_KEY_CHARS = 255
_TRIED = 9_999_999
"""The partition of the attempt that tries two-phase commit out: no task has it."""


class OracleChecker(Checker[Table, Arriving]):
    def __init__(self, sink: Oracle, identity: Identity) -> None:
        super().__init__(sink, identity, DIALECT)
        self._sink = sink

    # Asking

    def check(self, session: Session, schema: pa.Schema | None) -> list[Ability]:
        sink = self._sink
        expected = self.expect(schema)
        there = self.read_table(session)
        table = self.table_to_be(session, there)
        planned: Sequence[Planned] = ()
        if table is not None and expected is not None:
            planned = plan(expected.sent, table, sink)
        self.require_delete_when(session)
        if there is not None and sink.strategy == "prepared":
            self._require_no_unique(self._unique(session))
        if there is not None and sink.write_mode.needs_unique_key:
            self._require_key(self._unique(session))
        return [*abilities(sink), *exact_values(planned)]

    def _require_no_unique(self, unique: dict[str, set[str]]) -> None:
        for index in unique:
            raise must_not_collide(self._sink.table, f"unique index {index}")

    def _require_key(self, unique: dict[str, set[str]]) -> None:
        sink = self._sink
        _, keys = sink.named_columns()
        if set(keys) not in unique.values():
            written = ", ".join(map(DIALECT.quote, keys))
            fact, hint = no_key(written, self.new_name())
            raise Misconfigured(f"table {sink.table}: {fact}", hint)

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

    # What rows need

    def sent_fields(self, schema: pa.Schema) -> dict[str, Arriving]:
        return sent_fields(schema, self._sink)

    def read_table(self, session: Session) -> Table | None:
        return read_table(session, self._sink.table_schema, self._sink.table_name.table)

    def layout(self, session: Session) -> str:
        return DIALECT.layout(session.query, self._sink.table_schema, self._sink.table_name.table)

    def read_staging(self, session: Session, schema: str, table: str) -> Mapping[str, Column]:
        staged = read_table(session, schema, table)
        return {} if staged is None else staged.columns

    def no_table(self, session: Session) -> Misconfigured:  # noqa: ARG002
        return Misconfigured(
            f"there is no table {self._sink.table} on {self._sink.place}, or it may not be seen",
            "create it, or create_table='if_missing'; names without quotes are in capitals",
        )

    def new_name(self) -> str:
        return DIALECT.quote(self._sink.table_schema, self._sink.table_name.table)

    def new_table(self, expected: ExpectedColumns[Arriving]) -> Table:
        sink = self._sink
        columns = self.new_columns(expected)
        return Table(schema=sink.table_schema, name=sink.table_name.table, columns=columns)

    def new_ddl(self, sent: Arriving, *, is_key: bool) -> str:
        """A key needs a length."""
        ddl = sent.sent.ddl
        if is_key and ddl in {"CLOB", "BLOB"}:
            return f"VARCHAR2({_KEY_CHARS} CHAR)" if ddl == "CLOB" else f"RAW({_KEY_CHARS})"
        return ddl

    def new_column(self, name: str, sent: Arriving, *, is_key: bool) -> Column:
        ddl = self.new_ddl(sent, is_key=is_key)
        scale = 6 if ddl == "TIMESTAMP(6)" else sent.sent.scale
        data_type = ddl.partition("(")[0]
        return Column(name=name, data_type=data_type, ddl=ddl, scale=scale, is_not_null=is_key)

    def make_meta(self, session: Session) -> None:
        if not DIALECT.present(session, self._sink.meta, [DIALECT.ledger]):
            for statement in DIALECT.create_ledger(self._sink.meta):
                self._create(session, statement)

    # Two-phase commit

    def make_ready(self, session: Session) -> None:
        super().make_ready(session)
        if self._sink.strategy == "prepared":
            self._try_two_phases(session)

    def _try_two_phases(self, session: Session) -> None:
        """Prepare something, close the connection, and roll it back from another one."""
        handle = self.identity.handle(EpochNumber(0), partition=_TRIED, attempt=getrandbits(40))
        name = staging_name(handle)
        try:
            self._prepare_nothing(handle)
            try:
                is_listed = DIALECT.is_prepared(session, name)
            finally:
                DIALECT.end_prepared(session, name, is_commit=False)
        except DIALECT.errors as error:
            if DIALECT.is_network(error):
                raise
            raise _no_two_phases(DIALECT.text_of(error), self._sink) from error
        if not is_listed:
            raise _no_two_phases("DBA_PENDING_TRANSACTIONS does not list it", self._sink)

    def _prepare_nothing(self, handle: Handle) -> None:
        """As a task does, but for its rows."""
        ledger = LedgerRows(schema=self._sink.meta, identity=self.identity, dialect=DIALECT)
        with closing(client.connect(self._sink.server)) as other:
            other.tpc_begin(other.xid(XID_FORMAT, staging_name(handle), ""))
            with other.cursor() as cursor:
                for statement in ledger.record([Receipt(handle=handle, fingerprint=NO_ROWS)]):
                    cursor.execute(statement)
            other.tpc_end()
            other.tpc_prepare()


def _no_two_phases(why: str, sink: Oracle) -> Misconfigured:
    return Misconfigured(
        f"strategy='prepared' on {sink.place}: a prepared transaction could not be ended from "
        f"another connection: {why}",
        "; ".join(sink.grants()) + "; strategy='staged' (the default) needs none of this",
    )


# The server's catalog


def read_table(session: Session, schema: str, name: str) -> Table | None:
    rows = session.query(
        "SELECT column_name, data_type, data_length, char_length, char_used, data_precision,"
        " data_scale, nullable, default_length, virtual_column, identity_column"
        f" FROM all_tab_cols WHERE owner = {DIALECT.literal(schema)}"
        f" AND table_name = {DIALECT.literal(name)} AND hidden_column = 'NO' ORDER BY column_id"
    )
    columns = [_column(row) for row in rows]
    if not columns:
        return None
    return Table(schema=schema, name=name, columns={one.name: one for one in columns})


def _column(row: Sequence[Any]) -> Column:
    name, written, length, chars, unit, precision, scale, nullable, default, virtual, identity = row
    data_type = re.sub(r"\(\d+\)", "", written)
    fraction = re.search(r"TIMESTAMP\((\d+)\)", written)
    return Column(
        name=name,
        data_type=data_type,
        ddl=_ddl(written, length, chars, unit, precision, scale),
        scale=int(fraction[1]) if fraction else None if scale is None else int(scale),
        is_not_null=nullable == "N",
        has_default=bool(default),
        is_generated=virtual == "YES" or identity == "YES",
    )


def _ddl(written: str, *numbers: Any) -> str:
    length, chars, unit, precision, scale = numbers
    if written in {"VARCHAR2", "CHAR"}:
        return f"{written}({int(chars)} CHAR)" if unit == "C" else f"{written}({int(length)} BYTE)"
    if written in {"NVARCHAR2", "NCHAR"}:
        return f"{written}({int(chars)})"
    if written == "RAW":
        return f"RAW({int(length)})"
    if written == "NUMBER" and (precision is not None or scale is not None):
        whole = "*" if precision is None else int(precision)
        return f"NUMBER({whole},{int(scale or 0)})"
    return written


# The least privileges, as statements that a DBA can read and run

_ELSEWHERE = (
    *("CREATE ANY TABLE", "CREATE ANY INDEX", "CREATE ANY SEQUENCE", "DROP ANY TABLE"),
    *("SELECT ANY TABLE", "INSERT ANY TABLE", "DELETE ANY TABLE", "SELECT ANY SEQUENCE"),
)
"""What staging tables and the ledger need in a schema that is not the user's own."""


def grants(sink: Oracle, user: str) -> list[str]:
    """Statements for a DBA; in a schema of its own the user needs no rights on its tables."""
    name, mode = user.upper(), sink.write_mode
    to = DIALECT.quote(name)
    # Rows of a staging table are numbered by an identity column, which is a sequence.
    statements = [
        f"GRANT CREATE SESSION, CREATE TABLE, CREATE SEQUENCE TO {to}",
        f"ALTER USER {to} QUOTA UNLIMITED ON users",
    ]
    if sink.meta != name:
        statements.append(f"GRANT {', '.join(_ELSEWHERE)} TO {to}")
    if sink.table_schema != name:
        rights = ["SELECT", "INSERT"]
        rights += ["UPDATE"] if mode.updates else []
        rights += ["DELETE"] if mode.deletes else []
        rights += ["ALTER"] if sink.evolve == "add_columns" else []
        target = DIALECT.quote(sink.table_schema, sink.table_name.table)
        statements.append(f"GRANT {', '.join(rights)} ON {target} TO {to}")
    if sink.strategy == "prepared":
        statements += [
            f"GRANT SELECT ON sys.dba_pending_transactions TO {to}",
            f"GRANT FORCE ANY TRANSACTION TO {to}",
        ]
    return statements
