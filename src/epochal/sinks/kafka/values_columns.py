"""Pieces that the binary forms of rows are put together from, a column at a time.

Every function takes columns without nulls and gives one plain binary value a row. `spread` brings
the rows back that were left out as nulls; in a join they count as nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from epochal.kafka.varints import Bytes, Flags, Ints, data_of, join, measured, written

Encode = Callable[[pa.Array], pa.Array]
"""From a column without nulls to one binary value a row."""


def spread(column: pa.Array, encode: Encode) -> pa.Array:
    """What `encode` makes of the rows that are not null, with the nulls in their places."""
    if not column.null_count:
        return encode(column)
    valid = column.is_valid().to_numpy(zero_copy_only=False)
    places = np.cumsum(valid) - 1
    return encode(column.drop_null()).take(pa.array(places, pa.int64(), mask=~valid))


def ints_of(column: pa.Array) -> Ints:
    """Whole numbers, days, and instants in the unit they have, as 64 bits."""
    kind = column.type
    if pa.types.is_date32(kind) or pa.types.is_time32(kind):
        column = column.cast(pa.int32())
    found: Ints = column.cast(pa.int64()).to_numpy(zero_copy_only=False)
    return found


def folded(values: Ints) -> pa.Array:
    """Signed variable-length numbers."""
    return written(measured(values))


def plain(values: Ints) -> pa.Array:
    """Variable-length numbers without a sign; a negative one takes ten bytes."""
    return folded(unfolded(values))


def unfolded(values: Ints) -> Ints:
    """The numbers whose zigzag form is these."""
    bits = values.view(np.uint64)
    signs = -(bits & np.uint64(1)).view(np.int64)
    return (bits >> np.uint64(1)).view(np.int64) ^ signs


def fixed(matrix: Bytes) -> pa.Array:
    """Rows of bytes that are equally long."""
    count, width = matrix.shape
    ends = np.arange(count + 1, dtype=np.int64) * width
    return _binary(ends, np.ascontiguousarray(matrix).reshape(-1))


def little_endian(column: pa.Array, kind: npt.DTypeLike) -> pa.Array:
    wanted = np.dtype(kind).newbyteorder("<")
    values = column.to_numpy(zero_copy_only=False).astype(wanted)
    return fixed(values.view(np.uint8).reshape(len(values), wanted.itemsize))


def booleans(column: pa.Array) -> pa.Array:
    return fixed(column.cast(pa.uint8()).to_numpy(zero_copy_only=False).reshape(-1, 1))


def picked(matrix: Bytes, keep: Flags) -> pa.Array:
    """Of each row of bytes those that count."""
    ends = np.concatenate([[0], np.cumsum(keep.sum(axis=1))])
    return _binary(ends, matrix[keep])


def lengths_of(column: pa.Array) -> Ints:
    found: Ints = pc.binary_length(column).to_numpy(zero_copy_only=False).astype(np.int64)
    return found


def sized(column: pa.Array, number: Callable[[Ints], pa.Array]) -> pa.Array:
    """Bytes with their length before them."""
    return join([number(lengths_of(column)), column])


def counts_of(lists: pa.Array) -> Ints:
    found: Ints = pc.list_value_length(lists).to_numpy(zero_copy_only=False).astype(np.int64)
    return found


def grouped(elements: pa.Array, counts: Ints) -> pa.Array:
    """The encoded elements of each list side by side: coarser ends over the same bytes."""
    ends = np.concatenate([[0], np.cumsum(lengths_of(elements))])
    rows = ends[np.concatenate([[0], np.cumsum(counts)])]
    return _binary(rows, data_of(elements) if len(elements) else b"")


def entries_of(maps: pa.Array) -> pa.Array:
    """Maps as lists of pairs."""
    kind = maps.type
    pair = pa.struct([("key", kind.key_type), ("value", kind.item_type)])
    return maps.cast(pa.list_(pair))


def text_bytes(column: pa.Array) -> pa.Array:
    return column if column.type == pa.binary() else column.cast(pa.binary())


def is_bytes(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_fixed_size_binary(kind)
    )


def is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _binary(ends: Ints, data: Bytes | pa.Buffer | bytes) -> pa.Array:
    places = pa.py_buffer(ends.astype(np.int32))
    return pa.Array.from_buffers(
        pa.binary(),
        len(ends) - 1,
        [None, places, data if isinstance(data, pa.Buffer) else pa.py_buffer(data)],
    )
