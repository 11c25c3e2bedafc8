"""Reads a table from the server's catalog."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from epochal.kit.sql.client import Session
from epochal.sinks.oracle.dialect import DIALECT
from epochal.sinks.oracle.plan import Column, Table


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
