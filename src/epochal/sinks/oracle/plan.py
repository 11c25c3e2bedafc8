"""The plan of a write: the table, and which field goes into which of its columns.

A field is known by its name in capitals, as Oracle reads a name without quotes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

from epochal.kit.sql import columns as shared
from epochal.kit.sql.columns import (
    Problems,
    columns_of,
    generated_column,
    missing_column,
    require_arriving,
    require_filled,
    require_keys_written,
)
from epochal.kit.sql.table_sink import TableSink
from epochal.kit.sql.types import Sent
from epochal.sinks.oracle.dialect import DIALECT
from epochal.sinks.oracle.types import mismatch, sent_as
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
    problems, mode = Problems(), sink.write_mode
    require_arriving(sent.keys(), sink.column_map, mode, problems)
    wanted = columns_of(sent, table.columns, sink.column_map, mode)
    planned = [_planned(name, how, wanted.get(name), table, problems) for name, how in sent.items()]
    filled = {one.column.name for one in planned if one.column is not None}
    require_filled(table.columns.values(), filled, problems)
    require_keys_written(mode, {one.field for one in planned if one.column is not None}, problems)
    problems.raise_if_any(f"table {table}")
    return tuple(planned)


def _planned(
    name: str, arriving: Arriving, column_name: str | None, table: Table, problems: Problems
) -> Planned:
    column = None if column_name is None else table.columns.get(column_name)
    if column_name is not None and column is None:
        problems.add(*missing_column(name, column_name, table.columns))
    if column is not None:
        if column.is_generated:
            problems.add(*generated_column(name, column.name))
        because = mismatch(arriving.sent, column.data_type, column.scale)
        if because:
            problems.add(
                f'field "{name}": {because} (column "{column_name}")',
                "cast it in the query, or alter the column",
            )
    return Planned(field=name, arrives_as=arriving.name, sent=arriving.sent, column=column)
