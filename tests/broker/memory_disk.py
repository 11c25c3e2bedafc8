"""A disk in memory that forgets and fails on purpose.

What was written survives a crash of the process; what was not synced may be lost with the power, in
part or as a whole: bytes of a file, and the name of a new file whose folder was not synced. The
n-th change can be made to fail half-way, which is a crash at that point.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from epochal.kafka.primitives import Part


class Crash(BaseException):
    """The process is gone, in the middle of a change."""


class MemoryFile:
    def __init__(self, disk: MemoryDisk, path: str) -> None:
        self._disk = disk
        self._path = path

    @property
    def size(self) -> int:
        return len(self._disk.files[self._path])

    def append(self, parts: Sequence[Part]) -> None:
        data = b"".join(bytes(part) for part in parts)
        kept = self._disk.change(len(data))
        self._disk.files[self._path] += data[:kept]
        self._disk.after_change()

    def read(self, at: int, size: int) -> bytes:
        return bytes(self._disk.files[self._path][at : at + size])

    descriptor = None

    def sync(self) -> None:
        self._disk.change(0)
        self._disk.synced[self._path] = bytes(self._disk.files[self._path])
        self._disk.after_change()

    def truncate(self, size: int) -> None:
        self._disk.change(0)
        del self._disk.files[self._path][size:]
        self._disk.after_change()

    def close(self) -> None:
        """Nothing is held."""


class MemoryDisk:
    def __init__(self) -> None:
        self.files: dict[str, bytearray] = {}
        self.synced: dict[str, bytes] = {}
        self.named: set[str] = set()
        """Files and folders whose names are on disk."""
        self.changes = 0
        self.crash_at = -1
        self._is_crashing = False

    @property
    def folder(self) -> str:
        return "memory"

    def space(self) -> tuple[int, int]:
        return 1 << 40, 1 << 39

    def change(self, size: int) -> int:
        """Counts; how many bytes of this change still happen."""
        self.changes += 1
        if self.changes == self.crash_at:
            self._is_crashing = True
            return size // 2
        return size

    def after_change(self) -> None:
        if self._is_crashing:
            self._is_crashing = False
            raise Crash

    def open(self, path: str) -> MemoryFile:
        self.files.setdefault(path, bytearray())
        return MemoryFile(self, path)

    def exists(self, path: str) -> bool:
        return path in self.files

    def list(self, folder: str) -> list[str]:
        inside = (path[len(folder) + 1 :] for path in self.files if path.startswith(folder + "/"))
        return sorted({path.partition("/")[0] for path in inside})

    def read_all(self, path: str) -> bytes:
        return bytes(self.files[path])

    def replace(self, path: str, parts: Sequence[Part]) -> None:
        data = b"".join(bytes(part) for part in parts)
        self.change(0)
        if self._is_crashing:
            self.after_change()
        self.files[path] = bytearray(data)
        self.synced[path] = data
        self.sync_folder(path.rpartition("/")[0])

    def remove(self, path: str) -> None:
        self.change(0)
        self.files.pop(path, None)
        self.synced.pop(path, None)
        self.after_change()

    def remove_folder(self, folder: str) -> None:
        for name in self.list(folder):
            self.remove(f"{folder}/{name}")

    def sync_folder(self, folder: str) -> None:
        self.change(0)
        for path in self.files:
            parent, _, _ = path.rpartition("/")
            self.named |= {one for one in (path, parent) if one.rpartition("/")[0] == folder}
            self.named |= {one for one in (path.partition("/")[0],) if not folder}
        self.after_change()

    def is_named(self, path: str) -> bool:
        parts = path.split("/")
        return all("/".join(parts[: n + 1]) in self.named for n in range(len(parts)))

    # Crashes

    def restarted(self) -> MemoryDisk:
        """The disk as the next process finds it."""
        disk = MemoryDisk()
        disk.files = {path: bytearray(data) for path, data in self.files.items()}
        disk.synced = dict(self.synced)
        disk.named = set(self.named)
        return disk

    def after_power_loss(self, chance: random.Random) -> MemoryDisk:
        """Of what was not synced, any part may be gone."""
        disk = MemoryDisk()
        for path, data in self.files.items():
            if not self.is_named(path) and chance.random() < 0.7:
                continue
            safe = self.synced.get(path, b"")
            if bytes(data[: len(safe)]) != safe:
                disk.files[path] = bytearray(safe)
                continue
            kept = chance.randint(len(safe), len(data))
            disk.files[path] = bytearray(data[:kept])
            if kept > len(safe) and chance.random() < 0.3:
                disk.files[path][chance.randrange(len(safe), kept)] ^= 0xFF
        disk.synced = {path: bytes(data) for path, data in disk.files.items()}
        for folder in {path.rpartition("/")[0] for path in disk.files} | {"partitions", ""}:
            disk.sync_folder(folder)
        return disk

    def with_flipped_bit(self, path: str, bit: int) -> MemoryDisk:
        disk = self.restarted()
        disk.files[path][bit >> 3] ^= 1 << (bit & 7)
        return disk
