"""One write-ahead log of everything, a frame for every tick.

A frame is a checksum, a length, a number, and the tick's entries; the checksum covers the rest. So
a tick is there as a whole or not at all: after a crash the first frame that is not whole is the
end, and nothing behind it was ever acknowledged.

Now and then a snapshot of all state begins a new journal, and the one before it is deleted. The
snapshot numbered n is what was true when the journal numbered n was empty.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

import google_crc32c

from epochal.broker.core.entries import Entry
from epochal.broker.storage import codec
from epochal.broker.storage.disk import Disk, File
from epochal.errors import CorruptRecord
from epochal.kafka.primitives import Part

FOLDER = "journal"
_FRAME = struct.Struct(">IIQ")
_SNAPSHOT = struct.Struct(">8sIQ")
_MAGIC = b"epochal1"


class Journal:
    def __init__(self, disk: Disk, number: int) -> None:
        self.number = number
        self._frames = 0
        self._file: File = disk.open(_path(number))

    @property
    def size(self) -> int:
        return self._file.size

    def write(self, parts: list[Part]) -> None:
        """All entries of a tick, at once."""
        payload = b"".join(parts)
        self._frames += 1
        head = _FRAME.pack(0, len(payload), self._frames)
        crc = google_crc32c.extend(google_crc32c.value(head[4:]), payload)
        self._file.append([_FRAME.pack(crc, len(payload), self._frames), payload])

    def sync(self) -> None:
        self._file.sync()

    def close(self) -> None:
        self._file.close()


def _path(number: int, kind: str = "log") -> str:
    return f"{FOLDER}/{number:08d}.{kind}"


def newest(disk: Disk) -> int:
    """The number to start from; 0 where there is nothing yet."""
    names = [name for name in disk.list(FOLDER) if name.endswith(".snapshot")]
    return max((int(name.partition(".")[0]) for name in names), default=0)


def write_snapshot(disk: Disk, number: int, entries: Iterable[Entry]) -> None:
    parts: list[Part] = []
    for entry in entries:
        codec.put(entry, parts)
    payload = b"".join(parts)
    head = _SNAPSHOT.pack(_MAGIC, google_crc32c.value(payload), len(payload))
    disk.replace(_path(number, "snapshot"), [head, payload])


def read_snapshot(disk: Disk, number: int) -> Iterator[Entry]:
    path = _path(number, "snapshot")
    data = disk.read_all(path)
    is_whole = len(data) >= _SNAPSHOT.size
    if is_whole:
        magic, crc, size = _SNAPSHOT.unpack_from(data)
        payload = data[_SNAPSHOT.size :]
        is_whole = magic == _MAGIC and size == len(payload) and google_crc32c.value(payload) == crc
    if not is_whole:
        raise CorruptRecord(
            f"the broker's snapshot {path} is damaged",
            hint="restore the data folder from a backup, or begin with an empty one",
        )
    return codec.read(data, _SNAPSHOT.size)


def read_frames(disk: Disk, number: int) -> Iterator[Iterator[Entry]]:
    """The ticks of a journal, up to the first that is not whole."""
    path = _path(number)
    if not disk.exists(path):
        return
    data = disk.read_all(path)
    at = 0
    frames = 0
    while at + _FRAME.size <= len(data):
        crc, size, frame_number = _FRAME.unpack_from(data, at)
        end = at + _FRAME.size + size
        frames += 1
        if end > len(data) or frame_number != frames:
            return
        if google_crc32c.value(data[at + 4 : end]) != crc:
            return
        yield codec.read(data[at + _FRAME.size : end])
        at = end


def forget_before(disk: Disk, number: int) -> None:
    for name in disk.list(FOLDER):
        if not name.startswith(f"{number:08d}."):
            disk.remove(f"{FOLDER}/{name}")
