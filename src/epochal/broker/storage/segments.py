"""The batches of one partition: the newest in memory, the rest in segment files.

A segment is nothing but batches, one after the other, each with its own checksum. Beside it is
a sparse index: of one batch in every 16 KB its offset, its position, and the latest time stamp up
to there. An index is a help, not a truth: each entry has a checksum, and those that are missing or
wrong are made again by walking the segment.

Bytes of a segment count as far as the journal has them (`Placed`); bytes behind that were never
acknowledged and are cut off at the next start.

Nothing is read from a segment unchecked. What a batch's checksum does not cover (its offset, its
length) is checked by its place: within a segment every batch begins with the offset at which the
one before ends; after a gap there is a new segment. A batch that fails is `CorruptRecord`, for this
read and every later one; batches before and behind it are still read.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from epochal.broker.core.entries import Placed, SegmentKnown
from epochal.broker.storage.checksums import crc32c, is_of_one_bit, with_one_bit_flipped
from epochal.broker.storage.disk import Disk, File
from epochal.broker.storage.slices import CHUNK_BYTES, FRONT, FileSlice, checked, damaged
from epochal.errors import CorruptRecord
from epochal.kafka import batch_format

INDEX_EVERY_BYTES = 1 << 14
SEGMENT_MS_MAX = 7 * 86_400_000
_SLICE_BYTES_MIN = 1 << 17
"""Fewer bytes are read and sent with the rest of the answer."""
_INDEX_ENTRY = struct.Struct(">qqq")
_INDEX_CRC = struct.Struct(">I")
_INDEX_BYTES = _INDEX_ENTRY.size + _INDEX_CRC.size
_OFFSET_AND_LENGTH = struct.Struct(">qi")
_DELTA_AT = 23
_I32 = struct.Struct(">i")
_I64 = struct.Struct(">q")
_MAX_TIMESTAMP_AT = 35


class OpenFiles:
    """The files in use, the most recent ones kept open."""

    def __init__(self, disk: Disk, limit: int = 256) -> None:
        self.disk = disk
        self._limit = limit
        self._open: OrderedDict[str, File] = OrderedDict()

    def get(self, path: str) -> File:
        found = self._open.get(path)
        if found is None:
            found = self._open[path] = self.disk.open(path)
            if len(self._open) > self._limit:
                self._open.popitem(last=False)[1].close()
        else:
            self._open.move_to_end(path)
        return found

    def drop(self, path: str) -> None:
        found = self._open.pop(path, None)
        if found is not None:
            found.close()

    def close(self) -> None:
        for path in list(self._open):
            self.drop(path)


class Found(NamedTuple):
    """A batch, and where it is."""

    base_offset: int
    position: int
    size: int
    timestamp_max_ms: int


class Chunk(NamedTuple):
    """Batches, and an offset behind all of them."""

    data: bytes
    before: int


class Answer(NamedTuple):
    """The same for a socket, which may take the bytes from a file."""

    data: bytes | FileSlice
    before: int


@dataclass(slots=True, eq=False)
class Segment:
    base_offset: int
    end_offset: int
    size: int = 0
    timestamp_max_ms: int = -1
    offsets: array[int] = field(default_factory=lambda: array("q"))
    positions: array[int] = field(default_factory=lambda: array("q"))
    timestamps: array[int] = field(default_factory=lambda: array("q"))
    is_indexed: bool = True
    """Whether the index in memory covers all of it."""

    def note(self, offset: int, position: int) -> bool:
        if self.positions and position - self.positions[-1] < INDEX_EVERY_BYTES:
            return False
        self.offsets.append(offset)
        self.positions.append(position)
        self.timestamps.append(self.timestamp_max_ms)
        return True


class PartitionLog:
    def __init__(self, number: int, files: OpenFiles) -> None:
        self.number = number
        self.folder = f"partitions/{number:08d}"
        self.segments: list[Segment] = []
        self.tail: list[bytes] = []
        self.tail_offsets: list[int] = []
        self.tail_bytes = 0
        self.end = 0
        self.segment_bytes_max = 1 << 30
        self.segment_ms_max = SEGMENT_MS_MAX
        self._files = files
        self._unsynced: dict[str, bool] = {}
        """Files written since the last sync → whether they are new."""

    @property
    def size(self) -> int:
        return sum(segment.size for segment in self.segments) + self.tail_bytes

    def path(self, segment: Segment, kind: str = "segment") -> str:
        return f"{self.folder}/{segment.base_offset:020d}.{kind}"

    # Writing

    def stage(self, batch: bytes) -> None:
        """A batch with its offset assigned; it is readable from now on."""
        offset, _ = _OFFSET_AND_LENGTH.unpack_from(batch)
        self.tail.append(batch)
        self.tail_offsets.append(offset)
        self.tail_bytes += len(batch)
        self.end = offset + _I32.unpack_from(batch, _DELTA_AT)[0] + 1

    def flush(self) -> Placed | None:
        """Write the batches in memory to the active segment."""
        if not self.tail:
            return None
        first = self.tail_offsets[0]
        segment = self.segments[-1] if self.segments else None
        if segment is None or segment.end_offset != first or self._is_full(segment):
            segment = Segment(first, first)
            self.segments.append(segment)
        file = self._files.get(self.path(segment))
        self._unsynced.setdefault(self.path(segment), not segment.size)
        if file.size != segment.size:
            file.truncate(segment.size)
        file.append(self.tail)
        self._ensure_index(segment)
        position = segment.size
        fresh = bytearray()
        for offset, batch in zip(self.tail_offsets, self.tail, strict=True):
            (timestamp_ms,) = _I64.unpack_from(batch, _MAX_TIMESTAMP_AT)
            segment.timestamp_max_ms = max(segment.timestamp_max_ms, timestamp_ms)
            if segment.note(offset, segment.size):
                fresh += _index_entry(offset, segment.size, segment.timestamp_max_ms)
            segment.size += len(batch)
        if fresh:
            self._files.get(self.path(segment, "index")).append([bytes(fresh)])
        segment.end_offset = self.end
        placed = Placed(
            self.number, segment.base_offset, position, segment.size - position, first, self.end
        )
        self.tail, self.tail_offsets, self.tail_bytes = [], [], 0
        return placed

    def _is_full(self, segment: Segment) -> bool:
        """Whether batches in memory begin a new one: by size, or by time, for retention."""
        if not segment.size:
            return False
        self._ensure_index(segment)
        newest_ms = max(batch_ms for _, batch_ms, _ in self.in_memory())
        first_ms = segment.timestamps[0] if segment.timestamps else -1
        is_long = 0 <= first_ms < newest_ms - self.segment_ms_max
        return is_long or segment.size + self.tail_bytes > self.segment_bytes_max

    def sync(self) -> bool:
        """What was written survives a loss of power. True: the folder above is to be synced too."""
        unsynced, self._unsynced = self._unsynced, {}
        for path in unsynced:
            self._files.get(path).sync()
        has_new = any(unsynced.values())
        if has_new:
            self._files.disk.sync_folder(self.folder)
        return has_new

    # Reading

    def read(self, start: int, end: int, bytes_max: int) -> Chunk:
        """
        Whole batches from the one with `start` up to `end`, which is where a batch begins.

        At least one where there is any, however large; otherwise up to `bytes_max`.
        """
        found = self._in_segments(start, end, bytes_max)
        if found is None:
            return self._read_tail(start, end, bytes_max)
        return self._checked(*found)

    def answer(self, start: int, end: int, bytes_max: int) -> Answer | Chunk:
        """The same for a socket. Large answers are checked while they are sent."""
        found = self._in_segments(start, end, bytes_max)
        if found is None:
            return self._read_tail(start, end, bytes_max)
        segment, first, size, behind = found
        path = self.path(segment)
        file = self._files.get(path).descriptor
        if size < _SLICE_BYTES_MIN or file is None:
            return self._checked(*found)
        return Answer(FileSlice(file, path, first.position, size, first.base_offset), behind)

    def _read_tail(self, start: int, end: int, bytes_max: int) -> Chunk:
        at = max(bisect_right(self.tail_offsets, start) - 1, 0)
        parts: list[bytes] = []
        size = 0
        while at < len(self.tail) and self.tail_offsets[at] < end:
            batch = self.tail[at]
            if parts and size + len(batch) > bytes_max:
                break
            parts.append(batch)
            size += len(batch)
            at += 1
        behind = self.tail_offsets[at] if at < len(self.tail) else self.end
        return Chunk(b"".join(parts), behind)

    def _in_segments(
        self, start: int, end: int, bytes_max: int
    ) -> tuple[Segment, Found, int, int] | None:
        """
        The segment with an offset, the batch with it, how many bytes to read from there on, and the
        offset behind them. None where the batch is in memory.
        """
        if self.tail_offsets and start >= self.tail_offsets[0]:
            return None
        at = bisect_right(self.segments, start, key=lambda segment: segment.base_offset) - 1
        for segment in self.segments[max(at, 0) :]:
            if segment.base_offset >= end:
                break
            found = self._find(segment, start)
            if found is not None:
                return segment, found, *self._extent(segment, found, bytes_max, end)
        return None

    def _checked(self, segment: Segment, first: Found, size: int, behind: int) -> Chunk:
        """
        The batches of so many bytes from `first` on, up to one that is damaged. Raises
        `CorruptRecord` if that is the first.
        """
        read = self._files.get(self.path(segment)).read
        pieces = list(checked(read, first.position, size, first.base_offset))
        if not pieces:
            raise damaged(self.path(segment), first.position)
        data = b"".join(piece.data for piece in pieces)
        return Chunk(data, behind if len(data) == size else pieces[-1].behind)

    def _extent(self, segment: Segment, first: Found, bytes_max: int, end: int) -> tuple[int, int]:
        """
        How many bytes the batches from `first` on have, up to an offset and within `bytes_max`
        unless the first is larger, and the offset behind them: by the index and a few headers.
        """
        limit = first.position + max(bytes_max, first.size)
        position, offset = first.position, first.base_offset
        at = min(bisect_right(segment.positions, limit), bisect_right(segment.offsets, end)) - 1
        if at >= 0 and segment.positions[at] > position:
            position, offset = segment.positions[at], segment.offsets[at]
        path = self.path(segment)
        try:
            for found, last in Walk(self._files.get(path), path, position, segment.size, offset):
                behind = found.position + found.size
                if offset >= end or behind > limit:
                    break
                position, offset = behind, last + 1
        except CorruptRecord:
            pass  # up to there; a read of that batch reports it
        return position - first.position, offset

    def _find(self, segment: Segment, offset: int) -> Found | None:
        """The first batch that ends at or behind an offset."""
        self._ensure_index(segment)
        position = 0
        for found, last in self._walk(segment, bisect_right(segment.offsets, offset) - 1):
            if last >= offset:
                return found
            position = found.position
        if offset < segment.end_offset:
            # The last batch claims to end before the segment does: no reader is led beyond it.
            raise damaged(self.path(segment), position)
        return None

    def _walk(self, segment: Segment, at: int = -1) -> Walk:
        """From an entry of the index on, or from the start."""
        is_start = at < 0 or not segment.positions
        return Walk(
            self._files.get(self.path(segment)),
            self.path(segment),
            0 if is_start else segment.positions[at],
            segment.size,
            segment.base_offset if is_start else segment.offsets[at],
        )

    def _batch_at(self, segment: Segment, found: Found) -> bytes:
        return self._checked(segment, found, found.size, found.base_offset).data

    def since(self, timestamp_ms: int, start: int) -> list[bytes]:
        """
        The first batch from `start` on with a timestamp at or after the given one. Where it begins
        before `start`, the record with that time may lie before it: then the next such batch too.
        """
        found: list[bytes] = []
        for batch in self._since(timestamp_ms, start):
            found.append(batch)
            if _OFFSET_AND_LENGTH.unpack_from(batch)[0] >= start:
                break
        return found

    def _since(self, timestamp_ms: int, start: int) -> Iterator[bytes]:
        for segment in self.segments:
            if segment.timestamp_max_ms < timestamp_ms or segment.end_offset <= start:
                continue
            self._ensure_index(segment)
            at = max(bisect_left(segment.timestamps, timestamp_ms) - 1, 0)
            for found, last in self._walk(segment, at):
                if found.timestamp_max_ms >= timestamp_ms and last >= start:
                    yield self._batch_at(segment, found)
        for _, batch_ms, batch in self.in_memory():
            if batch_ms >= timestamp_ms:
                yield batch

    def in_memory(self) -> Iterator[tuple[int, int, bytes]]:
        """The batches that are in no segment yet: where each ends, its latest time, itself."""
        ends = (*self.tail_offsets[1:], self.end)
        for end_offset, batch in zip(ends, self.tail, strict=False):
            yield end_offset, _I64.unpack_from(batch, _MAX_TIMESTAMP_AT)[0], batch

    def latest_timestamp(self) -> int:
        segments = (segment.timestamp_max_ms for segment in self.segments)
        return max((-1, *segments, *(batch_ms for _, batch_ms, _ in self.in_memory())))

    # The index

    def _ensure_index(self, segment: Segment) -> None:
        if segment.is_indexed:
            return
        segment.is_indexed = True
        for offset, position, timestamp_ms in self._stored_index(segment):
            segment.offsets.append(offset)
            segment.positions.append(position)
            segment.timestamps.append(timestamp_ms)
        latest = segment.timestamps[-1] if segment.timestamps else -1
        known_max, segment.timestamp_max_ms = segment.timestamp_max_ms, latest
        try:
            for found, _ in self._walk(segment, len(segment.positions) - 1):
                segment.timestamp_max_ms = max(segment.timestamp_max_ms, found.timestamp_max_ms)
                segment.note(found.base_offset, found.position)
        except CorruptRecord:
            # The index ends before it; a read of that batch reports it.
            segment.timestamp_max_ms = known_max
        segment.timestamp_max_ms = max(known_max, segment.timestamp_max_ms)

    def _stored_index(self, segment: Segment) -> list[tuple[int, int, int]]:
        """The entries of the index's file, up to the first that is not right."""
        path = self.path(segment, "index")
        if not self._files.disk.exists(path):
            return []
        data = self._files.disk.read_all(path)
        listed: list[tuple[int, int, int]] = []
        for at in range(0, len(data) - _INDEX_BYTES + 1, _INDEX_BYTES):
            row = _INDEX_ENTRY.unpack_from(data, at)
            if data[at : at + _INDEX_BYTES] != _index_entry(*row) or row[1] >= segment.size:
                break
            if listed and not (row[0] > listed[-1][0] and row[1] > listed[-1][1]):
                break
            listed.append(row)
        self._files.drop(path)
        if len(listed) * _INDEX_BYTES != len(data):
            self._files.get(path).truncate(len(listed) * _INDEX_BYTES)
        return listed

    # The start of the log

    def drop_before(self, offset: int) -> list[Segment]:
        """Forget what ends at or before an offset; returns segments, whose files are removed."""
        gone = [segment for segment in self.segments if segment.end_offset <= offset]
        if gone:
            self.segments = self.segments[len(gone) :]
        dropped = [batch for end_offset, _, batch in self.in_memory() if end_offset <= offset]
        if dropped:
            self.tail_bytes -= sum(map(len, dropped))
            del self.tail[: len(dropped)], self.tail_offsets[: len(dropped)]
        return gone

    def remove(self, segments: list[Segment]) -> None:
        for segment in segments:
            for kind in ("segment", "index"):
                self._unsynced.pop(self.path(segment, kind), None)
                self._files.drop(self.path(segment, kind))
                self._files.disk.remove(self.path(segment, kind))

    # Recovery

    def restore(self, entry: SegmentKnown) -> None:
        self.segments.append(
            Segment(
                entry.base_offset,
                entry.end_offset,
                entry.size,
                entry.timestamp_max_ms,
                is_indexed=False,
            )
        )
        self.end = entry.end_offset

    def place(self, entry: Placed) -> list[bytes]:
        """
        Believe a segment up to here; returns the batches that were only there.

        Raises `CorruptRecord` where its bytes are damaged or missing.
        """
        segment = next((s for s in self.segments if s.base_offset == entry.segment), None)
        if segment is None:
            segment = Segment(entry.segment, entry.first_offset)
            self.segments.append(segment)
        segment.is_indexed = False
        for kept in (segment.offsets, segment.positions, segment.timestamps):
            del kept[:]
        segment.size = entry.position + entry.size
        segment.end_offset = entry.end_offset
        known = self.end
        self.tail, self.tail_offsets, self.tail_bytes = [], [], 0
        self.end = entry.end_offset
        found: list[bytes] = []
        if not self._files.disk.exists(self.path(segment)):
            return found  # below the start of the log, by a later entry
        for data, batch in self._placed(entry):
            if batch.base_offset >= known:
                found.append(data)
            segment.timestamp_max_ms = max(segment.timestamp_max_ms, batch.timestamp_max_ms)
        return found

    def has_placed(self, entry: Placed) -> bool:
        """
        Whether the bytes of a tick that may not have been synced are there. Raises `CorruptRecord`
        where they are but for one flipped bit.
        """
        path = self.path(Segment(entry.segment, entry.segment))
        if not self._files.disk.exists(path):
            return False
        position = entry.position
        try:
            for _, batch in self._placed(entry):
                position = batch.position + batch.size
        except CorruptRecord:
            end = entry.position + entry.size
            if is_one_bit_off(self._files.get(path).read(position, end - position)):
                raise
            return False
        return True

    def _placed(self, entry: Placed) -> Iterator[tuple[bytes, Found]]:
        segment = Segment(entry.segment, entry.end_offset, entry.position + entry.size)
        path = self.path(segment)
        walk = Walk(self._files.get(path), path, entry.position, segment.size, entry.first_offset)
        for batch, _ in walk:
            yield self._batch_at(segment, batch), batch

    def settle(self) -> int:
        """Remove bytes never acknowledged; returns how many of the others are missing."""
        missing = 0
        for segment in self.segments:
            file = self._files.get(self.path(segment))
            if file.size < segment.size:
                size, segment.end_offset = self._whole(segment, file.size)
                missing += segment.size - size
                segment.size = size
            if file.size > segment.size:
                file.truncate(segment.size)
        return missing

    def _whole(self, segment: Segment, size: int) -> tuple[int, int]:
        """The size and the end of the batches that are whole."""
        path = self.path(segment)
        end, end_offset = 0, segment.base_offset
        try:
            for found, last in Walk(self._files.get(path), path, 0, size, segment.base_offset):
                self._batch_at(segment, found)
                end, end_offset = found.position + found.size, last + 1
        except CorruptRecord:
            return end, end_offset
        return end, end_offset

    def known(self) -> list[SegmentKnown]:
        return [
            SegmentKnown(self.number, s.base_offset, s.end_offset, s.size, s.timestamp_max_ms)
            for s in self.segments
        ]


