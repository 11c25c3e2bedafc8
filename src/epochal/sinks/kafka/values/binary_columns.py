"""Binary encodings of columns, from which Avro and Protobuf records are joined.

Every function takes columns without nulls and returns one plain binary value per row. `spread` puts
nulls back where they were left out; a join skips them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from epochal.arrow_values import flag_array, flags, number_array, numbers, scalar
from epochal.kafka.varints import Bytes, Flags, Ints, data_of, join, measured, written

Encode = Callable[[pa.Array], pa.Array]
"""From a column without nulls to one binary value per row."""


def spread(column: pa.Array, encode: Encode) -> pa.Array:
    """`encode` of the rows that are not null, with the nulls in their positions."""
    if not column.null_count:
        return encode(column)
    valid = flags(column.is_valid())
    indexes = number_array(np.cumsum(valid, dtype=np.int64) - 1)
    nulls = scalar(None, pa.int64())
    return encode(column.drop_null()).take(pc.if_else(flag_array(valid), indexes, nulls))


def ints_of(column: pa.Array) -> Ints:
    """Whole numbers, days, and instants in the unit they have, as 64 bits."""
    kind = column.type
    if pa.types.is_date32(kind) or pa.types.is_time32(kind):
        column = column.cast(pa.int32())
    found: Ints = numbers(column.cast(pa.int64()))
    return found


def folded(values: Ints) -> pa.Array:
    """Signed variable-length numbers."""
    return written(measured(values))


def plain(values: Ints) -> pa.Array:
    """Variable-length numbers without a sign; a negative one takes ten bytes."""
    return folded(unfolded(values))


def unfolded(values: Ints) -> Ints:
    """The numbers whose zigzag encoding is these."""
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
    values = numbers(column).astype(wanted)
    return fixed(values.view(np.uint8).reshape(len(values), wanted.itemsize))


def booleans(column: pa.Array) -> pa.Array:
    return fixed(numbers(column.cast(pa.uint8())).reshape(-1, 1))


def picked(matrix: Bytes, keep: Flags) -> pa.Array:
    """Of each row of bytes those that are kept."""
    ends = np.concatenate([[0], np.cumsum(keep.sum(axis=1))])
    return _binary(ends, matrix[keep])


def lengths_of(column: pa.Array) -> Ints:
    found: Ints = numbers(pc.binary_length(column)).astype(np.int64)
    return found


def sized(column: pa.Array, number: Callable[[Ints], pa.Array]) -> pa.Array:
    """Bytes with their length before them."""
    return join([number(lengths_of(column)), column])


def counts_of(lists: pa.Array) -> Ints:
    found: Ints = numbers(pc.list_value_length(lists)).astype(np.int64)
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
