"""The batches of one partition: the newest in memory, the rest in segment files.

A segment is nothing but batches, one after the other, each with its own checksum. Beside it is
a sparse index: of one batch in every 16 KB its offset, its position, and the latest time stamp up
to there. An index is a help, not a truth: an entry is believed if the batch it points at has its
offset; if not, or if it is missing, it is made again by walking the segment.

Bytes of a segment count as far as the journal has them (`Placed`); bytes behind that were never
acknowledged and is cut off at the next start.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from epochal.broker.core.entries import Placed, SegmentKnown
from epochal.broker.storage.disk import Disk, File
from epochal.kafka import batch_format

INDEX_EVERY_BYTES = 1 << 14
_CHUNK_BYTES = 1 << 16
_INDEX_ENTRY = struct.Struct(">qqq")
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


class Chunk(NamedTuple):
    """The bytes read, and an offset behind all of them."""

    data: bytes
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
        self.is_new = True
        """Whether its folder may not be on disk yet."""
        self._files = files

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
        is_full = segment is not None and segment.size + self.tail_bytes > self.segment_bytes_max
        if segment is None or (is_full and segment.size):
            segment = Segment(first, first)
            self.segments.append(segment)
        file = self._files.get(self.path(segment))
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
                fresh += _INDEX_ENTRY.pack(offset, segment.size, segment.timestamp_max_ms)
            segment.size += len(batch)
        if fresh:
            self._files.get(self.path(segment, "index")).append([bytes(fresh)])
        segment.end_offset = self.end
        placed = Placed(
            self.number, segment.base_offset, position, segment.size - position, first, self.end
        )
        self.tail, self.tail_offsets, self.tail_bytes = [], [], 0
        return placed

    def sync(self) -> None:
        """The active segment survives a loss of power."""
        if self.segments:
            self._files.get(self.path(self.segments[-1])).sync()
            if self.is_new or not self.segments[-1].positions[1:]:
                self._files.disk.sync_folder(self.folder)
                self._files.disk.sync_folder("partitions")
                self.is_new = False

    # Reading

    def read(self, start: int, end: int, bytes_max: int) -> Chunk:
        """
        Whole batches from the one with `start` up to `end`, which is where a batch begins.

        At least one where there is any, however large; otherwise about `bytes_max`, and the last
        one may be cut short, as the protocol allows.
        """
        if not self.tail_offsets or start < self.tail_offsets[0]:
            found = self._read_segments(start, end, bytes_max)
            if found.data:
                return found
        return self._read_tail(start, end, bytes_max)

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

    def _read_segments(self, start: int, end: int, bytes_max: int) -> Chunk:
        at = bisect_right(self.segments, start, key=lambda segment: segment.base_offset) - 1
        for segment in self.segments[max(at, 0) :]:
            if segment.base_offset >= end:
                break
            found = self._find(segment, start)
            if found is None:
                continue
            stop = segment.size
            if end < segment.end_offset:
                limit = self._find(segment, end)
                stop = segment.size if limit is None else limit.position
            size = min(max(bytes_max, found.size), stop - found.position)
            if size > 0:
                data = self._files.get(self.path(segment)).read(found.position, size)
                at = bisect_left(segment.positions, found.position + size)
                is_inside = at < len(segment.offsets)
                return Chunk(data, segment.offsets[at] if is_inside else segment.end_offset)
        return Chunk(b"", start)

    def _find(self, segment: Segment, offset: int) -> Found | None:
        """The first batch that ends at or behind an offset."""
        self._ensure_index(segment)
        at = bisect_right(segment.offsets, offset) - 1
        position = segment.positions[at] if at >= 0 else 0
        for found, last in self._walk(segment, position):
            if last >= offset:
                return found
        return None

    def _walk(self, segment: Segment, position: int) -> Walk:
        return Walk(self._files.get(self.path(segment)), position, segment.size)

    def batch_at(self, segment: Segment, found: Found) -> bytes:
        return self._files.get(self.path(segment)).read(found.position, found.size)

    def first_since(self, timestamp_ms: int, start: int) -> bytes | None:
        """The first batch from `start` on with a timestamp at or after the given one."""
        for segment in self.segments:
            if segment.timestamp_max_ms < timestamp_ms or segment.end_offset <= start:
                continue
            self._ensure_index(segment)
            at = max(bisect_left(segment.timestamps, timestamp_ms) - 1, 0)
            position = segment.positions[at] if segment.positions else 0
            file = self._files.get(self.path(segment))
            for found, last in self._walk(segment, position):
                (latest,) = _I64.unpack(file.read(found.position + _MAX_TIMESTAMP_AT, 8))
                if latest >= timestamp_ms and last >= start:
                    return self.batch_at(segment, found)
        for batch in self.tail:
            if _I64.unpack_from(batch, _MAX_TIMESTAMP_AT)[0] >= timestamp_ms:
                return batch
        return None

    def latest_timestamp(self) -> int:
        found = max((segment.timestamp_max_ms for segment in self.segments), default=-1)
        for batch in self.tail:
            found = max(found, _I64.unpack_from(batch, _MAX_TIMESTAMP_AT)[0])
        return found

    # The index

    def _ensure_index(self, segment: Segment) -> None:
        if segment.is_indexed:
            return
        segment.is_indexed = True
        for offset, position, timestamp_ms in self._stored_index(segment):
            segment.offsets.append(offset)
            segment.positions.append(position)
            segment.timestamps.append(timestamp_ms)
        position = segment.positions[-1] if segment.positions else 0
        file = self._files.get(self.path(segment))
        latest = segment.timestamps[-1] if segment.timestamps else -1
        known_max, segment.timestamp_max_ms = segment.timestamp_max_ms, latest
        for found, _ in self._walk(segment, position):
            (timestamp_ms,) = _I64.unpack(file.read(found.position + _MAX_TIMESTAMP_AT, 8))
            segment.timestamp_max_ms = max(segment.timestamp_max_ms, timestamp_ms)
            segment.note(found.base_offset, found.position)
        segment.timestamp_max_ms = max(known_max, segment.timestamp_max_ms)

    def _stored_index(self, segment: Segment) -> list[tuple[int, int, int]]:
        """The segment as far as its file is intact."""
        path = self.path(segment, "index")
        if not self._files.disk.exists(path):
            return []
        data = self._files.disk.read_all(path)
        whole = len(data) - len(data) % _INDEX_ENTRY.size
        listed = [row for row in _INDEX_ENTRY.iter_unpack(data[:whole]) if row[1] < segment.size]
        is_rising = all(a[0] < b[0] and a[1] < b[1] for a, b in pairwise(listed))
        file = self._files.get(self.path(segment))
        is_true = all(file.read(row[1], 8) == _I64.pack(row[0]) for row in listed[:1] + listed[-1:])
        self._files.drop(path)
        if not is_rising or not is_true:
            self._files.disk.remove(path)
            return []
        if len(listed) * _INDEX_ENTRY.size != len(data):
            self._files.get(path).truncate(len(listed) * _INDEX_ENTRY.size)
        return listed

    # The start of the log

    def drop_before(self, offset: int) -> list[Segment]:
        """Forget segments that end at or before an offset; returns them for removal."""
        gone = [segment for segment in self.segments if segment.end_offset <= offset]
        if gone:
            self.segments = self.segments[len(gone) :]
        return gone

    def remove(self, segments: list[Segment]) -> None:
        for segment in segments:
            for kind in ("segment", "index"):
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
        """Believe a segment up to here; returns the batches that were only there."""
        segment = next((s for s in self.segments if s.base_offset == entry.segment), None)
        if segment is None:
            segment = Segment(entry.segment, entry.first_offset, is_indexed=False)
            self.segments.append(segment)
        segment.is_indexed = False
        for kept in (segment.offsets, segment.positions, segment.timestamps):
            del kept[:]
        segment.size = entry.position + entry.size
        segment.end_offset = entry.end_offset
        known = self.end
        self.tail, self.tail_offsets, self.tail_bytes = [], [], 0
        self.end = entry.end_offset
        found = []
        for batch, _ in self._walk(segment, entry.position):
            if batch.base_offset >= known:
                found.append(self.batch_at(segment, batch))
            data = self._files.get(self.path(segment)).read(batch.position + _MAX_TIMESTAMP_AT, 8)
            segment.timestamp_max_ms = max(segment.timestamp_max_ms, _I64.unpack(data)[0])
        return found

    def settle(self) -> int:
        """Remove bytes never acknowledged; returns how many acknowledged ones are missing."""
        missing = 0
        for segment in self.segments:
            file = self._files.get(self.path(segment))
            if file.size > segment.size:
                file.truncate(segment.size)
            elif file.size < segment.size:
                missing += segment.size - file.size
                segment.size = self._whole(segment, file.size)
                file.truncate(segment.size)
        return missing

    def _whole(self, segment: Segment, size: int) -> int:
        end = 0
        for found, _ in Walk(self._files.get(self.path(segment)), 0, size):
            end = found.position + found.size
        return end

    def known(self) -> list[SegmentKnown]:
        return [
            SegmentKnown(self.number, s.base_offset, s.end_offset, s.size, s.timestamp_max_ms)
            for s in self.segments
        ]


class Walk:
    """The batches of a segment from a position on, with their last offsets."""

    def __init__(self, file: File, position: int, end: int) -> None:
        self._file = file
        self._position = position
        self._end = end
        self._chunk = b""
        self._chunk_at = position

    def __iter__(self) -> Walk:
        return self

    def __next__(self) -> tuple[Found, int]:
        at = self._position - self._chunk_at
        if at + batch_format.HEADER_BYTES > len(self._chunk):
            left = self._end - self._position
            if left < batch_format.HEADER_BYTES:
                raise StopIteration
            self._chunk = self._file.read(self._position, min(_CHUNK_BYTES, left))
            self._chunk_at, at = self._position, 0
            if len(self._chunk) < batch_format.HEADER_BYTES:
                raise StopIteration
        base_offset, length = _OFFSET_AND_LENGTH.unpack_from(self._chunk, at)
        size = length + batch_format.LENGTH_FROM
        found = Found(base_offset, self._position, size)
        if size < batch_format.HEADER_BYTES or self._position + size > self._end:
            raise StopIteration
        self._position += size
        (delta,) = _I32.unpack_from(self._chunk, at + _DELTA_AT)
        return found, base_offset + delta
