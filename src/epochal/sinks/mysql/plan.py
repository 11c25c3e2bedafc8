"""The plan of a write: the table, and which field goes into which of its columns."""

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
from epochal.kit.sql.modes import WriteMode
from epochal.kit.sql.table_sink import TableSink
from epochal.kit.sql.types import Sent
from epochal.sinks.mysql.dialect import DIALECT
from epochal.sinks.mysql.types import Mismatch, load_expression, sent_as
from epochal.terms import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    name: str
    data_type: str
    """`varchar`, without a length."""
    ddl: str
    """The whole type, character set and collation included."""
    scale: int = 0
    """Digits after the point, of a decimal; of a moment, of its seconds."""
    is_not_null: bool = False
    has_default: bool = False
    is_auto: bool = False
    is_generated: bool = False

    @property
    def needs_value(self) -> bool:
        return self.is_not_null and not (self.has_default or self.is_auto or self.is_generated)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    schema: str
    name: str
    kind: str
    is_transactional: bool
    engine: str
    columns: Mapping[str, Column]
    unique: Mapping[str, tuple[str, ...]]
    """Unique indexes and their columns; one on an expression has an empty name in it."""

    def __str__(self) -> str:
        return f"{self.schema}.{self.name}"

    def unique_hit_by(self, written: frozenset[str]) -> dict[str, tuple[str, ...]]:
        """
        Unique indexes that rows with these columns can meet another row in.

        Not those with a column that we leave to the server, and that it numbers or leaves null.
        """

        def is_never_equal(name: str) -> bool:
            column = self.columns.get(name)
            if column is None or name in written:
                return False
            return column.is_auto or not (column.is_not_null or column.has_default)

        return {
            name: columns
            for name, columns in self.unique.items()
            if not any(map(is_never_equal, columns))
        }


def to_json(table: Table) -> Json:
    """A table's columns for the tasks."""
    return {
        "schema": table.schema,
        "name": table.name,
        "columns": [asdict(column) for column in table.columns.values()],
        "unique": {name: list(columns) for name, columns in table.unique.items()},
    }


def from_json(given: Mapping[str, Any]) -> Table:
    columns = [Column(**column) for column in given["columns"]]
    return Table(
        schema=given["schema"],
        name=given["name"],
        kind="table",
        is_transactional=True,
        engine="",
        columns={column.name: column for column in columns},
        unique={name: tuple(parts) for name, parts in given["unique"].items()},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One field that travels, and the column that takes it, if there is one."""

    field: str
    sent: Sent
    column: Column | None
    expression: str | None = None
    """What is made of the loaded text, where it is not read directly."""

    @property
    def arrives_as(self) -> str:
        return self.field

    @property
    def staging_ddl(self) -> str:
        if self.column is not None:
            return self.column.ddl
        # Compared by its bytes: no column gives a collation.
        is_text = self.sent.ddl == "longtext"
        collation = " CHARACTER SET utf8mb4 COLLATE utf8mb4_bin" if is_text else ""
        return f"{self.sent.ddl}{collation}"


def sent_fields(schema: pa.Schema, sink: TableSink) -> dict[str, Sent]:
    return shared.sent_fields(schema, sink, DIALECT, lambda field: sent_as(field.type))


def plan(sent: Mapping[str, Sent], table: Table, sink: TableSink) -> tuple[Planned, ...]:
    """How these fields are written to this table, or `Misconfigured` with everything against it."""
    problems, mode = Problems(), sink.write_mode
    require_arriving(sent.keys(), sink.column_map, mode, problems)
    wanted = columns_of(sent, table.columns, sink.column_map, mode)
    planned = [_planned(name, how, wanted.get(name), table, problems) for name, how in sent.items()]
    filled = {one.column.name for one in planned if one.column is not None}
    require_filled(table.columns.values(), filled, problems)
    if mode.is_keyed and not problems.facts:
        _require_keys(mode, planned, table, problems)
    problems.raise_if_any(f"{table.kind} {table}")
    return tuple(planned)


def _planned(
    name: str, sent: Sent, column_name: str | None, table: Table, problems: Problems
) -> Planned:
    nowhere = Planned(field=name, sent=sent, column=None, expression=_natural(sent))
    if column_name is None:
        return nowhere
    column = table.columns.get(column_name)
    if column is None:
        problems.add(*missing_column(name, column_name, table.columns))
        return nowhere
    if column.is_generated:
        problems.add(*generated_column(name, column_name))
    expression = load_expression(sent, column.data_type, column.ddl, column.scale)
    if isinstance(expression, Mismatch):
        problems.add(
            f'field "{name}": {expression.because} (column "{column_name}")', expression.hint
        )
        return nowhere
    return Planned(field=name, sent=sent, column=column, expression=expression)


def _natural(sent: Sent) -> str | None:
    return "UNHEX({})" if sent.family == "binary" else None


def _require_keys(
    mode: WriteMode, planned: list[Planned], table: Table, problems: Problems
) -> None:
    columns = {one.field: one.column.name for one in planned if one.column is not None}
    if not require_keys_written(mode, columns, problems) or mode.mode != "upsert":
        return
    names = [columns[key] for key in mode.keys]
    written = ", ".join(DIALECT.quote(name) for name in names)
    hit = table.unique_hit_by(frozenset(columns.values()))
    fitting = [index for index, parts in hit.items() if set(parts) == set(names)]
    others = [index for index in hit if index not in fitting]
    if not fitting:
        problems.add(
            f"an upsert by {written} can't tell which row is meant: there is no primary key or "
            "unique index on exactly these columns",
            f"ALTER TABLE {DIALECT.quote(table.schema, table.name)} ADD PRIMARY KEY ({written}), "
            "or mode='replace'",
        )
    elif others:
        problems.add(
            f"an upsert by {written} is ambiguous: ON DUPLICATE KEY UPDATE would also change rows "
            f"that are equal by the unique index {others[0]}",
            "mode='replace', which refuses such rows by name; or drop the other index",
        )
