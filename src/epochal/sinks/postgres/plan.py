"""The plan of a write: the table, and which field goes into which of its columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

from epochal.kit.sql import columns as shared
from epochal.kit.sql.apply import Mapped
from epochal.kit.sql.columns import (
    Problems,
    columns_of,
    generated_column,
    missing_column,
    require_arriving,
    require_filled,
    require_keys_written,
)
from epochal.kit.sql.modes import WriteMode
from epochal.kit.sql.table_sink import TableSink
from epochal.sinks.postgres.dialect import DIALECT, NAMES
from epochal.sinks.postgres.types import (
    Cast,
    Mismatch,
    Sent,
    Type,
    cast_between,
    is_direct,
    sent_as,
)
from epochal.terms import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    name: str
    type: Type
    is_enum: bool = False
    is_not_null: bool = False
    has_default: bool = False
    is_identity: bool = False
    is_always_identity: bool = False
    is_generated: bool = False

    @property
    def needs_value(self) -> bool:
        return self.is_not_null and not (self.has_default or self.is_identity or self.is_generated)


@dataclass(frozen=True, slots=True, kw_only=True)
class UniqueIndex:
    name: str
    columns: tuple[str, ...]
    is_exclusion: bool
    is_immediate: bool
    is_plain: bool
    """Whole, valid and on columns only: what ON CONFLICT can use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    oid: int
    schema: str
    name: str
    kind: str
    has_row_security: bool
    columns: Mapping[str, Column]
    unique: tuple[UniqueIndex, ...] = ()

    @property
    def quoted(self) -> str:
        return DIALECT.quote(self.schema, self.name)

    def __str__(self) -> str:
        return f"{self.schema}.{self.name}"


def to_json(table: Table) -> Json:
    """A table's columns for the tasks."""
    return {
        "schema": table.schema,
        "name": table.name,
        "row_security": table.has_row_security,
        "columns": [asdict(column) for column in table.columns.values()],
    }


def from_json(given: Mapping[str, Any]) -> Table:
    columns = [Column(**{**column, "type": Type(**column["type"])}) for column in given["columns"]]
    return Table(
        oid=0,
        schema=given["schema"],
        name=given["name"],
        kind="table",
        has_row_security=given["row_security"],
        columns={column.name: column for column in columns},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One field that is written, and the column that takes it."""

    field: str
    source: Type
    column: Column
    cast: Cast

    @property
    def mapped(self) -> Mapped:
        is_citext = self.column.type.base == "citext"
        return Mapped(
            field=self.field,
            column=self.column.name,
            is_not_null=self.column.is_not_null,
            cast=(self.cast.before, self.cast.after),
            key_cast=("", f"::{self.column.type.written}") if is_citext else None,
        )


def sent_fields(schema: pa.Schema, sink: TableSink) -> dict[str, Sent]:
    return shared.sent_fields(schema, sink, DIALECT, lambda field: sent_as(field.type))


def plan(
    fields: Mapping[str, Type], table: Table, columns: Mapping[str, str] | None, mode: WriteMode
) -> tuple[Planned, ...]:
    """How these fields are written to this table, or `Misconfigured` with everything against it."""
    problems = Problems()
    for name in fields:
        NAMES.require(name, "field")
    require_arriving(fields, columns, mode, problems)
    wanted = columns_of(fields, table.columns, columns, mode)
    planned = [
        one
        for name, column in wanted.items()
        if (one := _planned(name, fields[name], column, table, problems)) is not None
    ]
    filled = {one.column.name for one in planned}
    require_filled(table.columns.values(), filled, problems)
    keys = tuple(one for key in mode.keys for one in planned if one.field == key)
    if mode.is_keyed:
        _require_keys(mode, keys, table, problems)
    problems.raise_if_any(f"{table.kind} {table}")
    return tuple(planned)


def may_go_direct(planned: Sequence[Planned], table: Table) -> bool:
    """A binary COPY into the table itself: the bytes must fit, and COPY knows no row security."""
    return not table.has_row_security and all(
        is_direct(one.source, one.column.type, is_enum=one.column.is_enum) for one in planned
    )


def _planned(
    name: str, source: Type, column_name: str, table: Table, problems: Problems
) -> Planned | None:
    column = table.columns.get(column_name)
    if column is None:
        problems.add(*missing_column(name, column_name, table.columns))
        return None
    if column.is_generated:
        problems.add(*generated_column(name, column_name))
    if column.is_always_identity:
        problems.add(
            f'column "{column_name}" is GENERATED ALWAYS AS IDENTITY',
            f'leave the field "{name}" out, or ALTER TABLE {table} ALTER COLUMN '
            f'"{column_name}" SET GENERATED BY DEFAULT',
        )
    cast = cast_between(source, column.type)
    if isinstance(cast, Mismatch):
        problems.add(f'field "{name}": {cast.because} (column "{column_name}")', cast.hint)
        return None
    return Planned(field=name, source=source, column=column, cast=cast)


def _require_keys(
    mode: WriteMode, keys: tuple[Planned, ...], table: Table, problems: Problems
) -> None:
    written_keys = {key.field for key in keys}
    if not require_keys_written(mode, written_keys, problems) or mode.mode != "upsert":
        return
    names = [key.column.name for key in keys]
    fitting = [one for one in table.unique if set(one.columns) == set(names)]
    written = ", ".join(f'"{name}"' for name in names)
    if not any(one.is_plain and not one.is_exclusion and one.is_immediate for one in fitting):
        because = (
            "the one that is there is deferrable, partial or an exclusion constraint"
            if fitting
            else "there is no primary key or unique constraint on exactly these columns"
        )
        problems.add(
            f"an upsert by {written} can't tell which row is meant: {because}",
            f"ALTER TABLE {table} ADD PRIMARY KEY ({written}), or mode='replace'",
        )
