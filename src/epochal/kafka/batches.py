"""Record batches, format 2: written from Arrow columns, and read back into them.

A batch is a header of 61 bytes and a records section, compressed as a whole. A record is

    length attributes timestamp-delta offset-delta key-length key value-length value headers

with variable-length numbers, so that record 7 begins where record 6 ends. Written a column at a
time: each number becomes a binary column, looked up in a table of those that were written before,
and one element-wise join of all these with keys, values and headers is a column whose data buffer
*is* the records section. No Python runs per row.

`batch_reader` is the way back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from epochal.arrow_values import flags, numbers, scalar
from epochal.kafka import record_headers, varints
from epochal.kafka.batch_format import (
    ANYBODY,
    BIT_CONTROL,
    BIT_LOG_APPEND_TIME,
    BIT_TRANSACTIONAL,
    COMPRESSION_BITS,
    CRC_FROM,
    HEADER,
    HEADER_BYTES,
    LENGTH_FROM,
    MAGIC,
    MARKER_KEY,
    NO_PRODUCER_ID,
    NO_SEQUENCE,
    Marker,
    Producer,
    encode_marker,
    with_header,
)
from epochal.kafka.compression import Compression, compress
from epochal.kafka.primitives import Part
from epochal.kafka.varints import Ints, constant, data_of, join

__all__ = [
    "ANYBODY",
    "BIT_CONTROL",
    "BIT_LOG_APPEND_TIME",
    "BIT_TRANSACTIONAL",
    "COMPRESSION_BITS",
    "CRC_FROM",
    "HEADER",
    "HEADER_BYTES",
    "LENGTH_FROM",
    "MAGIC",
    "MARKER_KEY",
    "NO_PRODUCER_ID",
    "NO_SEQUENCE",
    "RECORD_BYTES_MAX_OVERHEAD",
    "Columns",
    "Marker",
    "Producer",
    "as_binary",
    "encode",
    "encode_marker",
    "ends_of",
    "next_sequence",
    "portions",
    "row_bytes",
    "split",
]

_INT32_MAX = (1 << 31) - 1
_NO_ATTRIBUTES = b"\x00"
_NO_DELTA = varints.one(0)
_NULL = varints.one(-1)
RECORD_BYTES_MAX_OVERHEAD = 36
"""The numbers of a record without headers never take more than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """
    Rows to be written, a column each. All have the same length; a null key or value stays null.

    Header keys are text and their values bytes or null: list<struct<key, value>> or a map.
    """

    value: pa.Array
    key: pa.Array | None = None
    timestamp_ms: pa.Array | None = None
    headers: pa.Array | None = None

    def __len__(self) -> int:
        return len(self.value)

    def slice(self, start: int, length: int) -> Columns:
        def part(column: pa.Array | None) -> pa.Array | None:
            return None if column is None else column.slice(start, length)

        return Columns(
            value=self.value.slice(start, length),
            key=part(self.key),
            timestamp_ms=part(self.timestamp_ms),
            headers=part(self.headers),
        )


