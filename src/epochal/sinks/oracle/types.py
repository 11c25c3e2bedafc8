"""Oracle's types: what is bound, which column takes which family, and the plan of a write.

A staging column has the type of the column that its field is meant for. Where Oracle would truncate
or change a value silently (fractions of a second in a DATE, digits behind a NUMBER's scale, the
empty string, which it takes for null), the values are checked before they are sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from epochal.errors import Problems
from epochal.kit.sql import columns
from epochal.kit.sql.columns import columns_taking
from epochal.kit.sql.dialect import order_copy
from epochal.kit.sql.table_sink import TableSink
from epochal.kit.sql.types import (
    TAKERS,
    Convert,
    Sent,
    Values,
    cast_to,
    in_utc,
    microseconds,
    sent_to,
)
from epochal.sinks.oracle.dialect import DIALECT


def sent_as(kind: pa.DataType) -> Sent | str:
    """How values of this type are bound, or why they can't be."""
    sent = sent_to("oracle", kind)
    return sent if isinstance(sent, str) else sent.then(_BOUND_AS.get(sent.family))


def _integers(values: Values) -> Values:
    return values if pa.types.is_decimal(values.type) else values.cast(pa.int64())


_BOUND_AS: Mapping[str, Convert] = {
    "bool": cast_to(pa.int8()),
    "integer": _integers,
    "float": cast_to(pa.float64()),
    "text": cast_to(pa.large_string()),
    "binary": cast_to(pa.large_binary()),
    "date": cast_to(pa.timestamp("s")),
    "timestamp": in_utc,
    "duration": microseconds,
}


def mismatch(sent: Sent, data_type: str, scale: int | None) -> str:
    """Why a column can't take it, or nothing."""
    if data_type not in TAKERS[sent.family].oracle:
        return f"{sent.ddl} can't become {data_type} without loss"
    if sent.family == "float" and scale == 0 and data_type == "NUMBER":
        return f"{sent.ddl} can't become a whole number without loss"
    if sent.family == "decimal" and scale is not None and scale < sent.scale:
        return f"{sent.ddl} has more digits behind the point than the column's {scale}"
    return ""


_EXACT_IN_BITS: Mapping[str, frozenset[str]] = {
    "BINARY_FLOAT": frozenset({"NUMBER(1)", "NUMBER(3)", "NUMBER(5)", "BINARY_FLOAT"}),
    "BINARY_DOUBLE": frozenset(
        {"NUMBER(1)", "NUMBER(3)", "NUMBER(5)", "NUMBER(10)", "BINARY_FLOAT", "BINARY_DOUBLE"}
    ),
    "FLOAT": frozenset({"NUMBER(1)"}),
}
"""What columns of so many bits keep as it is."""


def rounding(sent: Sent, column: Column) -> str:
    """How a column may round what arrives; empty where it keeps or refuses every value."""
    kind = column.data_type
    if kind in _EXACT_IN_BITS:
        return "" if sent.ddl in _EXACT_IN_BITS[kind] else f"{column.ddl} keeps fewer digits"
    is_scaled = kind == "NUMBER" and column.scale is not None
    return f"{column.ddl} rounds to its scale" if is_scaled and sent.family in _ANY_SCALE else ""


_ANY_SCALE = frozenset({"float", "text"})


# The plan of a write: the table, and which field goes into which of its columns.
# A field is known by its name in capitals, as Oracle reads a name without quotes.


@dataclass(frozen=True, slots=True, kw_only=True)
class Column(columns.Column):
    data_type: str
    """`TIMESTAMP WITH TIME ZONE`, without digits."""
    ddl: str
    scale: int | None = None
    """Digits after the point, of a NUMBER that has a fixed number of them; of a TIMESTAMP's
    seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table(columns.Table[Column]):
    """As the catalog describes it."""


def from_json(given: Mapping[str, Any]) -> Table:
    """The table as a task is given it."""
    columns = {name: Column(**column) for name, column in given["columns"].items()}
    return Table(**{**given, "columns": columns})


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One field that travels, and the column that takes it, if there is one."""

    field: str
    arrives_as: str
    """The field's own name, case kept."""
    sent: Sent
    column: Column | None

    @property
    def rounding(self) -> str:
        """For `check()`: how the column may round the field."""
        return "" if self.column is None else rounding(self.sent, self.column)

    @property
    def staging_ddl(self) -> str:
        return self.sent.ddl if self.column is None else self.column.ddl


@dataclass(frozen=True, slots=True)
class Arriving:
    name: str
    sent: Sent


def sent_fields(schema: pa.Schema, sink: TableSink) -> dict[str, Arriving]:
    return columns.sent_fields(schema, sink, DIALECT, _arriving)


def _arriving(field: pa.Field) -> Arriving | str:
    sent = sent_as(field.type)
    return sent if isinstance(sent, str) else Arriving(field.name, sent)


def plan(sent: Mapping[str, Arriving], table: Table, sink: TableSink) -> tuple[Planned, ...]:
    """How these fields are written to this table, or `Misconfigured` with everything against it."""
    problems = Problems()
    taking = columns_taking(sent, table, sink, problems)
    planned = [_planned(name, how, taking.get(name), problems) for name, how in sent.items()]
    for number, name in enumerate(sink.write_mode.order_by):
        if name in taking and taking[name].data_type not in _ORDERED[sent[name].sent.family]:
            planned.append(_order_copy(number, sent[name]))
    problems.raise_if_any(f"{table.kind} {table}")
    return tuple(planned)


_ORDERED: Mapping[str, frozenset[str]] = {
    family: takers.oracle - {"BINARY_FLOAT", "BINARY_DOUBLE"} for family, takers in TAKERS.items()
} | {"text": TAKERS["json"].oracle}
"""Columns in which values of a family have the order that they arrive with."""


def _order_copy(number: int, arriving: Arriving) -> Planned:
    sent = arriving.sent
    if sent.family == "text":
        # A CLOB has no order.
        sent = replace(sent, ddl="VARCHAR2(4000)")
    return Planned(field=order_copy(number), arrives_as=arriving.name, sent=sent, column=None)


def _planned(name: str, arriving: Arriving, column: Column | None, problems: Problems) -> Planned:
    because = "" if column is None else mismatch(arriving.sent, column.data_type, column.scale)
    if column is not None and because:
        problems.add(
            f'field "{name}": {because} (column "{column.name}")',
            "cast it in the query, or alter the column",
        )
    return Planned(field=name, arrives_as=arriving.name, sent=arriving.sent, column=column)
