"""Which field goes into which column, and whether it can: found before the first row.

A field is known by its name in capitals, as Oracle writes a name that stands without quotes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa

from epochal.kit.sql.columns import (
    Problems,
    columns_of,
    generated_column,
    missing_column,
    require_arriving,
    require_filled,
    require_keys_written,
    staged_fields,
)
from epochal.kit.sql.declaring import TableSink
from epochal.sinks.oracle.catalog import Column, Table
from epochal.sinks.oracle.dialect import DIALECT, NAMES
from epochal.sinks.oracle.types import Sent, mismatch, sent_as


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
    """How each field of these rows travels, by its name in capitals."""
    sent: dict[str, Arriving] = {}
    problems = Problems()
    for field in schema:
        how = sent_as(field.type)
        if isinstance(how, str):
            problems.add(f'field "{field.name}": {how}', "cast it, or leave it out: select=")
        else:
            sent[NAMES.require(field.name, "field").upper()] = Arriving(field.name, how)
    if not problems.facts and (len(sent) < len(schema.names) or DIALECT.at in sent):
        problems.add(
            f"two fields have one name (in any case), or one is called {DIALECT.at}: "
            f"{', '.join(schema.names)}",
            "rename it in select=",
        )
    problems.raise_if_any(sink.table)
    return {name: sent[name] for name in staged_fields(sent, sink.column_map, sink.write_mode)}


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
