"""Record batches, format 2: written from Arrow columns, and read back into them.

A batch is a header of 61 bytes and a records section, compressed as a whole. A record is

    length attributes timestamp-delta offset-delta key-length key value-length value headers

with variable-length numbers, so that record 7 begins where record 6 ends. Written a column at a
time: the numbers before a key become one binary column, those before a value another, and one
element-wise join of [numbers, key, numbers, value, headers] is a column whose data buffer *is* the
records section. No Python runs per row.

`batch_reader` is the way back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

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
from epochal.kafka.varints import Ints, data_of, join, numbers

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
    "next_sequence",
    "row_bytes",
    "split",
]

_INT32_MAX = (1 << 31) - 1
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
    """The length of each element, -1 for null: as it stands in a record."""
    found = pc.fill_null(pc.binary_length(column), -1)
    lengths: Ints = found.to_numpy(zero_copy_only=False).astype(np.int64)
    return lengths


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
    if not len(rows):
        return
    ends = np.cumsum(row_bytes(rows))
    start, spent = 0, 0
    limit = max(batch_bytes_max - HEADER_BYTES, 0)
    while start < len(rows):
        end = int(np.searchsorted(ends, spent + limit, side="right"))
        end = max(end, start + 1)
        yield rows.slice(start, end - start)
        start, spent = end, int(ends[end - 1])


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
    """One batch with all rows, as a header and a records section. There must be rows."""
    count = len(rows)
    if not count:
        raise ValueError("a batch has at least one record")
    base, latest, deltas = _timestamps(rows.timestamp_ms, default_timestamp_ms)
    section = _records_section(rows, deltas)
    attributes = compression | (BIT_TRANSACTIONAL if producer.is_transactional else 0)
    return with_header(compress(compression, section), attributes, count, (base, latest), producer)


def _timestamps(column: pa.Array | None, default_ms: int) -> tuple[int, int, Ints | None]:
    """The first time stamp, the latest, and each row's distance from the first if there is any."""
    if column is None:
        return default_ms, default_ms, None
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("ms", tz=column.type.tz), safe=False)
    column = pc.fill_null(column.cast(pa.int64()), default_ms)
    values: Ints = column.to_numpy(zero_copy_only=False)
    base = int(values[0])
    latest = int(values.max())
    if latest == base and int(values.min()) == base:
        return base, latest, None
    return base, latest, values - base


def _records_section(rows: Columns, time_deltas: Ints | None) -> bytes:
    count = len(rows)
    value = as_binary(rows.value)
    value_lengths = varints.measured(_lengths(value))
    times = None if time_deltas is None else varints.measured(time_deltas)
    offsets = varints.measured(np.arange(count, dtype=np.int64))
    key = None if rows.key is None else as_binary(rows.key)
    keyless = np.full(count, -1, dtype=np.int64)
    key_lengths = varints.measured(keyless if key is None else _lengths(key))
    headers, header_bytes = record_headers.encode(rows.headers, count)
    record_bytes = 1 + offsets.sizes + header_bytes + (1 if times is None else times.sizes)
    for lengths in (key_lengths, value_lengths):
        record_bytes += lengths.sizes + np.maximum(lengths.values, 0)
    front = [varints.measured(record_bytes), None, times, offsets, key_lengths]
    if key is None or key.null_count == count:
        pieces = [numbers([*front, value_lengths]), value, *headers]
    else:
        pieces = [numbers(front), key, numbers([value_lengths]), value, *headers]
    section: bytes = data_of(join(pieces)).to_pybytes()
    return section
