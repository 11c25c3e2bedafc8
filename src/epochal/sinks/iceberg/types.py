"""Columns of an Iceberg table and of the rows: whether they fit, and the cast between them.

Names decide, exactly as written. Only what keeps every value is allowed: a column may be narrower
than the table's, never wider. A field that the rows don't have becomes null where the table allows
it. Spark declares nearly every column nullable, so a required field is not refused for that:
its values are checked instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg import types as iceberg
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.schema import Schema, index_by_id, index_name_by_id

from epochal.errors import RowRejected
from epochal.kit.parquet import nullable_inside

_UUID_BYTES = 16
_PROMOTED = {
    (iceberg.IntegerType, iceberg.LongType),
    (iceberg.FloatType, iceberg.DoubleType),
}
_INTEGER_BITS_MAX = 32
_LONG_BITS_MAX = 64


def mismatches(rows: pa.Schema, table: Schema) -> list[str]:
    """Why these columns can't be written to the table; none where they can."""
    return list(_field_mismatches(list(rows), table.as_struct(), ""))


def unknown_columns(rows: pa.Schema, table: Schema) -> list[str]:
    """Columns of the rows that the table does not have."""
    known = {field.name for field in table.fields}
    return [column.name for column in rows if column.name not in known]


def new_columns(rows: pa.Schema, table: Schema) -> list[str]:
    """
    Those that may be added to it. A name that differs from another one in upper and lower case only
    is none of them: Spark could read neither column any more.
    """
    lower = Counter(name.lower() for name in (*rows.names, *(one.name for one in table.fields)))
    return [name for name in unknown_columns(rows, table) if lower[name.lower()] == 1]


def replaced_columns(
    written: Schema, now: Schema, may_be_null: Callable[[int], bool]
) -> Iterator[str]:
    """
    Why files that were written for one schema can't be read by another, later one. Columns that
    were added, dropped, renamed or widened are no reason: readers know columns by number.
    """
    wrote, there = index_by_id(written), index_by_id(now)
    names, names_now = index_name_by_id(written), index_name_by_id(now)
    for number, field in wrote.items():
        found = there.get(number)
        if found is None:
            if names[number] in names_now.values():
                yield f"column {names[number]} was dropped and added again since"
        elif not _is_read_as(field.field_type, found.field_type):
            yield f"column {names_now[number]} is {found.field_type} now"
        elif found.required and not field.required and may_be_null(number):
            yield f"column {names_now[number]} takes no null any more"
    for field in _added(written.as_struct(), now.as_struct()):
        if field.required and field.initial_default is None:
            yield f"column {names_now[field.field_id]} was added since, and takes no null"


def _added(written: iceberg.IcebergType, now: iceberg.IcebergType) -> Iterator[iceberg.NestedField]:
    """Fields that are new in a struct that was there before."""
    before = {field.field_id: field for field in _inner(written)}
    for field in _inner(now):
        if field.field_id not in before:
            yield field
        else:
            yield from _added(before[field.field_id].field_type, field.field_type)


def _inner(kind: iceberg.IcebergType) -> Sequence[iceberg.NestedField]:
    if isinstance(kind, iceberg.ListType):
        return [kind.element_field]
    if isinstance(kind, iceberg.MapType):
        return [kind.key_field, kind.value_field]
    return kind.fields if isinstance(kind, iceberg.StructType) else ()


def _is_read_as(file: iceberg.IcebergType, table: iceberg.IcebergType) -> bool:
    """Whether Iceberg lets a column's type become the other one."""
    if isinstance(file, iceberg.DecimalType) and isinstance(table, iceberg.DecimalType):
        return file.scale == table.scale and file.precision <= table.precision
    if isinstance(file, iceberg.PrimitiveType):
        return file == table or (type(file), type(table)) in _PROMOTED
    return type(file) is type(table)


def inner_values(kind: iceberg.IcebergType) -> Sequence[iceberg.NestedField]:
    """What is inside: fields, an element, the value of a map. Its key is never null."""
    return [kind.value_field] if isinstance(kind, iceberg.MapType) else _inner(kind)


def has_required_inside(kind: iceberg.IcebergType) -> bool:
    fields = inner_values(kind)
    return any(field.required or has_required_inside(field.field_type) for field in fields)


