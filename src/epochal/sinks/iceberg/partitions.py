"""The partitions and the sort order of an Iceberg table, computed on Arrow columns.

Iceberg's transforms are computed on columns where Arrow can do it, and otherwise once for each
distinct value. Groups are cut from sorted rows, so the cost does not grow with their number.

The type of a partition value is that of its source column. Where that column was dropped since, an
older schema of the table still has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg import transforms
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.sorting import NullOrder, SortDirection, SortOrder
from pyiceberg.typedef import Record
from pyiceberg.types import IcebergType, PrimitiveType, StringType

from epochal.errors import InvariantBroken
from epochal.kit.groups import grouped

_HOUR_US = 3_600_000_000
_FIRST_YEAR = 1970


def schema_of_spec(
    metadata: TableMetadata, spec_id: int, *, schema_id: int | None = None
) -> Schema | None:
    """
    A schema that has every source column of a partition spec: this one or the current one where it
    has them, else the newest that does. None where the table's metadata has none any more.
    """
    sources = {field.source_id for field in metadata.specs()[spec_id].fields}
    first = metadata.current_schema_id if schema_id is None else schema_id
    newest_first = sorted(
        metadata.schemas, key=lambda one: (one.schema_id == first, one.schema_id), reverse=True
    )
    return next((one for one in newest_first if sources <= one.field_ids), None)


def partition_types(
    metadata: TableMetadata, spec_id: int, *, schema_id: int | None = None
) -> list[PrimitiveType]:
    """The types of a spec's partition values in files that were written under this schema."""
    schema = schema_of_spec(metadata, spec_id, schema_id=schema_id)
    if schema is None:
        raise InvariantBroken(f"no schema of the table has the columns of partition spec {spec_id}")
    fields = metadata.specs()[spec_id].partition_type(schema).fields
    kinds = [field.field_type for field in fields if isinstance(field.field_type, PrimitiveType)]
    if len(kinds) < len(fields):
        raise InvariantBroken(f"partition spec {spec_id} is by a column that is nested")
    return kinds


def split(rows: pa.Table, spec: PartitionSpec, schema: Schema) -> Iterator[tuple[Record, pa.Table]]:
    """Rows of one partition each, in the order they came in."""
    if not spec.fields:
        yield Record(), rows
        return
    values = [
        _transformed(rows, schema, field.source_id, field.transform).dictionary_encode(
            null_encoding="encode"
        )
        for field in spec.fields
    ]
    order, groups = grouped(values)
    sorted_rows = rows.take(order)
    for first, count in groups:
        at = order[first].as_py()
        partition = Record(
            *(column.dictionary[column.indices[at].as_py()].as_py() for column in values)
        )
        yield partition, sorted_rows.slice(first, count)


def in_order(rows: pa.Table, order: SortOrder, schema: Schema) -> pa.Table:
    """The rows in the table's sort order."""
    keys = [
        SortKey(
            column=_transformed(rows, schema, field.source_id, field.transform),
            is_rising=field.direction == SortDirection.ASC,
            has_nulls_first=field.null_order == NullOrder.NULLS_FIRST,
        )
        for field in order.fields
    ]
    return rows.take(order_by(keys)) if keys else rows


@dataclass(frozen=True, slots=True, kw_only=True)
class SortKey:
    column: pa.Array | pa.ChunkedArray
    is_rising: bool = True
    has_nulls_first: bool = True


def order_by(keys: Sequence[SortKey]) -> pa.Array:
    """The places of rows in this order; equal ones stay as they are."""
    columns: dict[str, pa.Array | pa.ChunkedArray] = {}
    directions: list[tuple[str, str]] = []
    for number, key in enumerate(keys):
        # The position of nulls differs by key, which not every supported Arrow can express.
        columns[f"null {number}"] = pc.is_null(key.column)
        directions.append((f"null {number}", _direction(is_rising=not key.has_nulls_first)))
        columns[f"key {number}"] = key.column
        directions.append((f"key {number}", _direction(is_rising=key.is_rising)))
    return pc.sort_indices(pa.table(columns), sort_keys=directions)


def _direction(*, is_rising: bool) -> str:
    return "ascending" if is_rising else "descending"


def _transformed(
    rows: pa.Table, schema: Schema, source_id: int, transform: transforms.Transform[Any, Any]
) -> pa.Array:
    if isinstance(transform, transforms.VoidTransform):
        return pa.nulls(rows.num_rows, type=pa.int32())  # its column may be gone
    kind = schema.find_field(source_id).field_type
    column = _column(rows, schema.find_column_name(source_id) or "")
    if isinstance(transform, transforms.IdentityTransform):
        return _physical(column)
    if isinstance(transform, transforms.TimeTransform):
        return _time_part(column, transform)
    if isinstance(transform, transforms.TruncateTransform) and isinstance(kind, StringType):
        return pc.utf8_slice_codeunits(column, 0, transform.width)
    return _by_value(_physical(column), kind, transform)


def _column(rows: pa.Table, path: str) -> pa.Array:
    if path in rows.column_names:
        column = rows.column(path)
    else:
        first, *rest = path.split(".")
        column = pc.struct_field(rows.column(first), rest)
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _physical(column: pa.Array) -> pa.Array:
    """Values as Iceberg stores them: days, microseconds, sixteen bytes."""
    if column.type == pa.uuid():
        return column.storage
    if pa.types.is_date(column.type):
        return column.cast(pa.int32())
    if pa.types.is_timestamp(column.type) or pa.types.is_time(column.type):
        return column.cast(pa.int64())
    return column


def _time_part(column: pa.Array, transform: transforms.Transform[Any, Any]) -> pa.Array:
    if pa.types.is_timestamp(column.type) and column.type.tz is not None:
        column = column.cast(pa.int64()).cast(pa.timestamp("us"))
    if isinstance(transform, transforms.HourTransform):
        whole = pc.floor_temporal(column, unit="hour").cast(pa.int64())
        return pc.divide(whole, _HOUR_US).cast(pa.int32())
    if isinstance(transform, transforms.DayTransform):
        day = column if pa.types.is_date(column.type) else pc.floor_temporal(column, unit="day")
        return day.cast(pa.date32()).cast(pa.int32())
    years = pc.subtract(pc.year(column), _FIRST_YEAR)
    if isinstance(transform, transforms.YearTransform):
        return years.cast(pa.int32())
    months = pc.add(pc.multiply(years, 12), pc.subtract(pc.month(column), 1))
    return months.cast(pa.int32())


def _by_value(
    column: pa.Array, kind: IcebergType, transform: transforms.Transform[Any, Any]
) -> pa.Array:
    """Once for each distinct value."""
    encoded = column.dictionary_encode()
    apply = transform.transform(kind)
    result = [apply(value) for value in encoded.dictionary.to_pylist()]
    is_bucket = isinstance(transform, transforms.BucketTransform)
    type_ = pa.int32() if is_bucket else column.type
    return pa.array(result, type=type_).take(encoded.indices)
