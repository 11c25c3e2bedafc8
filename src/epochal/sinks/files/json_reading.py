"""JSON lines of this sink back as Arrow columns, by the schema that was kept beside them."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa


def read_lines(
    rows: Sequence[Mapping[str, Any]], schema: pa.Schema, fixed: Mapping[str, pa.Scalar]
) -> pa.Table:
    """These rows with the columns of `schema`; one in `fixed` has the same value throughout."""
    columns = [
        pa.repeat(fixed[column.name], len(rows))
        if column.name in fixed
        else _array([row.get(column.name) for row in rows], column.type)
        for column in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def _array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Numbers and times go through text, whose cast is exact."""
    if pa.types.is_nested(kind):
        return pa.array([_nested(value, kind) for value in values], kind)
    if _is_binary(kind):
        return pa.array(
            [None if value is None else base64.b64decode(value) for value in values], kind
        )
    if pa.types.is_string(kind) or pa.types.is_boolean(kind) or pa.types.is_null(kind):
        return pa.array(values, kind)
    if pa.types.is_dictionary(kind):
        return _array(values, kind.value_type).cast(kind)
    return pa.array([None if value is None else str(value) for value in values], pa.string()).cast(
        kind
    )


def _nested(value: Any, kind: pa.DataType) -> Any:
    if value is None:
        return None
    if pa.types.is_struct(kind):
        return {field.name: _one(value.get(field.name), field.type) for field in kind}
    if pa.types.is_map(kind):
        return [
            (_one(key, kind.key_type), _one(item, kind.item_type)) for key, item in value.items()
        ]
    return [_one(item, kind.value_type) for item in value]


def _one(value: Any, kind: pa.DataType) -> Any:
    """One value within a nested one, as a scalar of its own type."""
    return _nested(value, kind) if pa.types.is_nested(kind) else _array([value], kind)[0].as_py()


def _is_binary(kind: pa.DataType) -> bool:
    tests = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary)
    return any(is_one(kind) for is_one in tests)
