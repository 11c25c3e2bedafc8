"""The plan of a write: the table, and which field goes into which of its columns.

A field is known by its name in capitals, as Oracle reads a name without quotes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from epochal.errors import Problems
from epochal.kit.sql import columns as shared
from epochal.kit.sql.columns import columns_taking
from epochal.kit.sql.table_sink import TableSink
from epochal.kit.sql.types import Sent
from epochal.sinks.oracle.dialect import DIALECT
from epochal.sinks.oracle.types import mismatch, sent_as


@dataclass(frozen=True, slots=True, kw_only=True)
class Column(shared.Column):
    data_type: str
    """`TIMESTAMP WITH TIME ZONE`, without digits."""
    ddl: str
    scale: int | None = None
    """Digits after the point, of a NUMBER that has a fixed number of them; of a TIMESTAMP's
    seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table(shared.Table[Column]):
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
    def staging_ddl(self) -> str:
        return self.sent.ddl if self.column is None else self.column.ddl


@dataclass(frozen=True, slots=True)
class Arriving:
    name: str
    sent: Sent


def sent_fields(schema: pa.Schema, sink: TableSink) -> dict[str, Arriving]:
    return shared.sent_fields(schema, sink, DIALECT, _arriving)


def _arriving(field: pa.Field) -> Arriving | str:
    sent = sent_as(field.type)
    return sent if isinstance(sent, str) else Arriving(field.name, sent)


def plan(sent: Mapping[str, Arriving], table: Table, sink: TableSink) -> tuple[Planned, ...]:
    """How these fields are written to this table, or `Misconfigured` with everything against it."""
    problems = Problems()
    taking = columns_taking(sent, table, sink, problems)
    planned = [_planned(name, how, taking.get(name), problems) for name, how in sent.items()]
    problems.raise_if_any(f"{table.kind} {table}")
    return tuple(planned)


def _planned(name: str, arriving: Arriving, column: Column | None, problems: Problems) -> Planned:
    because = "" if column is None else mismatch(arriving.sent, column.data_type, column.scale)
    if column is not None and because:
        problems.add(
            f'field "{name}": {because} (column "{column.name}")',
            "cast it in the query, or alter the column",
        )
    return Planned(field=name, arrives_as=arriving.name, sent=arriving.sent, column=column)
