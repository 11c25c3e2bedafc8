"""The records within a batch, where a broker has to look at them: for a time, or for a key.

Both take as long as the records are large, and a compressed batch may unpack to a thousand times
its size: this runs beside the loop, and only up to a bound.
"""

from __future__ import annotations

import zlib
from importlib import import_module

from epochal.broker.core.batch_check import BatchHeader, header_at
from epochal.kafka import batch_format
from epochal.kafka.primitives import Malformed, Oversized

_PLAIN, _GZIP = 0, 1
_NAMED_MAX = 100


def first_since(batch: bytes, timestamp_ms: int, bytes_max: int) -> tuple[int, int] | None:
    """(timestamp, offset) of the first record of a batch that is not older."""
    head = header_at(batch)
    if head.attributes & batch_format.BIT_LOG_APPEND_TIME:
        found = head.max_timestamp_ms >= timestamp_ms
        return (head.max_timestamp_ms, head.base_offset) if found else None
    if head.first_timestamp_ms >= timestamp_ms or head.records == 1:
        return head.first_timestamp_ms, head.base_offset
    section = _unpacked(head, batch, bytes_max)
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


def keyless(batch: bytes, bytes_max: int) -> list[int]:
    """Which records of a batch have no key, by their place in it; the first hundred of them."""
    if len(batch) < batch_format.HEADER_BYTES:
        raise Malformed("a batch without a header")
    head = header_at(batch)
    section = _unpacked(head, batch, bytes_max)
    at = 0
    found: list[int] = []
    for number in range(head.records):
        size, at = _varint(section, at)
        end = at + size
        _, at = _varint(section, at + 1)
        _, at = _varint(section, at)
        key_size, _ = _varint(section, at)
        if key_size < 0 and len(found) < _NAMED_MAX:
            found.append(number)
        at = end
    return found


def _unpacked(head: BatchHeader, batch: bytes, bytes_max: int) -> bytes:
    """The records of a batch as plain bytes. Codecs are loaded when the first such batch is met."""
    data = batch[batch_format.HEADER_BYTES :]
    kind = head.attributes & batch_format.COMPRESSION_BITS
    if kind == _PLAIN:
        return data
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