def _index_entry(offset: int, position: int, timestamp_ms: int) -> bytes:
    row = _INDEX_ENTRY.pack(offset, position, timestamp_ms)
    return row + _INDEX_CRC.pack(crc32c(row))


def is_one_bit_off(data: bytes) -> bool:
    """Whether the batch at the start of `data` is whole but for one flipped bit."""
    head, behind = data[: batch_format.HEADER_BYTES], data[batch_format.HEADER_BYTES :]
    if len(head) < batch_format.HEADER_BYTES:
        return False
    for changed in (head, *with_one_bit_flipped(head)):
        # The head itself too: its offset may be wrong, which its checksum does not cover.
        _, length, _, _, crc, *_ = FRONT.unpack_from(changed)
        size = length + batch_format.LENGTH_FROM - batch_format.HEADER_BYTES
        if 0 <= size <= len(behind):
            covered = changed[batch_format.CRC_FROM :], behind[:size]
            if crc32c(*covered) == crc or (
                changed is head and is_of_one_bit(crc ^ crc32c(*covered), size)
            ):
                return True
    return False


class Walk:
    """
    The batches of a segment from a position on, by their headers, with their last offsets.

    Raises `CorruptRecord` where there is no batch with the next offset.
    """

    def __init__(self, file: File, path: str, position: int, end: int, offset: int) -> None:
        self._file = file
        self._path = path
        self._position = position
        self._end = end
        self._offset = offset
        self._chunk = b""
        self._chunk_at = position

    def __iter__(self) -> Walk:
        return self

    def __next__(self) -> tuple[Found, int]:
        if self._position >= self._end:
            raise StopIteration
        at = self._position - self._chunk_at
        if at + batch_format.HEADER_BYTES > len(self._chunk):
            left = self._end - self._position
            self._chunk = self._file.read(self._position, min(CHUNK_BYTES, left))
            self._chunk_at, at = self._position, 0
            if len(self._chunk) < batch_format.HEADER_BYTES:
                raise damaged(self._path, self._position)
        base_offset, length, epoch, magic, _, _, delta = FRONT.unpack_from(self._chunk, at)
        size = length + batch_format.LENGTH_FROM
        is_good = base_offset == self._offset and epoch == 0 and magic == batch_format.MAGIC
        is_inside = batch_format.HEADER_BYTES <= size <= self._end - self._position
        if not is_good or not is_inside or delta < 0:
            raise damaged(self._path, self._position)
        (timestamp_max_ms,) = _I64.unpack_from(self._chunk, at + _MAX_TIMESTAMP_AT)
        found = Found(base_offset, self._position, size, timestamp_max_ms)
        self._position += size
        self._offset = base_offset + delta + 1
        return found, base_offset + delta
