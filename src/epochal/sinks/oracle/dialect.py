"""Oracle's SQL: DDL commits, and staged rows are numbered by an identity column."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, cast

from epochal.kit.sql.apply import Apply
from epochal.kit.sql.client import Session
from epochal.kit.sql.dialect import OwnTablesDialect
from epochal.kit.sql.ledger_rows import NAME_CHARS_MAX
from epochal.kit.sql.names import NameRule, parse_staging_name, staging_prefix
from epochal.sinks.oracle.errors import OracleErrors
from epochal.terms import Identity, InDoubt

if TYPE_CHECKING:
    from epochal.sinks.oracle.client import OracleSession

NAMES = NameRule(database="Oracle", length_max=128, folds=True)
_AT = "EPOCHAL_AT"
"""The column of a staging table that numbers its rows."""
XID_FORMAT = 0x65706F63
"""The format id of our global transactions."""


class OracleDialect(OracleErrors, OwnTablesDialect):
    names: ClassVar[NameRule] = NAMES
    ledger: ClassVar[str] = "EPOCHAL_LEDGER"
    place: ClassVar[str] = f'"{_AT}"'
    own_columns: ClassVar[frozenset[str]] = frozenset({_AT})

    def literal(self, value: str | int | None) -> str:
        if value is None:
            return "NULL"
        return str(value) if isinstance(value, int) else "'" + value.replace("'", "''") + "'"

    def first(self, query: str, count: int) -> str:
        return f"{query} FETCH FIRST {count} ROWS ONLY"

    def values(self, rows: Sequence[str]) -> str:
        """VALUES takes a single row."""
        return " UNION ALL ".join(f"SELECT {row}{self.dual}" for row in rows)

    @property
    def clock(self) -> str:
        return (
            "SELECT (CAST(SYS_EXTRACT_UTC(SYSTIMESTAMP) AS DATE) - DATE '1970-01-01') * 86400"
            " FROM DUAL"
        )

    def create_ledger(self, schema: str) -> list[str]:
        name = f"VARCHAR2({NAME_CHARS_MAX} CHAR)"
        return [
            f'CREATE TABLE {self.quote(schema, self.ledger)} ("uid" VARCHAR2(12) NOT NULL,'
            ' "sink" VARCHAR2(8) NOT NULL, "epoch" NUMBER(19) NOT NULL,'
            ' "part" NUMBER(10) NOT NULL, "generation" NUMBER(19) NOT NULL,'
            ' "attempt" NUMBER(19) NOT NULL, "claim" VARCHAR2(8) NOT NULL,'
            f' "owner" VARCHAR2(8) NOT NULL, "pipeline" {name} NOT NULL,'
            f' "sink_name" {name} NOT NULL, "run" {name}, "row_count" NUMBER(19) NOT NULL,'
            ' "written_at" TIMESTAMP(6) DEFAULT SYSTIMESTAMP NOT NULL,'
            ' PRIMARY KEY ("uid", "sink", "epoch", "part", "generation", "attempt", "claim"))'
        ]

    def create_table(self, target: str, definitions: Sequence[str]) -> str:
        return f"CREATE TABLE {target} ({', '.join(definitions)})"

    def add_columns(self, target: str, definitions: Sequence[str]) -> str:
        return f"ALTER TABLE {target} ADD ({', '.join(definitions)})"

    def layout_sql(self, schema: str | None, table: str) -> str:
        return (
            "SELECT column_name, data_type, data_length, char_length, data_precision, data_scale"
            f" FROM all_tab_cols WHERE owner = {self.literal(schema)}"
            f" AND table_name = {self.literal(table)} AND hidden_column = 'NO' ORDER BY column_id"
        )

    # Applying

    def upsert(self, apply: Apply) -> str:
        changes = [
            f"t.{one}" for one in (*map(apply.assignment, apply.values), *apply.live_marks())
        ]
        if apply.mode.mode == "insert_new":
            changes = []
        matched = f" WHEN MATCHED THEN UPDATE SET {', '.join(changes)}" if changes else ""
        newer = " AND ".join(apply.newer_condition())
        matched = f"{matched} WHERE {newer}" if matched and newer else matched
        values = ", ".join(f"i.{apply.alias(one)}" for one in apply.mapped)
        return (
            f"MERGE INTO {apply.target} t"
            f" USING (SELECT i.* FROM ({apply.winners()}) i WHERE {apply.written()}) i"
            f" ON ({apply.matches('t', 'i')}){matched}"
            f" WHEN NOT MATCHED THEN INSERT ({apply.columns()}) VALUES ({values})"
        )

    def update(self, apply: Apply, changes: Sequence[str], condition: str) -> str:
        changed = ", ".join(f"t.{change}" for change in changes)
        return (
            f"MERGE INTO {apply.target} t USING ({apply.winners()}) i"
            f" ON ({apply.matches('t', 'i')}) WHEN MATCHED THEN UPDATE SET {changed}"
            f" WHERE {condition}"
        )

    def delete(self, apply: Apply, condition: str) -> str:
        return (
            f"DELETE FROM {apply.target} t WHERE EXISTS (SELECT 1 FROM ({apply.winners()}) i"
            f" WHERE {apply.matches('t', 'i')} AND {condition})"
        )

    now_constraints: ClassVar[str] = "SET CONSTRAINTS ALL IMMEDIATE"
    later_constraints: ClassVar[str] = "SET CONSTRAINTS ALL DEFERRED"

    # Staging tables

    def staged(self, session: Session, schema: str, identity: Identity) -> list[InDoubt]:
        prefix = staging_prefix(identity)
        rows = session.query(
            f"SELECT object_name FROM all_objects WHERE owner = {self.literal(schema)}"
            f" AND object_type = 'TABLE' AND SUBSTR(object_name, 1, {len(prefix)}) ="
            f" {self.literal(prefix)} ORDER BY object_name"
        )
        return [InDoubt(name=name, handle=parse_staging_name(name)) for (name,) in rows]

    present_sql: ClassVar[str] = (
        "SELECT object_name FROM all_objects WHERE object_type = 'TABLE'"
        " AND owner = {schema} AND object_name IN ({tables})"
    )
    columns_sql: ClassVar[str] = (
        "SELECT column_name FROM all_tab_columns"
        " WHERE owner = {schema} AND table_name = {table} ORDER BY column_id"
    )

    def drop(self, session: Session, schema: str, tables: Sequence[str]) -> None:
        for name in tables:
            try:
                session.execute(f"DROP TABLE {self.quote(schema, name)} PURGE")
            except self.errors as error:
                if not self.is_missing(error):
                    raise

    # Prepared transactions

    def prepared_names(self, session: Session) -> list[str]:
        """Of all prepared transactions of our format."""
        rows = session.query(
            f"SELECT globalid FROM dba_pending_transactions WHERE formatid = {XID_FORMAT}"
        )
        return [_text(name) for (name,) in rows]

    def end_prepared(self, session: Session, name: str, *, is_commit: bool) -> None:
        cast("OracleSession", session).end_prepared(name, is_commit=is_commit)


def _text(name: str | bytes) -> str:
    return name if isinstance(name, str) else name.decode(errors="replace")


DIALECT = OracleDialect()
