"""The first record of a batch since a time.

Only this looks into batches. Plain and gzip records are read as they are; the other compressions
are opened with the codec's own reader, which is loaded when the first of them comes by.
"""

from __future__ import annotations

import zlib
from importlib import import_module

from epochal.broker.core.batch_check import BatchHeader, header_at
from epochal.kafka import batch_format
from epochal.kafka.primitives import Malformed

_PLAIN, _GZIP = 0, 1
_SECTION_BYTES_MAX = 1 << 28


def first_record_since(batch: bytes, timestamp_ms: int) -> tuple[int, int] | None:
    """(time stamp, offset) of the first record that is not older."""
    head = header_at(batch)
    if head.attributes & batch_format.BIT_LOG_APPEND_TIME:
        found = head.max_timestamp_ms >= timestamp_ms
        return (head.max_timestamp_ms, head.base_offset) if found else None
    if head.first_timestamp_ms >= timestamp_ms or head.records == 1:
        return head.first_timestamp_ms, head.base_offset
    section = _section(head, batch)
    at = 0
    for _ in range(head.records):
        size, at = _varint(section, at)
        end = at + size
        time_delta, at = _varint(section, at + 1)
        offset_delta, at = _varint(section, at)
        if head.first_timestamp_ms + time_delta >= timestamp_ms:
            return head.first_timestamp_ms + time_delta, head.base_offset + offset_delta
        at = end
    return None


def _section(head: BatchHeader, batch: bytes) -> bytes:
    data = batch[batch_format.HEADER_BYTES :]
    kind = head.attributes & batch_format.COMPRESSION_BITS
    if kind == _PLAIN:
        return data
    if kind == _GZIP:
        try:
            return zlib.decompressobj(wbits=31).decompress(data, _SECTION_BYTES_MAX)
        except zlib.error as error:
            raise Malformed(f"gzip records: {error}") from error
    compression = import_module("epochal.kafka.compression")
    plain: bytes = compression.decompress(compression.Compression(kind), data)
    return plain


def _varint(data: bytes, at: int) -> tuple[int, int]:
    folded = shift = 0
    try:
        while True:
            byte = data[at]
            at += 1
            folded |= (byte & 0x7F) << shift
            if byte < 0x80:
                return (folded >> 1) ^ -(folded & 1), at
            shift += 7
            if shift > 63:
                raise Malformed("a number of more than 64 bits in a record")
    except IndexError:
        raise Malformed("the records end within a number") from None