def null_inside(column: str) -> RowRejected:
    return RowRejected(
        f"column {column} has a null in a field or element that is required",
        "leave it out, or fill it in, in the query",
    )


def has_structs_in_lists(kind: iceberg.IcebergType) -> bool:
    if isinstance(kind, iceberg.StructType):
        return any(has_structs_in_lists(field.field_type) for field in kind.fields)
    if isinstance(kind, iceberg.ListType):
        inner = kind.element_type
    elif isinstance(kind, iceberg.MapType):
        inner = kind.value_type
    else:
        return False
    return isinstance(inner, iceberg.StructType) or has_structs_in_lists(inner)


class ColumnMatch:
    """Turns batches of one schema into the table's own columns, with their field ids."""

    def __init__(self, rows: pa.Schema, table: Schema) -> None:
        self._strict: pa.Schema = schema_to_pyarrow(table, include_field_ids=True)
        # Where a struct is null, its required fields have no value either.
        self._schema = nullable_inside(self._strict)
        self._required = [field.name for field in table.fields if field.required]
        self._required_inside = [
            field.name for field in table.fields if has_required_inside(field.field_type)
        ]
        self._uuids = {field.name for field in table.fields if _is_uuid(field.field_type)}
        self._given = set(rows.names)

    def cast(self, rows: pa.Table) -> pa.Table:
        try:
            columns = [self._column(rows, field) for field in self._schema]
        except (pa.ArrowInvalid, ValueError) as error:
            raise RowRejected(
                f"a value does not fit its column: {error}",
                "cast it in the query, or give the column a wider type",
            ) from error
        for name in self._required:
            nulls = columns[self._schema.get_field_index(name)].null_count
            if nulls:
                raise RowRejected(
                    f"column {name} is required, and {nulls} of {rows.num_rows} rows have none",
                    f'where="{name} IS NOT NULL" leaves them out',
                )
        for name in self._required_inside:
            column = columns[self._schema.get_field_index(name)]
            kind = self._strict.field(name).type
            if any(_has_null_inside(chunk, kind) for chunk in column.chunks):
                raise null_inside(name)
        return pa.Table.from_arrays(columns, schema=self._schema)

    def _column(self, rows: pa.Table, field: pa.Field) -> pa.ChunkedArray:
        if field.name not in self._given:
            return pa.chunked_array([pa.nulls(rows.num_rows, type=field.type)])
        column = rows.column(field.name)
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        if field.name in self._uuids:
            return pa.chunked_array([_uuids(chunk) for chunk in column.chunks], type=pa.uuid())
        return column if column.type == field.type else column.cast(field.type)


def _has_null_inside(values: pa.Array, kind: pa.DataType) -> bool:
    """Whether a value, at any depth, has a null where its type `kind` allows none."""
    inner: list[tuple[pa.Field, pa.Array]] = []
    if pa.types.is_struct(kind):
        inner = list(zip(kind, values.drop_null().flatten(), strict=True))
    elif pa.types.is_map(kind):
        inner = [(kind.item_field, _items(values.drop_null()))]
    elif _is_list(kind):
        inner = [(kind.value_field, values.flatten())]
    return any(
        (one.null_count > 0 and not field.nullable) or _has_null_inside(one, field.type)
        for field, one in inner
    )


def _items(maps: pa.MapArray) -> pa.Array:
    """The values of maps, of these alone: Arrow's own has those of all that a slice is of."""
    first, last = maps.offsets[0].as_py(), maps.offsets[-1].as_py()
    return maps.items.slice(first, last - first)


def _uuids(column: pa.Array) -> pa.Array:
    if column.type == pa.uuid():
        return column
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        values = [None if text is None else UUID(text).bytes for text in column.to_pylist()]
        stored = pa.array(values, type=pa.binary(_UUID_BYTES))
    else:
        stored = column.cast(pa.binary(_UUID_BYTES))
    return pa.ExtensionArray.from_storage(pa.uuid(), stored)


