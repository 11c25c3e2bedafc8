"""One write-ahead log of everything, a frame for every tick.

A frame is a checksum, a length, two numbers, and the tick's entries; the checksum covers the rest.
So a tick is there as a whole or not at all. The numbers are the frame's own and that of the newest
frame that was synced when it was written: a frame that is not whole was

    never acknowledged   if it is the last, or if those behind it were written before it was synced:
                         the journal ends there, with a note
    acknowledged         if a frame behind it says that it was synced, or one flipped bit explains
                         it: the disk has changed it, and the broker does not start
    t 1 ✓  2 ✓  3 ✗                      power went while 3 was written: ends after 2
    t 1 ✓  2 ✗  3 ✓ (synced: 2)          2 is damaged: refused, as dropping 2 would drop 3 too

Now and then a snapshot of all state begins a new journal, and the one before it is deleted. The
snapshot numbered n is what was true when the journal numbered n was empty.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from epochal.broker.core.entries import Entry
from epochal.broker.storage import codec
from epochal.broker.storage.checksums import crc32c, is_of_one_bit, with_one_bit_flipped
from epochal.broker.storage.disk import Disk, File
from epochal.errors import CorruptRecord
from epochal.kafka.primitives import Part

FOLDER = "journal"
_FRAME = struct.Struct(">IIQq")
_NUMBER = struct.Struct(">Q")
_NUMBER_AT = 8
_SNAPSHOT = struct.Struct(">8sIQ")
_MAGIC = b"epochal2"
_NEVER = -1
"""The newest synced frame of a broker that does not sync."""
_LOOK_AHEAD = 8
"""So many frames in a row may be damaged, and the one behind them is still found."""
BACKUP_HINT = "restore the data folder from a backup, or begin with an empty one"


class Journal:
    def __init__(self, disk: Disk, number: int, *, is_synced: bool) -> None:
        self.number = number
        self._frames = 0
        self._synced = 0 if is_synced else _NEVER
        self._file: File = disk.open(_path(number))

    @property
    def size(self) -> int:
        return self._file.size

    def write(self, parts: list[Part]) -> None:
        """All entries of a tick, at once."""
        payload = b"".join(parts)
        self._frames += 1
        head = _FRAME.pack(0, len(payload), self._frames, self._synced)
        crc = crc32c(head[4:], payload)
        self._file.append([_FRAME.pack(crc, len(payload), self._frames, self._synced), payload])

    def sync(self) -> None:
        self._file.sync()
        if self._synced != _NEVER:
            self._synced = self._frames

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
    head = _SNAPSHOT.pack(_MAGIC, crc32c(payload), len(payload))
    disk.replace(_path(number, "snapshot"), [head, payload])


def read_snapshot(disk: Disk, number: int) -> Iterator[Entry]:
    path = _path(number, "snapshot")
    data = disk.read_all(path)
    is_whole = len(data) >= _SNAPSHOT.size
    if is_whole:
        magic, crc, size = _SNAPSHOT.unpack_from(data)
        payload = data[_SNAPSHOT.size :]
        is_whole = magic == _MAGIC and size == len(payload) and crc32c(payload) == crc
    if not is_whole:
        raise CorruptRecord(
            f"the broker's snapshot {path} is damaged",
            hint=BACKUP_HINT,
        )
    return codec.read(data, _SNAPSHOT.size)


class Frame(NamedTuple):
    number: int
    synced: int
    end: int
    """Where the next one begins."""
    payload: bytes

    def entries(self) -> Iterator[Entry]:
        return codec.read(self.payload)


class Frames(NamedTuple):
    """The ticks of a journal."""

    frames: list[Frame]
    synced: int
    """The newest frame that is known to have been synced, with all that it points at."""
    note: str
    """What was dropped at the end, if anything."""


def read_frames(disk: Disk, number: int) -> Frames:
    """
    The ticks of a journal, up to the first that is not whole. Raises `CorruptRecord` where that
    one was acknowledged.
    """
    path = _path(number)
    data = disk.read_all(path) if disk.exists(path) else b""
    frames: list[Frame] = []
    at = 0
    while (frame := _frame_at(data, at)) is not None and frame.number == len(frames) + 1:
        frames.append(frame)
        at = frame.end
    note = ""
    if at < len(data):
        _check_end(path, data, at, len(frames) + 1)
        note = f"{path} ends in {len(data) - at} bytes of ticks that were never acknowledged"
    synced = max((frame.synced for frame in frames), default=_NEVER)
    return Frames(frames, synced, note)


def _frame_at(data: bytes, at: int) -> Frame | None:
    if at + _FRAME.size > len(data):
        return None
    crc, size, number, synced = _FRAME.unpack_from(data, at)
    end = at + _FRAME.size + size
    if end > len(data):
        return None
    payload = data[at + _FRAME.size : end]
    if crc32c(data[at + 4 : at + _FRAME.size], payload) != crc:
        return None
    return Frame(number, synced, end, payload)


def _check_end(path: str, data: bytes, at: int, number: int) -> None:
    """Raises where the frame that should be here was acknowledged."""
    later = _later_frame(data, at, number)
    is_unsynced = later is not None and 0 <= later.synced < number
    if not is_unsynced and (later is not None or _is_one_bit_off(data[at:])):
        raise CorruptRecord(
            f"the broker's journal {path} is damaged at byte {at} (tick {number})",
            hint=BACKUP_HINT,
        )


def _later_frame(data: bytes, at: int, number: int) -> Frame | None:
    """The next whole frame behind one that is not: found by its number, as lengths may be wrong."""
    for wanted in range(number + 1, number + 1 + _LOOK_AHEAD):
        pattern = _NUMBER.pack(wanted)
        found = data.find(pattern, at)
        while found >= 0:
            frame = _frame_at(data, found - _NUMBER_AT) if found >= at + _NUMBER_AT else None
            if frame is not None and frame.number == wanted:
                return frame
            found = data.find(pattern, found + 1)
    return None


def _is_one_bit_off(data: bytes) -> bool:
    """Whether the frame at the start of `data` is whole but for one flipped bit."""
    head, behind = data[: _FRAME.size], data[_FRAME.size :]
    if len(head) < _FRAME.size:
        return False
    for changed in with_one_bit_flipped(head):
        crc, size, *_ = _FRAME.unpack(changed)
        if size <= len(behind) and crc32c(changed[4:], behind[:size]) == crc:
            return True
    crc, size, *_ = _FRAME.unpack(head)
    return size <= len(behind) and is_of_one_bit(crc ^ crc32c(head[4:], behind[:size]), size)


def forget_before(disk: Disk, number: int) -> None:
    for name in disk.list(FOLDER):
        if not name.startswith(f"{number:08d}."):
            disk.remove(f"{FOLDER}/{name}")
