"""Reads record batches (format 2) into Arrow columns.

Where a record begins is only known once the one before it is: one light loop finds that. All other
numbers are read for all records at once, and keys and values are picked out by one `take` each:
the places of all keys, say, are laid over the section as the ends of one binary column, in which
every second element is a key.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import google_crc32c
import numpy as np
import pyarrow as pa

from epochal.kafka import batches, record_headers, varints
from epochal.kafka.batches import Marker
from epochal.kafka.compression import RECORDS_BYTES_MAX, Compression, decompress
from epochal.kafka.primitives import Malformed, Records
from epochal.kafka.varints import Ints

_RECORD_BYTES_MIN = 7
_INT32_MAX = (1 << 31) - 1
_PADDING = bytes(varints.VARLONG_BYTES_MAX + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One batch of a partition's log. Its records are decoded when asked for."""

    base_offset: int
    last_offset_delta: int
    leader_epoch: int
    attributes: int
    base_timestamp_ms: int
    max_timestamp_ms: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    count: int
    size: int
    """In bytes, as in the log."""
    section: bytes = field(repr=False)
    """The records, perhaps compressed."""

    @property
    def last_offset(self) -> int:
        return self.base_offset + self.last_offset_delta

    @property
    def is_control(self) -> bool:
        return bool(self.attributes & batches.BIT_CONTROL)

    @property
    def is_transactional(self) -> bool:
        return bool(self.attributes & batches.BIT_TRANSACTIONAL)

    @property
    def is_log_append_time(self) -> bool:
        return bool(self.attributes & batches.BIT_LOG_APPEND_TIME)

    @property
    def compression(self) -> Compression:
        try:
            return Compression(self.attributes & batches.COMPRESSION_BITS)
        except ValueError as error:
            raise Malformed(f"attributes {self.attributes:#x} name no compression") from error

    def marker(self) -> Marker | None:
        """How a transaction ended here; None where this batch is no marker."""
        if not self.is_control:
            return None
        keys = self.columns()["key"]
        key = keys[0].as_py() if len(keys) else None
        if key is None or len(key) < batches.MARKER_KEY.size:
            raise Malformed(f"the control batch at offset {self.base_offset} has no type")
        _, kind = batches.MARKER_KEY.unpack_from(key)
        return Marker(kind) if kind in (Marker.ABORT, Marker.COMMIT) else None

    def columns(self, *, records_bytes_max: int = RECORDS_BYTES_MAX) -> pa.RecordBatch:
        """offset, timestamp_ms, key, value, headers: one row per record."""
        plain = decompress(self.compression, self.section, records_bytes_max)
        return _Section(plain, self.count).columns(self)


def read(records: Records, *, verify: bool = True) -> Iterator[Batch]:
    """
    The batches of a partition, in order. A last one that was cut short is left out.

    A broker cuts what it sends at a limit of bytes, wherever that falls.
    """
    view = memoryview(records)
    at = 0
    while len(view) - at >= batches.HEADER_BYTES:
        fields = batches.HEADER.unpack_from(view, at)
        base_offset, length, leader_epoch, magic, crc = fields[:5]
        if magic != batches.MAGIC:
            raise Malformed(
                f"a batch of format {magic} at offset {base_offset}; only format 2 is supported",
                hint="brokers before 3.0 may still hold it: set log.message.format.version",
            )
        size = batches.LENGTH_FROM + length
        if size < batches.HEADER_BYTES:
            raise Malformed(f"the batch at offset {base_offset} claims {size} bytes")
        if size > len(view) - at:
            return
        covered = bytes(view[at + batches.CRC_FROM : at + size])
        if verify and google_crc32c.value(covered) != crc:
            raise Malformed(f"the batch at offset {base_offset} does not match its checksum")
        attributes, last, first_ms, latest_ms, pid, epoch, sequence, count = fields[5:]
        if count < 0 or last < 0:
            raise Malformed(f"the batch at offset {base_offset} claims {count} records")
        yield Batch(
            base_offset=base_offset,
            last_offset_delta=last,
            leader_epoch=leader_epoch,
            attributes=attributes & 0xFFFF,
            base_timestamp_ms=first_ms,
            max_timestamp_ms=latest_ms,
            producer_id=pid,
            producer_epoch=epoch,
            base_sequence=sequence,
            count=count,
            size=size,
            section=covered[batches.HEADER_BYTES - batches.CRC_FROM :],
        )
        at += size


