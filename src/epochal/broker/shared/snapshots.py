"""A snapshot of a cluster: the state at one slot, and where the records up to there are.

    snapshots/NUMBER                            state and position, and a list of objects of records
    records/NUMBER.PARTITION.FIRST-END          batches of one partition, made for that snapshot

A snapshot names the objects of the one before and adds those of the records since; a small last one
is made again, where more has come. Its number and the offsets are in the name of an object, so what
two members write under one name is the same. A member that is new, or slept for too long, begins
from a snapshot; the slots before the last but one are deleted then (`protocol.deletable`).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from epochal.broker.core.entries import Identity, SegmentKnown, SlotTaken
from epochal.broker.storage import codec, journal
from epochal.broker.storage.checksums import crc32c
from epochal.broker.storage.disk import Disk
from epochal.errors import CorruptRecord, require_known_format
from epochal.kafka import batch_format

FORMAT = 1
OBJECT_BYTES_MAX = 4 << 20
MERGED_BELOW_BYTES = 1 << 20
"""The last object of a partition is written again, with more, while it is smaller than this."""
RECORDS = "records"
_HEAD = struct.Struct(">4sIII")
_MAGIC = b"epsn"
_BATCH = struct.Struct(">qi")
_MAX_TIMESTAMP_AT = 35
_HINT = "restore the store from a backup: see the docs on a lost journal"


class RecordObject(NamedTuple):
    """Batches of one partition in the store."""

    key: str
    partition: int
    first: int
    """Where the batches begin that this object was asked to hold."""
    end: int
    base_offset: int
    """Where the first of them begins."""
    timestamp_max_ms: int
    size: int
    crc: int

    @property
    def segment(self) -> str:
        """The file of a member that holds it."""
        return f"partitions/{self.partition:08d}/{self.base_offset:020d}.segment"


def record_object(number: int, partition: int, first: int, end: int, data: bytes) -> RecordObject:
    """Made for the snapshot of this slot."""
    batches = list(_batches(data))
    return RecordObject(
        f"{RECORDS}/{number:020d}.{partition}.{first}-{end}",
        partition,
        first,
        end,
        batches[0][0],
        max(timestamp_ms for _, timestamp_ms in batches),
        len(data),
        crc32c(data),
    )


class Snapshot(NamedTuple):
    position: SlotTaken
    state: bytes
    """Entries, as in the broker's journal."""
    objects: list[RecordObject]
    """By partition and offset."""

    @property
    def cluster_id(self) -> str:
        identities = (one for one in codec.read(self.state) if isinstance(one, Identity))
        return next(identities).cluster_id

    def encode(self) -> bytes:
        fields = [FORMAT, self.position, self.objects]
        head = json.dumps(fields, separators=(",", ":")).encode()
        sizes = (len(head), len(self.state))
        front = _HEAD.pack(_MAGIC, crc32c(head, self.state), *sizes)
        return b"".join((front, head, self.state))


def decode(number: int, data: bytes) -> Snapshot:
    if len(data) >= _HEAD.size:
        magic, crc, head_size, state_size = _HEAD.unpack_from(data)
        head = data[_HEAD.size : _HEAD.size + head_size]
        state = data[_HEAD.size + head_size :]
        if magic == _MAGIC and len(state) == state_size and crc32c(head, state) == crc:
            found, position, objects = json.loads(head)
            require_known_format(f"snapshot {number}", found, FORMAT)
            return Snapshot(SlotTaken(*position), state, [RecordObject(*row) for row in objects])
    raise CorruptRecord(f"snapshot {number} of the shared journal is damaged", _HINT)


def by_partition(objects: Iterable[RecordObject]) -> dict[int, list[RecordObject]]:
    found: dict[int, list[RecordObject]] = {}
    for one in objects:
        found.setdefault(one.partition, []).append(one)
    return found


def kept_objects(objects: Iterable[RecordObject], log_start: int, end: int) -> list[RecordObject]:
    """Those of a partition that the next snapshot goes on with: the rest is made anew."""
    kept = [one for one in objects if one.end > log_start]
    last = kept[-1] if kept else None
    if last is not None and last.size < MERGED_BELOW_BYTES and log_start <= last.first:
        return kept if last.end == end else kept[:-1]
    return kept


class Restoring:
    """
    A folder that is made from a snapshot. Its journal is removed first and written last: a folder
    that was left half-way is empty to the next start.

    Files that are there already are kept: what is at an offset is the same on all members. So a
    member that was overtaken by newer snapshots while it loaded one needs only what is new.
    """

    def __init__(self, disk: Disk, snapshot: Snapshot) -> None:
        self._disk = disk
        self._snapshot = snapshot
        for name in disk.list(journal.FOLDER):
            disk.remove(f"{journal.FOLDER}/{name}")

    def has(self, one: RecordObject) -> bool:
        if not self._disk.exists(one.segment):
            return False
        file = self._disk.open(one.segment)
        try:
            if file.size < one.size:
                return False
            if file.size > one.size:
                file.truncate(one.size)
            return crc32c(file.read(0, one.size)) == one.crc
        finally:
            file.close()

    def add(self, one: RecordObject, data: bytes) -> None:
        if len(data) != one.size or crc32c(data) != one.crc:
            raise CorruptRecord(f"{one.key} of the shared journal is damaged", _HINT)
        file = self._disk.open(one.segment)
        try:
            file.truncate(0)
            file.append([data])
            file.sync()
        finally:
            file.close()

    def finish(self) -> None:
        wanted = {one.segment for one in self._snapshot.objects}
        for partition in self._disk.list("partitions"):
            for name in self._disk.list(f"partitions/{partition}"):
                if f"partitions/{partition}/{name}" not in wanted:
                    self._disk.remove(f"partitions/{partition}/{name}")
            self._disk.sync_folder(f"partitions/{partition}")
        if wanted:
            self._disk.sync_folder("partitions")
        segments = [
            SegmentKnown(one.partition, one.base_offset, one.end, one.size, one.timestamp_max_ms)
            for one in self._snapshot.objects
        ]
        entries = [*codec.read(self._snapshot.state), *segments, self._snapshot.position]
        journal.write_snapshot(self._disk, 1, entries)


def _batches(data: bytes) -> Iterator[tuple[int, int]]:
    """Base offset and latest time of each."""
    at = 0
    while at < len(data):
        base_offset, length = _BATCH.unpack_from(data, at)
        (timestamp_ms,) = struct.unpack_from(">q", data, at + _MAX_TIMESTAMP_AT)
        yield base_offset, timestamp_ms
        at += batch_format.LENGTH_FROM + length