def _field_mismatches(rows: list[pa.Field], table: iceberg.StructType, path: str) -> Iterator[str]:
    given = {field.name: field for field in rows}
    if len(given) < len(rows):
        names = [field.name for field in rows]
        yield f"{path or 'the rows'} have a column twice: {max(set(names), key=names.count)}"
    for name in given:
        if name not in {field.name for field in table.fields}:
            close = [field.name for field in table.fields if field.name.lower() == name.lower()]
            similar = f" (it has {close[0]})" if close else ""
            yield f"column {path}{name} is not in the table{similar}"
    for field in table.fields:
        where = f"{path}{field.name}"
        if field.name in given:
            yield from _mismatch(given[field.name].type, field.field_type, where)
        elif field.required:
            yield f"column {where} is required by the table and not in the rows"


def _mismatch(rows: pa.DataType, table: iceberg.IcebergType, path: str) -> Iterator[str]:
    if pa.types.is_dictionary(rows):
        rows = rows.value_type
    if pa.types.is_null(rows):
        return
    if isinstance(table, iceberg.StructType) and pa.types.is_struct(rows):
        yield from _field_mismatches(list(rows), table, f"{path}.")
    elif isinstance(table, iceberg.ListType) and _is_list(rows):
        yield from _mismatch(rows.value_type, table.element_type, f"{path}[]")
    elif isinstance(table, iceberg.MapType) and pa.types.is_map(rows):
        yield from _mismatch(rows.key_type, table.key_type, f"{path}.key")
        yield from _mismatch(rows.item_type, table.value_type, f"{path}.value")
    elif not _fits(rows, table, is_nested="[]" in path or "." in path):
        yield f"column {path} is {rows}, and the table's is {table}"


def _fits(rows: pa.DataType, table: iceberg.IcebergType, *, is_nested: bool) -> bool:
    if isinstance(table, iceberg.DecimalType):
        return _fits_decimal(rows, table)
    if isinstance(table, iceberg.FixedType):
        is_same = pa.types.is_fixed_size_binary(rows) and rows.byte_width == len(table)
        return bool(is_same or pa.types.is_binary(rows))
    if isinstance(table, iceberg.UUIDType):
        # Only at the top: Arrow has no cast from text to a UUID that would reach into a struct.
        return rows == pa.uuid() or (not is_nested and (_is_text(rows) or _is_binary(rows)))
    test = _TESTS.get(type(table))
    return bool(test is not None and test(rows))


def _fits_decimal(rows: pa.DataType, table: iceberg.DecimalType) -> bool:
    return bool(
        pa.types.is_decimal(rows)
        and rows.scale <= table.scale
        and rows.precision - rows.scale <= table.precision - table.scale
    )


def _is_uuid(kind: iceberg.IcebergType) -> bool:
    return isinstance(kind, iceberg.UUIDType)


def _is_text(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


def _is_binary(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_binary_view(kind)
        or pa.types.is_fixed_size_binary(kind)
    )


def _is_list(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def _is_integer(bits_max: int) -> Callable[[pa.DataType], bool]:
    def is_one(kind: pa.DataType) -> bool:
        if not pa.types.is_integer(kind):
            return False
        is_signed = pa.types.is_signed_integer(kind)
        return bool(kind.bit_width <= bits_max if is_signed else kind.bit_width < bits_max)

    return is_one


_TESTS: Mapping[type[Any], Callable[[pa.DataType], bool]] = {
    iceberg.BooleanType: pa.types.is_boolean,
    iceberg.IntegerType: _is_integer(_INTEGER_BITS_MAX),
    iceberg.LongType: _is_integer(_LONG_BITS_MAX),
    iceberg.FloatType: lambda kind: pa.types.is_floating(kind) and kind.bit_width <= 32,
    iceberg.DoubleType: pa.types.is_floating,
    iceberg.DateType: pa.types.is_date,
    iceberg.TimeType: pa.types.is_time,
    iceberg.TimestampType: lambda kind: pa.types.is_timestamp(kind) and kind.tz is None,
    iceberg.TimestamptzType: lambda kind: pa.types.is_timestamp(kind) and kind.tz is not None,
    iceberg.StringType: _is_text,
    iceberg.BinaryType: _is_binary,
}


def null_rows(rows: pa.Table, columns: list[str]) -> int:
    """How many rows have a null in one of these columns."""
    if not rows.num_rows or not columns:
        return 0
    masks = [pc.is_null(rows.column(name)) for name in columns]
    has_null = masks[0]
    for mask in masks[1:]:
        has_null = pc.or_(has_null, mask)
    return int(pc.sum(has_null).as_py() or 0)
