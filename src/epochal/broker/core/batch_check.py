"""`inspect`: checks the bytes that a producer sends for a partition before they are appended.

A broker stores records unchanged and reads only the 61 bytes of the header; the checksum covers the
rest.
"""

from __future__ import annotations

from typing import NamedTuple

import google_crc32c

from epochal.kafka import batch_format
from epochal.kafka.codes import Code
from epochal.kafka.primitives import Records

ZSTD = 4
COMPRESSION_MAX = ZSTD
RECORD_BYTES_MIN = 7
"""A byte for each of its numbers, and nothing else."""


class BatchHeader(NamedTuple):
    base_offset: int
    length: int
    leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    first_timestamp_ms: int
    max_timestamp_ms: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    records: int

    @property
    def is_control(self) -> bool:
        return bool(self.attributes & batch_format.BIT_CONTROL)

    @property
    def is_transactional(self) -> bool:
        return bool(self.attributes & batch_format.BIT_TRANSACTIONAL)

    @property
    def size(self) -> int:
        return batch_format.LENGTH_FROM + self.length


_unpack = batch_format.HEADER.unpack_from


def header_at(data: Records, at: int = 0) -> BatchHeader:
    """The header of a batch that is known to be whole."""
    return BatchHeader._make(_unpack(data, at))


class Refusal(NamedTuple):
    code: Code
    message: str


_NOT_ONE = Refusal(Code.INVALID_RECORD, "a request must carry one whole batch for a partition")


def inspect(
    data: Records | None, *, bytes_max: int, timestamp_max_ms: int, takes_zstd: bool
) -> BatchHeader | Refusal:
    """The header of the one batch in `data`, or the reason for refusing it."""
    if data is None or len(data) < batch_format.HEADER_BYTES:
        return _NOT_ONE
    head = BatchHeader._make(_unpack(data, 0))
    if head.magic != batch_format.MAGIC:
        return Refusal(Code.INVALID_RECORD, f"batches of format {head.magic} are not taken")
    size = head.size
    if size != len(data):
        is_sane = size >= batch_format.HEADER_BYTES
        return _NOT_ONE if is_sane else Refusal(Code.CORRUPT_MESSAGE, f"a batch of {size} bytes")
    if size > bytes_max:
        return Refusal(Code.MESSAGE_TOO_LARGE, f"a batch of {size} bytes, above {bytes_max}")
    if google_crc32c.value(bytes(memoryview(data)[batch_format.CRC_FROM :])) != head.crc:
        return Refusal(Code.CORRUPT_MESSAGE, "the checksum of the batch does not match")
    return _of_contents(head, timestamp_max_ms, takes_zstd)


def _of_contents(  # noqa: PLR0911  a line for each of the rules
    head: BatchHeader, timestamp_max_ms: int, takes_zstd: bool
) -> BatchHeader | Refusal:
    if head.records <= 0 or head.last_offset_delta != head.records - 1:
        return Refusal(
            Code.INVALID_RECORD, f"{head.records} records end at {head.last_offset_delta}"
        )
    if head.attributes & batch_format.BIT_CONTROL:
        return Refusal(Code.INVALID_RECORD, "only the coordinator writes control batches")
    compression = head.attributes & batch_format.COMPRESSION_BITS
    if not compression and head.records * RECORD_BYTES_MIN > head.size - batch_format.HEADER_BYTES:
        return Refusal(Code.INVALID_RECORD, f"{head.records} records in {head.size} bytes")
    if compression > COMPRESSION_MAX:
        return Refusal(Code.INVALID_RECORD, f"there is no compression {compression}")
    if compression == ZSTD and not takes_zstd:
        return Refusal(Code.UNSUPPORTED_COMPRESSION_TYPE, "zstd needs Produce version 7 or newer")
    if head.max_timestamp_ms > timestamp_max_ms:
        return Refusal(Code.INVALID_TIMESTAMP, f"{head.max_timestamp_ms} is too far in the future")
    if head.producer_id >= 0 and (head.base_sequence < 0 or head.producer_epoch < 0):
        return Refusal(Code.INVALID_RECORD, "a batch of a producer needs a sequence and an epoch")
    return head
