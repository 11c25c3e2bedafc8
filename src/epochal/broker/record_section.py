"""The records within a batch, where a broker has to look at them: for a time, or for a key.

Both take as long as the records are large, and a compressed batch may unpack to a thousand times
its size: this runs beside the loop, and only up to a bound.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from importlib import import_module

from epochal.broker.core.batch_check import (
    COMPRESSION_MAX,
    RECORD_BYTES_MIN,
    BatchHeader,
    header_at,
)
from epochal.kafka import batch_format
from epochal.kafka.primitives import Malformed, Oversized

_PLAIN, _GZIP = 0, 1
_NAMED_MAX = 100


def first_since(
    batch: bytes, timestamp_ms: int, start: int, bytes_max: int
) -> tuple[int, int] | None:
    """(timestamp, offset) of the first record of a batch from `start` on that is not older."""
    head = header_at(batch)
    if head.attributes & batch_format.BIT_LOG_APPEND_TIME:
        found = head.max_timestamp_ms >= timestamp_ms
        return (head.max_timestamp_ms, max(head.base_offset, start)) if found else None
    is_first = head.first_timestamp_ms >= timestamp_ms or head.records == 1
    if is_first and head.base_offset >= start:
        return head.first_timestamp_ms, head.base_offset
    section = _unpacked(head, batch, bytes_max)
    for at in _records(head, section):
        time_delta, at_offset = _varint(section, at)
        offset_delta, _ = _varint(section, at_offset)
        time_ms, offset = head.first_timestamp_ms + time_delta, head.base_offset + offset_delta
        if time_ms >= timestamp_ms and offset >= start:
            return time_ms, offset
    return None


def keyless(batch: bytes, bytes_max: int) -> list[int]:
    """Which records of a batch have no key, by their place in it; the first hundred of them."""
    if len(batch) < batch_format.HEADER_BYTES:
        raise Malformed("a batch without a header")
    head = header_at(batch)
    section = _unpacked(head, batch, bytes_max)
    found: list[int] = []
    for number, at in enumerate(_records(head, section)):
        _, at_offset = _varint(section, at)
        _, at_key = _varint(section, at_offset)
        key_size, _ = _varint(section, at_key)
        if key_size < 0 and len(found) < _NAMED_MAX:
            found.append(number)
    return found


def _records(head: BatchHeader, section: bytes) -> Iterator[int]:
    """Where the fields of each record begin, behind its length and its attributes."""
    if head.records * RECORD_BYTES_MIN > len(section):
        raise Malformed(f"{head.records} records are claimed in {len(section)} bytes")
    at = 0
    for _ in range(head.records):
        size, at = _varint(section, at)
        if not 0 <= size <= len(section) - at:
            raise Malformed("a record does not end within its batch")
        yield at + 1
        at += size


def _unpacked(head: BatchHeader, batch: bytes, bytes_max: int) -> bytes:
    """The records of a batch as plain bytes. Codecs are loaded when the first such batch is met."""
    data = batch[batch_format.HEADER_BYTES :]
    kind = head.attributes & batch_format.COMPRESSION_BITS
    if kind == _PLAIN:
        return data
    if kind > COMPRESSION_MAX:
        raise Malformed(f"there is no compression {kind}")
    if kind == _GZIP:
        try:
            plain = zlib.decompressobj(wbits=31).decompress(data, bytes_max + 1)
        except zlib.error as error:
            raise Malformed(f"gzip records: {error}") from error
    else:
        compression = import_module("epochal.kafka.compression")
        plain = compression.decompress(compression.Compression(kind), data, bytes_max)
    if len(plain) > bytes_max:
        raise Oversized(f"a batch unpacks to more than {bytes_max} bytes")
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
