"""Arrow columns in the words of Spark SQL, for readers that must not guess types."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

from epochal.errors import Misconfigured


def ddl(schema: pa.Schema) -> str:
    return ", ".join(f"{_quoted(column.name)} {spark_type(column.type)}" for column in schema)


def _quoted(name: str) -> str:
    escaped = name.replace("`", "``")
    return f"`{escaped}`"


def spark_type(kind: pa.DataType) -> str:
    for accepts, word in _WORDS:
        if accepts(kind):
            return word(kind) if callable(word) else word
    raise Misconfigured(f"Spark has no type for {kind}", "read it without a Spark session")


def _struct(kind: pa.DataType) -> str:
    fields = (f"{_quoted(field.name)}: {spark_type(field.type)}" for field in kind)
    return f"STRUCT<{', '.join(fields)}>"


def _map(kind: pa.DataType) -> str:
    return f"MAP<{spark_type(kind.key_type)}, {spark_type(kind.item_type)}>"


_WORDS: tuple[tuple[Callable[[pa.DataType], bool], str | Callable[[pa.DataType], str]], ...] = (
    (pa.types.is_boolean, "BOOLEAN"),
    (pa.types.is_int8, "TINYINT"),
    (pa.types.is_int16, "SMALLINT"),
    (pa.types.is_int32, "INT"),
    (pa.types.is_int64, "BIGINT"),
    (pa.types.is_float32, "FLOAT"),
    (pa.types.is_float64, "DOUBLE"),
    (pa.types.is_decimal, lambda kind: f"DECIMAL({kind.precision}, {kind.scale})"),
    (pa.types.is_string, "STRING"),
    (pa.types.is_large_string, "STRING"),
    (pa.types.is_binary, "BINARY"),
    (pa.types.is_large_binary, "BINARY"),
    (pa.types.is_date32, "DATE"),
    (pa.types.is_timestamp, lambda kind: "TIMESTAMP_NTZ" if kind.tz is None else "TIMESTAMP"),
    (pa.types.is_map, _map),
    (pa.types.is_list, lambda kind: f"ARRAY<{spark_type(kind.value_type)}>"),
    (pa.types.is_large_list, lambda kind: f"ARRAY<{spark_type(kind.value_type)}>"),
    (pa.types.is_struct, _struct),
)
