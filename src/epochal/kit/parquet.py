"""
The encoder of parquet files, with dictionaries only for columns whose values repeat.

Arrow tries a dictionary for every column and gives it up where it grows too large. Columns of
distinct values then pay for a hash table in every row group that is of no use; where row groups are
smaller than what a dictionary may hold, as in a table with many partitions, they also keep it:
files of twice the size, for twice the CPU. So a sample of the first rows decides.
"""

from __future__ import annotations

import datetime as dt
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

DICTIONARY_BYTES_MAX = 128 * 1024
"""A column that repeats in the sample only is written plainly from this size on."""
_SAMPLE_ROWS = 10_000
_SAMPLE_SLICES = 10
"""From all over the rows: values may come in long runs, or once in a round of thousands."""
_DISTINCT_MAX = 0.75
"""Of so many sampled values, 17,000 different numbers show this share: about what fits above."""


class Encoder:
    """One file. Every table that is written becomes one row group."""

    def __init__(
        self,
        stream: pa.NativeFile,
        schema: pa.Schema,
        *,
        compression: str,
        dictionaries: Sequence[str],
    ) -> None:
        self._schema = nullable_inside(schema)
        self._writer = pq.ParquetWriter(
            stream,
            self._schema,
            compression=compression,
            version="2.6",
            use_dictionary=dictionaries,
            dictionary_pagesize_limit=DICTIONARY_BYTES_MAX,
        )

    def write(self, rows: pa.Table) -> None:
        if rows.schema != self._schema:
            rows = rows.cast(self._schema)
        self._writer.write_table(rows, row_group_size=rows.num_rows)

    def close(self) -> pq.FileMetaData:
        """Finish the file and leave the stream open. Returns the footer."""
        self._writer.close()
        return self._writer.writer.metadata


def encoder(sampled: pa.Table, compression: str) -> Callable[[pa.NativeFile], Encoder]:
    """A function that makes an encoder for such rows on a stream."""
    dictionaries = repeating(sampled)
    return lambda stream: Encoder(
        stream, sampled.schema, compression=compression, dictionaries=dictionaries
    )


def nullable_inside(schema: pa.Schema) -> pa.Schema:
    """
    The same columns, with fields inside of others that take nulls. Where a struct is null, as one
    side of an outer join or Debezium's `before`, its fields have no value either, and Arrow's
    writer refuses them if they are declared to have one.
    """
    return pa.schema(
        [column.with_type(_nullable(column.type)) for column in schema], metadata=schema.metadata
    )


def _nullable(kind: pa.DataType) -> pa.DataType:
    def relaxed(field: pa.Field) -> pa.Field:
        return field.with_type(_nullable(field.type)).with_nullable(True)

    if pa.types.is_struct(kind):
        return pa.struct([relaxed(field) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(kind.key_field, relaxed(kind.item_field), keys_sorted=kind.keys_sorted)
    if pa.types.is_large_list(kind):
        return pa.large_list(relaxed(kind.value_field))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(relaxed(kind.value_field), kind.list_size)
    return pa.list_(relaxed(kind.value_field)) if pa.types.is_list(kind) else kind


def sample(rows: pa.Table) -> pa.Table:
    """A copy of some rows from all over a table, for `repeating`."""
    if rows.num_rows <= _SAMPLE_ROWS:
        return rows.combine_chunks()
    step, count = rows.num_rows // _SAMPLE_SLICES, _SAMPLE_ROWS // _SAMPLE_SLICES
    slices = [rows.slice(at * step, count) for at in range(_SAMPLE_SLICES)]
    return pa.concat_tables(slices).combine_chunks()


def repeating(sampled: pa.Table) -> list[str]:
    """The columns whose values repeat, by their paths in the file; of nested ones all."""
    return [
        path
        for column, values in zip(sampled.schema, sampled.columns, strict=True)
        for path in _leaves(column.name, column.type)
        if pa.types.is_nested(column.type) or _repeats(values.combine_chunks())
    ]


def _repeats(values: pa.Array) -> bool:
    if isinstance(values, pa.ExtensionArray):
        values = values.storage
    valid = values.drop_null()
    try:
        return len(valid.unique()) <= _DISTINCT_MAX * len(valid)
    except pa.ArrowNotImplementedError:
        return True  # of a type that Arrow can't compare: let it try


def _leaves(path: str, kind: pa.DataType) -> Iterator[str]:
    if pa.types.is_struct(kind):
        for child in kind:
            yield from _leaves(f"{path}.{child.name}", child.type)
    elif pa.types.is_map(kind):
        yield from _leaves(f"{path}.key_value.key", kind.key_type)
        yield from _leaves(f"{path}.key_value.value", kind.item_type)
    elif pa.types.is_nested(kind):
        yield from _leaves(f"{path}.list.element", kind.value_type)
    else:
        yield path


def column_statistics(footer: pq.FileMetaData) -> Mapping[str, Sequence[Any]]:
    """The statistics of each column by its path, one of every row group."""
    found: dict[str, list[Any]] = {}
    for group in range(footer.num_row_groups):
        rows = footer.row_group(group)
        for column in range(rows.num_columns):
            chunk = rows.column(column)
            found.setdefault(chunk.path_in_schema, []).append(chunk.statistics)
    return found


def null_count(groups: Sequence[Any]) -> int | None:
    """The nulls of all row groups; None where one of them does not say."""
    if any(group is None or not group.has_null_count for group in groups):
        return None
    return sum(int(group.null_count) for group in groups)


def has_nan(group: Any) -> bool:
    return bool(group.has_min_max) and (math.isnan(group.min) or math.isnan(group.max))


def bounds(groups: Sequence[Any]) -> tuple[Any, Any] | None:
    """The least and greatest of all row groups; None where one of them has none."""
    known = [group for group in groups if group is not None and group.has_min_max]
    unknown = [group for group in groups if group is None or not group.has_min_max]
    if not known or any(group is None or group.num_values for group in unknown):
        return None
    try:
        found = [_least_and_greatest(group) for group in known]
        return min(low for low, _ in found), max(high for _, high in found)
    except (ValueError, OverflowError, TypeError):
        return None  # a year that Python has no date for


def _least_and_greatest(group: Any) -> tuple[Any, Any]:
    """Of one row group. Where a timestamp has a zone, `group.min` itself would import pandas."""
    kind = group.logical_type
    about = json.loads(kind.to_json()) if kind.type == "TIMESTAMP" else {}
    if about.get("timeUnit") != "microseconds":
        return group.min, group.max
    since = dt.datetime(1970, 1, 1, tzinfo=dt.UTC if about["isAdjustedToUTC"] else None)
    return (
        since + dt.timedelta(microseconds=group.min_raw),
        since + dt.timedelta(microseconds=group.max_raw),
    )
