"""A table as the server's catalog describes it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from epochal.kit.sql.client import Session
from epochal.sinks.oracle.dialect import DIALECT
from epochal.terms import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    name: str
    data_type: str
    """`TIMESTAMP WITH TIME ZONE`, without digits."""
    ddl: str
    scale: int | None = None
    """Digits after the point, of a NUMBER that has a fixed number of them; of a TIMESTAMP's
    seconds."""
    is_not_null: bool = False
    has_default: bool = False
    is_generated: bool = False

    @property
    def needs_value(self) -> bool:
        return self.is_not_null and not (self.has_default or self.is_generated)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    schema: str
    name: str
    columns: Mapping[str, Column]

    def __str__(self) -> str:
        return f"{self.schema}.{self.name}"


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


def to_json(table: Table) -> Json:
    """A table's columns for the tasks."""
    return {
        "schema": table.schema,
        "name": table.name,
        "columns": [asdict(column) for column in table.columns.values()],
    }


def from_json(given: Mapping[str, Any]) -> Table:
    columns = [Column(**column) for column in given["columns"]]
    return Table(
        schema=given["schema"],
        name=given["name"],
        columns={column.name: column for column in columns},
    )
