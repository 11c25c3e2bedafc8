"""The plan of a write: the table, and which field goes into which of its columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from epochal.errors import Problems
from epochal.kit.sql import columns as shared
from epochal.kit.sql.columns import columns_taking, no_key
from epochal.kit.sql.table_sink import TableSink
from epochal.kit.sql.types import Sent
from epochal.sinks.mysql.dialect import DIALECT
from epochal.sinks.mysql.types import Mismatch, load_expression, sent_as


@dataclass(frozen=True, slots=True, kw_only=True)
class Column(shared.Column):
    data_type: str
    """`varchar`, without a length."""
    ddl: str
    """The whole type, character set and collation included."""
    scale: int = 0
    """Digits after the point, of a decimal; of a moment, of its seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table(shared.Table[Column]):
    is_transactional: bool
    engine: str
    unique: Mapping[str, Sequence[str]]
    """Unique indexes and their columns; one on an expression has an empty name in it."""

    def unique_hit_by(self, written: frozenset[str]) -> dict[str, Sequence[str]]:
        """
        Unique indexes that rows with these columns can meet another row in.

        Not those with a column that we leave to the server, and that it numbers or leaves null.
        """

        def is_never_equal(name: str) -> bool:
            column = self.columns.get(name)
            if column is None or name in written:
                return False
            return column.is_numbered or not (column.is_not_null or column.has_default)

        return {
            name: columns
            for name, columns in self.unique.items()
            if not any(map(is_never_equal, columns))
        }


def from_json(given: Mapping[str, Any]) -> Table:
    """The table as a task is given it."""
    columns = {name: Column(**column) for name, column in given["columns"].items()}
    return Table(**{**given, "columns": columns})


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
    problems = Problems()
    taking = columns_taking(sent, table, sink, problems)
    planned = [_planned(name, how, taking.get(name), problems) for name, how in sent.items()]
    if sink.mode == "upsert" and not problems.facts:
        columns = {name: column.name for name, column in taking.items()}
        _require_key([columns[key] for key in sink.write_mode.keys], columns, table, problems)
    problems.raise_if_any(f"{table.kind} {table}")
    return tuple(planned)


def _planned(name: str, sent: Sent, column: Column | None, problems: Problems) -> Planned:
    if column is None:
        natural = "UNHEX({})" if sent.family == "binary" else None
        return Planned(field=name, sent=sent, column=None, expression=natural)
    expression = load_expression(sent, column.data_type, column.ddl, column.scale)
    if isinstance(expression, Mismatch):
        problems.add(
            f'field "{name}": {expression.because} (column "{column.name}")', expression.hint
        )
        expression = None
    return Planned(field=name, sent=sent, column=column, expression=expression)


def _require_key(
    names: Sequence[str], columns: Mapping[str, str], table: Table, problems: Problems
) -> None:
    written = ", ".join(DIALECT.quote(name) for name in names)
    hit = table.unique_hit_by(frozenset(columns.values()))
    fitting = [index for index, parts in hit.items() if set(parts) == set(names)]
    others = [index for index in hit if index not in fitting]
    if not fitting:
        problems.add(*no_key(written, DIALECT.quote(table.schema, table.name)))
    elif others:
        problems.add(
            f"an upsert by {written} is ambiguous: ON DUPLICATE KEY UPDATE would also change rows "
            f"that are equal by the unique index {others[0]}",
            "mode='replace', which refuses such rows by name; or drop the other index",
        )