def committed(found: Iterable[Batch], aborted: Iterable[tuple[int, int]]) -> Iterator[Batch]:
    """
    The batches a reader of committed rows sees, of those up to the last stable offset.

    `aborted` are the producer ids and first offsets that a Fetch at that isolation came with.
    """
    coming = sorted(aborted, key=lambda transaction: transaction[1])
    gone: set[int] = set()
    for batch in found:
        while coming and coming[0][1] <= batch.last_offset:
            gone.add(coming.pop(0)[0])
        if batch.is_control:
            gone.discard(batch.producer_id)
        elif not (batch.is_transactional and batch.producer_id in gone):
            yield batch


class _Section:
    """A plain records section, being read."""

    def __init__(self, data: bytes, count: int) -> None:
        if count * _RECORD_BYTES_MIN > len(data):
            raise Malformed(f"{count} records are claimed in {len(data)} bytes")
        if len(data) > _INT32_MAX - len(_PADDING):
            raise Malformed(f"a records section of {len(data)} bytes")
        self.data = data
        self.count = count
        self.padded = np.frombuffer(data + _PADDING, dtype=np.uint8)

    def columns(self, batch: Batch) -> pa.RecordBatch:
        starts, ends = self._bounds()
        time_deltas, at = self._numbers(starts + 1, ends, varints.VARLONG_BYTES_MAX)
        offset_deltas, at = self._numbers(at, ends)
        keys, at = self._fields(at, ends)
        values, at = self._fields(at, ends)
        if batch.is_log_append_time:
            times = np.full(self.count, batch.max_timestamp_ms, dtype=np.int64)
        else:
            times = batch.base_timestamp_ms + time_deltas
        return pa.RecordBatch.from_arrays(
            [
                pa.array(batch.base_offset + offset_deltas, pa.int64()),
                pa.array(times, pa.int64()),
                keys,
                values,
                self._headers(at, ends),
            ],
            ["offset", "timestamp_ms", "key", "value", "headers"],
        )

    def _bounds(self) -> tuple[Ints, Ints]:
        """Where each record begins, behind its length, and where it ends."""
        data, at = self.data, 0
        starts: list[int] = []
        ends: list[int] = []
        try:
            for _ in range(self.count):
                size = data[at]
                at += 1
                if size > 127:
                    place = 7
                    byte = size
                    size &= 0x7F
                    while byte > 127:
                        byte = data[at]
                        at += 1
                        size |= (byte & 0x7F) << place
                        place += 7
                if size & 1:
                    raise Malformed("a record of negative length")
                starts.append(at)
                at += size >> 1
                ends.append(at)
        except IndexError as error:
            raise Malformed("the records section ends within a record") from error
        if at != len(data):
            raise Malformed(f"the records end at {at} of {len(data)} bytes")
        return np.array(starts, dtype=np.int64), np.array(ends, dtype=np.int64)

    def _numbers(
        self, at: Ints, ends: Ints, bytes_max: int = varints.VARINT_BYTES_MAX
    ) -> tuple[Ints, Ints]:
        if (at >= ends).any():
            raise Malformed("a record ends before its fields do")
        values, at = varints.read(self.padded, at, bytes_max)
        if (at > ends).any():
            raise Malformed("a record ends within a number")
        return values, at

    def _fields(self, at: Ints, ends: Ints) -> tuple[pa.Array, Ints]:
        """A column of keys or values, and the positions behind them."""
        lengths, at = self._numbers(at, ends)
        behind = at + np.maximum(lengths, 0)
        if (behind > ends).any():
            raise Malformed("a key or a value is longer than its record")
        marks = np.empty(2 * self.count + 1, dtype=np.int32)
        marks[0] = 0
        marks[1::2] = at
        marks[2::2] = behind
        laid = pa.Array.from_buffers(
            pa.binary(),
            2 * self.count,
            [None, pa.py_buffer(marks), pa.py_buffer(self.data)],
        )
        wanted = pa.array(np.arange(1, 2 * self.count, 2), mask=lengths < 0)
        return laid.take(wanted), behind

    def _headers(self, at: Ints, ends: Ints) -> pa.Array:
        if (at >= ends).any():
            raise Malformed("a record ends before its headers")
        if (self.padded[at] == 0).all() and (at + 1 == ends).all():
            empty = np.zeros(self.count + 1, dtype=np.int32)
            children = pa.array([], record_headers.HEADERS.value_type)
            return pa.ListArray.from_arrays(pa.array(empty), children, type=record_headers.HEADERS)
        return record_headers.decode(self.data, at, ends)