def as_binary(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Text or bytes of any kind as one plain binary array. Plain ones are not copied."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    kind = column.type
    if pa.types.is_dictionary(kind):
        column = column.dictionary_decode()
    if column.type != pa.binary():
        column = column.cast(pa.binary())
    return column


def _lengths(column: pa.Array) -> Ints:
    """The length of each element of a plain binary array, -1 for null, as in a record."""
    lengths: Ints = np.diff(ends_of(column)).astype(np.int64)
    if column.null_count:
        lengths[flags(column.is_null())] = -1
    return lengths


def ends_of(column: pa.Array) -> npt.NDArray[np.int32]:
    """Where in its data the elements of a plain binary array begin, and where the last one ends."""
    if not len(column):
        return np.zeros(1, dtype=np.int32)
    ends = np.frombuffer(column.buffers()[1], dtype=np.int32)
    return ends[column.offset : column.offset + len(column) + 1]


def row_bytes(rows: Columns) -> Ints:
    """About how many bytes each row takes, never too few: for splitting rows into batches."""
    total = np.maximum(_lengths(as_binary(rows.value)), 0) + RECORD_BYTES_MAX_OVERHEAD
    if rows.key is not None:
        total += np.maximum(_lengths(as_binary(rows.key)), 0)
    if rows.headers is not None:
        total += record_headers.encoded_lengths(rows.headers)
    return total


def split(rows: Columns, batch_bytes_max: int) -> Iterator[Columns]:
    """Runs of rows whose batches stay within the limit, uncompressed. A longer row is alone."""
    for ((_, start, end),) in portions([row_bytes(rows)], batch_bytes_max):
        yield rows.slice(start, end - start)


def portions(pieces: Sequence[Ints], batch_bytes_max: int) -> Iterator[list[tuple[int, int, int]]]:
    """
    The same over several pieces, each given by what its rows take: which rows of which pieces make
    a batch, as (piece, start, end). All but the last are as full as can be.
    """
    limit = max(batch_bytes_max - HEADER_BYTES, 0)
    batch: list[tuple[int, int, int]] = []
    room = limit
    for number, sizes in enumerate(pieces):
        ends = np.cumsum(sizes)
        start, spent = 0, 0
        while start < len(ends):
            end = int(np.searchsorted(ends, spent + room, side="right"))
            end = max(end, start if batch else start + 1)
            if end > start:
                batch.append((number, start, end))
                room -= int(ends[end - 1]) - spent
                start, spent = end, int(ends[end - 1])
            if start < len(ends):
                yield batch
                batch, room = [], limit
    if batch:
        yield batch


def next_sequence(sequence: int, count: int) -> int:
    """The number of the record behind `count` ones; it starts again at zero."""
    return (sequence + count) & _INT32_MAX


def encode(
    rows: Columns,
    *,
    default_timestamp_ms: int,
    compression: Compression = Compression.NONE,
    producer: Producer = ANYBODY,
) -> list[Part]:
    """
    One batch with all rows, as a header and a records section. There must be rows. Compressed only
    where that makes it shorter.
    """
    count = len(rows)
    if not count:
        raise ValueError("a batch has at least one record")
    base, latest, deltas = _timestamps(rows.timestamp_ms, default_timestamp_ms)
    section = _records_section(rows, deltas)
    packed = compress(compression, section)
    if len(packed) >= len(section):
        # A batch that compression makes longer could exceed a limit that the plain one keeps.
        compression, packed = Compression.NONE, section
    attributes = compression | (BIT_TRANSACTIONAL if producer.is_transactional else 0)
    return with_header(packed, attributes, count, (base, latest), producer)


def _timestamps(column: pa.Array | None, default_ms: int) -> tuple[int, int, Ints | None]:
    """The first time stamp, the latest, and each row's distance from the first if there is any."""
    if column is None:
        return default_ms, default_ms, None
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("ms", tz=column.type.tz), safe=False)
    column = pc.fill_null(column.cast(pa.int64()), scalar(default_ms, pa.int64()))
    values: Ints = numbers(column)
    base = int(values[0])
    latest = int(values.max())
    if latest == base and int(values.min()) == base:
        return base, latest, None
    return base, latest, values - base


def _records_section(rows: Columns, time_deltas: Ints | None) -> pa.Buffer:
    """As Arrow's own buffer, which serves as bytes wherever these are only read."""
    count = len(rows)
    value = as_binary(rows.value)
    lengths = varints.measured(_lengths(value))
    headers, header_bytes = record_headers.encode(rows.headers, count)
    pieces, front_bytes = _front(count, time_deltas)
    key, key_bytes = _key(rows.key)
    record_bytes = front_bytes + key_bytes + lengths.sizes + header_bytes
    record_bytes += np.maximum(lengths.values, 0)
    size = varints.written(varints.measured(record_bytes))
    return data_of(join([size, *pieces, *key, varints.written(lengths), value, *headers]))


def _front(count: int, time_deltas: Ints | None) -> tuple[list[pa.Array | pa.Scalar], Ints]:
    """The part of a record between its length and its key, and the size of that."""
    if time_deltas is None:
        offsets, sizes = varints.counted(count, behind=_NO_ATTRIBUTES + _NO_DELTA)
        return [offsets], sizes
    times = varints.measured(time_deltas)
    offsets, sizes = varints.counted(count)
    attributes = constant(_NO_ATTRIBUTES)
    return [attributes, varints.written(times), offsets], sizes + times.sizes + len(_NO_ATTRIBUTES)


def _key(column: pa.Array | None) -> tuple[list[pa.Array | pa.Scalar], Ints | int]:
    """The same of a key with its length."""
    if column is None or column.null_count == len(column):
        return [constant(_NULL)], len(_NULL)
    key = as_binary(column)
    lengths = varints.measured(_lengths(key))
    return [varints.written(lengths), key], lengths.sizes + np.maximum(lengths.values, 0)
