"""Hive's folder layout, `column=value/`, as Spark writes and reads it.

A null is `__HIVE_DEFAULT_PARTITION__`. An empty string and that very text have no form of their
own: Spark's own sink lets both come back as null, and here they are refused. Characters that file
systems or Hive don't allow are `%XX`, but for NUL: Spark's writer fails on it, so it is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache

import pyarrow as pa

from epochal.errors import Misconfigured, RowRejected
from epochal.kit.groups import grouped
from epochal.kit.sink_base import cast_hint

NULL = "__HIVE_DEFAULT_PARTITION__"
WITHOUT_FORM = ("", NULL)
NAME_BYTES_MAX = 255
_FOLDERS_KEPT = 10_000
MUST_ESCAPE = re.compile(r"""[\x01-\x1f"#%'*/:=?\\\x7f{\[\]^]""")
_ESCAPED = re.compile(r"%([0-9A-Fa-f]{2})")


def check_columns(schema: pa.Schema, partition_by: Sequence[str]) -> None:
    """Refuse partition columns that the layout can't carry, before the first row."""
    missing = [name for name in partition_by if name not in schema.names]
    if missing:
        raise Misconfigured(
            f"partition_by names {missing}, and the columns are {schema.names}",
            "partition_by takes names of columns that this sink is given",
        )
    if len(partition_by) == len(schema.names):
        raise Misconfigured(
            f"partition_by names every column {list(partition_by)}: none is left for the files",
            "leave one of them out of partition_by",
        )
    for name in partition_by:
        kind = schema.field(name).type
        if not is_partition_type(kind):
            raise Misconfigured(
                f"partition column {name!r} is {kind}, which has no exact form in a folder's name",
                f"{cast_hint(name, 'string')}; strings, integers, booleans and dates can be "
                "partition columns",
            )


def is_partition_type(kind: pa.DataType) -> bool:
    accepts = (pa.types.is_string, pa.types.is_large_string, pa.types.is_integer)
    return any(is_one(kind) for is_one in (*accepts, pa.types.is_boolean, pa.types.is_date32))


def split(
    batch: pa.RecordBatch, partition_by: Sequence[str]
) -> Iterator[tuple[str, pa.RecordBatch]]:
    """
    The rows of a batch by folder, without the partition columns.

    Each part is a copy of its own rows: a slice would keep the whole batch in memory for as long as
    the rarest value in it waits to be written.
    """
    if not partition_by:
        yield "", batch
        return
    rest = batch.drop_columns(list(partition_by))
    encoded = [
        batch.column(name).dictionary_encode(null_encoding="encode") for name in partition_by
    ]
    order, groups = grouped(encoded)
    for first, count in groups:
        rows = order.slice(first, count)
        at = rows[0].as_py()
        values = tuple(column[at].as_py() for column in encoded)
        yield _folder(tuple(partition_by), tuple(map(_text, values))), rest.take(rows)


def _text(value: object) -> str | None:
    if isinstance(value, bool):
        return "true" if value else "false"
    return None if value is None else str(value)


@lru_cache(_FOLDERS_KEPT)
def _folder(columns: tuple[str, ...], values: tuple[str | None, ...]) -> str:
    return "/".join(_segment(name, value) for name, value in zip(columns, values, strict=True))


def _segment(column: str, value: str | None) -> str:
    if value in WITHOUT_FORM:
        raise refused(column, str(value))
    if value is not None and "\0" in value:
        raise has_nul(column)
    segment = f"{escape(column)}={NULL if value is None else escape(value)}"
    if len(segment.encode()) > NAME_BYTES_MAX:
        raise too_long(column)
    return segment


def has_nul(column: str) -> RowRejected:
    return RowRejected(
        f"partition column {column!r} has a value with the character NUL, which no folder's name "
        "can have",
        f"replace({column}, char(0), '') in the query",
    )


def too_long(column: str) -> RowRejected:
    return RowRejected(
        f"partition column {column!r} has a value that makes a folder's name of more than "
        f"{NAME_BYTES_MAX} bytes",
        "partition by a shorter column: a date, a country, a hash",
    )


def refused(column: str, value: str) -> RowRejected:
    """What is raised for a value that has no form of its own (`WITHOUT_FORM`)."""
    return RowRejected(
        f"partition column {column!r} has the value {value!r}, which would come back as null: "
        "a folder's name has no form for it",
        f"nullif({column}, {value!r}) in the query writes a null on purpose",
    )


def escape(text: str) -> str:
    return MUST_ESCAPE.sub(lambda found: f"%{ord(found[0]):02X}", text)


def unescape(text: str) -> str:
    return _ESCAPED.sub(lambda found: chr(int(found[1], 16)), text)


def values_of(relative: str) -> dict[str, str | None]:
    """The partition columns and values in a file's path, as text."""
    pairs = (segment.split("=", 1) for segment in relative.split("/")[:-1] if "=" in segment)
    return {unescape(name): None if value == NULL else unescape(value) for name, value in pairs}
