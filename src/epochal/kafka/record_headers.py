"""The headers of records: pairs of a text and bytes (or null), any number of them a record."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from epochal.arrow_values import numbers, scalar
from epochal.errors import RowRejected
from epochal.kafka import varints
from epochal.kafka.primitives import Malformed
from epochal.kafka.varints import Ints, Measured, constant, data_of, join, written

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))

_NO_HEADERS = constant(b"\x00")


def _as_list(column: pa.Array) -> pa.Array:
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if pa.types.is_null(column.type):
        return pa.nulls(len(column), HEADERS)
    return column if column.type == HEADERS else column.cast(HEADERS)


def _each(column: pa.Array) -> tuple[Measured, Measured, Measured, pa.StructArray]:
    """How many headers each row has, and of each header both lengths and itself."""
    lists = _as_list(column)
    flat = lists.flatten()
    if flat.field("key").null_count or flat.null_count:
        raise RowRejected("a row has a record header without a key", "headers= must name each")
    counts = pc.fill_null(pc.list_value_length(lists), scalar(0, pa.int32()))
    keys = pc.binary_length(flat.field("key"))
    values = pc.fill_null(pc.binary_length(flat.field("value")), scalar(-1, pa.int32()))
    return _measured(counts), _measured(keys), _measured(values), flat


def _measured(lengths: pa.Array) -> Measured:
    return varints.measured(numbers(lengths).astype(np.int64))


def _row_totals(counts: Ints, amounts: Ints) -> Ints:
    ends = np.concatenate([[0], np.cumsum(amounts)])
    last = np.cumsum(counts)
    totals: Ints = ends[last] - ends[last - counts]
    return totals


def encoded_lengths(column: pa.Array) -> Ints:
    """How many bytes the headers of each row take."""
    counts, keys, values, _ = _each(column)
    each = keys.sizes + keys.values + values.sizes + np.maximum(values.values, 0)
    return counts.sizes + _row_totals(counts.values, each)


def encode(column: pa.Array | None, count: int) -> tuple[list[pa.Array | pa.Scalar], Ints]:
    """The pieces that end each record, for the join that makes records; and their lengths."""
    if column is None:
        return [_NO_HEADERS], np.ones(count, dtype=np.int64)
    counts, keys, values, flat = _each(column)
    if not len(flat):
        return [_NO_HEADERS], np.ones(count, dtype=np.int64)
    key = flat.field("key").cast(pa.binary())
    joined = join([written(keys), key, written(values), flat.field("value")])
    ends = np.frombuffer(joined.buffers()[1], dtype=np.int32, count=len(flat) + 1)
    # The headers of one row lie side by side already: coarser ends over the same bytes.
    row_ends = ends[np.concatenate([[0], np.cumsum(counts.values)])].astype(np.int32)
    rows = pa.Array.from_buffers(
        pa.binary(), count, [None, pa.py_buffer(row_ends), data_of(joined)]
    )
    return [written(counts), rows], counts.sizes + np.diff(row_ends).astype(np.int64)


def decode(data: bytes, at: Ints, ends: Ints) -> pa.Array:
    """The headers of each record, which are between the given positions. Row by row."""
    rows: list[list[tuple[str, bytes | None]]] = []
    for start, end in zip(at.tolist(), ends.tolist(), strict=True):
        rows.append([] if data[start] == 0 and end == start + 1 else _decode_row(data, start, end))
    return pa.array(
        [[{"key": key, "value": value} for key, value in row] for row in rows], type=HEADERS
    )


def _decode_row(data: bytes, at: int, end: int) -> list[tuple[str, bytes | None]]:
    count, at = _number(data, at)
    if not 0 <= count <= end - at:
        raise Malformed(f"a record claims {count} headers in {end - at} bytes")
    found: list[tuple[str, bytes | None]] = []
    for _ in range(count):
        size, at = _number(data, at)
        if not 0 <= size <= end - at:
            raise Malformed(f"a header's key claims {size} bytes")
        try:
            key = data[at : at + size].decode()
        except UnicodeDecodeError as error:
            raise Malformed(f"a header's key is not text: {error}") from error
        size, at = _number(data, at + size)
        if size > end - at:
            raise Malformed(f"a header's value claims {size} bytes")
        found.append((key, None if size < 0 else data[at : at + size]))
        at += max(size, 0)
    if at != end:
        raise Malformed("a record does not end with its headers")
    return found


def _number(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for place in range(varints.VARINT_BYTES_MAX):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return (value >> 1) ^ -(value & 1), at
    raise Malformed("a variable-length number without an end in a header")
