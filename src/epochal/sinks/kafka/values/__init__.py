"""`Value`: how the value of a record is made from a row; here as JSON, or a column as it is.

A value is declared once and made in two places. On Spark its SQL is evaluated in the JVM, so that
one column crosses to the task instead of all; `encode` then makes bytes of that column. Without
Spark, `gather` makes the same column from whole rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from epochal.errors import Misconfigured
from epochal.kit.json_lines import as_json, refusal
from epochal.terms import Json as JsonValue

ALL = "*"
_JSON_OPTIONS = (
    "map('ignoreNullFields', 'false', 'timeZone', 'UTC',"
    " 'timestampFormat', 'yyyy-MM-dd\\'T\\'HH:mm:ss.SSSSSSXXX',"
    " 'timestampNTZFormat', 'yyyy-MM-dd\\'T\\'HH:mm:ss.SSSSSS')"
)
"""The format of `json_lines`: nulls are written out, and instants keep their microseconds."""


class Value(Protocol):
    """How the value of a record is made. Frozen, picklable, without a secret in its repr."""

    def sql(self) -> str:
        """The SQL expression of the one column that crosses to the tasks."""

    def gather(self, rows: pa.RecordBatch) -> pa.Array:
        """The same column, made from whole rows without Spark."""

    def ready(self, topic: str, kind: pa.DataType, *, is_trial: bool = False) -> JsonValue:
        """
        What tasks need to encode a column of this type for this topic. Runs on the driver.

        Registers a schema where one is needed. A trial raises the same errors and changes nothing.
        """

    def encode(self, column: pa.Array, ready: JsonValue) -> pa.Array:
        """The records' values, as text or bytes; null is a tombstone."""

    def check(self, schema: pa.Schema) -> None:
        """Raise `Misconfigured` where rows of this schema (whole, unshaped) can't be encoded."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column, or on Spark any SQL expression, whose text or bytes are the value."""

    expression: str

    def __str__(self) -> str:
        return repr(self.expression)

    def sql(self) -> str:
        return self.expression

    def gather(self, rows: pa.RecordBatch) -> pa.Array:
        return column_of(rows, "value", self.expression)

    def ready(self, topic: str, kind: pa.DataType, *, is_trial: bool = False) -> JsonValue:  # noqa: ARG002
        return {}

    def encode(self, column: pa.Array, ready: JsonValue) -> pa.Array:  # noqa: ARG002
        return as_text(column)

    def check(self, schema: pa.Schema) -> None:
        index = column_index(schema, "value", self.expression)
        require_text(schema.field(index).type, "value", self.expression)


@dataclass(frozen=True, slots=True)
class Json:
    """Columns as one JSON object."""

    columns: tuple[str, ...] = (ALL,)

    def __str__(self) -> str:
        return written("json", self.columns)

    def sql(self) -> str:
        return f"to_json({struct_sql(self.columns)}, {_JSON_OPTIONS})"

    def gather(self, rows: pa.RecordBatch) -> pa.Array:
        return as_json(gathered(rows, self.columns))

    def ready(self, topic: str, kind: pa.DataType, *, is_trial: bool = False) -> JsonValue:  # noqa: ARG002
        return {}

    def encode(self, column: pa.Array, ready: JsonValue) -> pa.Array:  # noqa: ARG002
        return column

    def check(self, schema: pa.Schema) -> None:
        names = schema.names if self.columns == (ALL,) else self.columns
        for name in names:
            why = refusal(schema.field(column_index(schema, "value", name)).type)
            if why:
                raise Misconfigured(
                    f"column {name!r} can't be written as JSON: {why}",
                    "cast it in the query, or name the columns to be written: json('a', 'b')",
                )


def json(*columns: str) -> Json:
    """
    A record's value as a JSON object of these columns; of all, if none or `"*"` is named.

    Nulls are written out, instants as ISO 8601 in UTC with microseconds, decimals with all digits,
    binary as base64.
    """
    return Json(columns or (ALL,))


def written(function: str, columns: tuple[str, ...]) -> str:
    """A value as its user wrote it, for messages: `json('id')`."""
    return f"{function}({', '.join(map(repr, columns))})"


def struct_sql(columns: tuple[str, ...]) -> str:
    """These columns as one, for Spark to make."""
    return f"struct({', '.join(columns)})"


def gathered(rows: pa.RecordBatch, columns: tuple[str, ...]) -> pa.StructArray:
    """The same, without Spark."""
    names = rows.schema.names if columns == (ALL,) else columns
    taken = rows.select([column_index(rows.schema, "value", name) for name in names])
    return pa.StructArray.from_arrays(taken.columns, fields=list(taken.schema))


def column_of(rows: pa.RecordBatch, option: str, name: str) -> pa.Array:
    """The column that an option names: without Spark, expressions can't be evaluated."""
    return rows.column(column_index(rows.schema, option, name))


def as_text(column: pa.Array) -> pa.Array:
    """Text and bytes unchanged, anything else as the text of its value."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return as_text(column.dictionary_decode())
    if _is_text(kind):
        return column
    return column.cast(pa.string())


def require_text(kind: pa.DataType, option: str, given: str) -> None:
    is_plain = _is_text(kind) or pa.types.is_primitive(kind) or pa.types.is_decimal(kind)
    if not is_plain and not pa.types.is_dictionary(kind) and not pa.types.is_null(kind):
        raise Misconfigured(
            f"Kafka: {option}={given!r} is of type {kind}, which has no plain text",
            ('value=json("*"), or ' if option == "value" else "")
            + "make text or bytes of it in the query",
        )


def _is_text(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
    )


def column_index(schema: pa.Schema, option: str, name: str) -> int:
    index: int = schema.get_field_index(name)
    if index < 0:
        raise Misconfigured(
            f"Kafka: {option}={name!r} is none of the columns {', '.join(schema.names)}",
            "name a column; SQL expressions are evaluated on Spark only",
        )
    return index
