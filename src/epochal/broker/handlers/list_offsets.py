"""ListOffsets: the first offset, the last, and the first since a time.

Only the last looks into batches. Plain and gzip records are read here; for other compressions the
codec is loaded when the first such batch is read.
"""

from __future__ import annotations

import zlib
from importlib import import_module

from epochal.broker.broker import Broker, Call
from epochal.broker.core.batch_check import BatchHeader, header_at
from epochal.broker.core.partitions import Partition
from epochal.broker.core.state import LEADER_EPOCH
from epochal.errors import CorruptRecord
from epochal.kafka import batch_format
from epochal.kafka.codes import Code
from epochal.kafka.messages.list_offsets import (
    ListOffsetsPartition,
    ListOffsetsPartitionResponse,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ListOffsetsTopicResponse,
)
from epochal.kafka.primitives import Malformed

VERSIONS = range(1, 9)
_MAX_TIMESTAMP = -3
_EPOCHS_FROM = 4
_COMMITTED = 1
_PLAIN, _GZIP = 0, 1
_SECTION_BYTES_MAX = 1 << 28


def handle(call: Call, request: ListOffsetsRequest) -> ListOffsetsResponse:
    is_committed = request.isolation_level == _COMMITTED
    return ListOffsetsResponse(
        topics=[
            ListOffsetsTopicResponse(
                name=topic.name,
                partitions=[
                    _found(call, topic.name, part, is_committed=is_committed)
                    for part in topic.partitions
                ],
            )
            for topic in request.topics
        ]
    )


def _found(
    call: Call, topic: str, part: ListOffsetsPartition, *, is_committed: bool
) -> ListOffsetsPartitionResponse:
    broker = call.broker
    answer = ListOffsetsPartitionResponse(partition_index=part.partition_index)
    partition = broker.partition(topic, part.partition_index)
    if partition is None:
        answer.error_code = Code.UNKNOWN_TOPIC_OR_PARTITION
        return answer
    if part.current_leader_epoch > LEADER_EPOCH:
        answer.error_code = Code.UNKNOWN_LEADER_EPOCH
        return answer
    end = partition.stable_end if is_committed else partition.end
    match part.timestamp:
        case -1:  # the end
            answer.offset = end
        case -2 | -4:  # the start; as nothing is kept elsewhere, the local one too
            answer.offset = partition.log_start
        case _:
            try:
                answer.timestamp, answer.offset = _since(broker, partition, part.timestamp, end)
            except CorruptRecord as error:
                answer.error_code = broker.report_damage(error)
                return answer
            if answer.offset < 0:
                return answer
    if call.version >= _EPOCHS_FROM:
        answer.leader_epoch = LEADER_EPOCH
    return answer


def _since(broker: Broker, partition: Partition, timestamp_ms: int, end: int) -> tuple[int, int]:
    log = broker.store.logs[partition.number]
    if timestamp_ms == _MAX_TIMESTAMP:
        timestamp_ms = log.latest_timestamp()
    if timestamp_ms < 0:
        return -1, -1
    batch = log.first_since(timestamp_ms, partition.log_start)
    if batch is None:
        return -1, -1
    try:
        found = _first_record_since(batch, timestamp_ms)
    except Malformed:
        found = None
    if found is None or found[1] >= end:
        return -1, -1
    return found


def _first_record_since(batch: bytes, timestamp_ms: int) -> tuple[int, int] | None:
    """(timestamp, offset) of the first record of a batch that is not older."""
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
