"""The layout of a record batch, format 2: headers and markers.

Needs neither Arrow nor NumPy, which together are most of a small process: a broker stores batches
unchanged. `batches` and `batch_reader` convert rows to and from batches.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

import google_crc32c

from epochal.kafka.primitives import Part

HEADER_BYTES = 61
NO_PRODUCER_ID = -1
NO_SEQUENCE = -1

HEADER = struct.Struct(">qiibIhiqqqhii")
"""
Base offset, length, partition leader epoch, magic, checksum, attributes, last offset delta, first
and latest time stamp, producer id and epoch, base sequence, count.
"""
LENGTH_FROM = 12
"""The length counts the bytes from here on,"""
CRC_FROM = 21
"""and the checksum covers them from here on."""
CRC_AT = 17
MAGIC = 2
BIT_LOG_APPEND_TIME = 0x08
BIT_TRANSACTIONAL = 0x10
BIT_CONTROL = 0x20
COMPRESSION_BITS = 0x07
MARKER_KEY = struct.Struct(">hh")

_INT32_MAX = (1 << 31) - 1
_MARKER_VALUE = struct.Struct(">hi")


class Marker(IntEnum):
    """The outcome of a transaction, in a control batch."""

    ABORT = 0
    COMMIT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Producer:
    """The producer of a batch, and the sequence number of its first record."""

    producer_id: int = NO_PRODUCER_ID
    producer_epoch: int = -1
    base_sequence: int = NO_SEQUENCE
    is_transactional: bool = False

    def __post_init__(self) -> None:
        # A broker takes a transactional batch without a producer, and shows it at once.
        if self.is_transactional and self.producer_id < 0:
            raise ValueError("a transactional batch needs a producer id")


ANYBODY = Producer()


def encode_marker(
    marker: Marker, *, producer: Producer, coordinator_epoch: int, timestamp_ms: int
) -> list[Part]:
    """The control batch by which a coordinator ends a transaction in one partition."""
    key = MARKER_KEY.pack(0, marker)
    value = _MARKER_VALUE.pack(0, coordinator_epoch)
    # One record; its lengths (16 in all, 4 and 6) are zigzag numbers of a byte each.
    section = b"\x20\x00\x00\x00\x08" + key + b"\x0c" + value + b"\x00"
    attributes = BIT_TRANSACTIONAL | BIT_CONTROL
    return with_header(section, attributes, 1, (timestamp_ms, timestamp_ms), producer)


def with_header(
    section: bytes, attributes: int, count: int, times: tuple[int, int], producer: Producer
) -> list[Part]:
    """A batch of a records section, as header and section."""
    head = bytearray(HEADER_BYTES)
    size = HEADER_BYTES - LENGTH_FROM + len(section)
    if size > _INT32_MAX:
        raise ValueError(f"a batch of {size} bytes is too long for the format")
    fields = (attributes, count - 1, *times, producer.producer_id, producer.producer_epoch)
    HEADER.pack_into(head, 0, 0, size, -1, MAGIC, 0, *fields, producer.base_sequence, count)
    crc = google_crc32c.extend(google_crc32c.value(bytes(head[CRC_FROM:])), section)
    struct.pack_into(">I", head, CRC_AT, crc)
    return [bytes(head), section]
