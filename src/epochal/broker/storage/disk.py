"""`Disk`: the operations that storage needs of a file system."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from epochal.errors import Misconfigured
from epochal.kafka.primitives import Part, Records

_PARTS_A_CALL = 512
_SLICE_BYTES_MIN = 1 << 17
"""Fewer bytes are read and sent with the rest of the answer."""


class File(Protocol):
    """A file that grows at its end."""

    size: int

    def append(self, parts: Sequence[Part]) -> None:
        """Write at the end. An error leaves an unknown part of it written."""

    def read(self, at: int, size: int) -> bytes: ...

    def part(self, at: int, size: int) -> Records | FileSlice:
        """The same bytes for a socket, which may take them from the file."""

    def sync(self) -> None:
        """After it, everything appended so far survives a power cut."""

    def truncate(self, size: int) -> None: ...

    def close(self) -> None: ...


class Disk(Protocol):
    """Paths are relative to the data folder, with `/` between their parts."""

    @property
    def folder(self) -> str: ...

    def space(self) -> tuple[int, int]:
        """Bytes in all and bytes that are free."""

    def open(self, path: str) -> File:
        """The file, made if it is not there."""

    def exists(self, path: str) -> bool: ...

    def list(self, folder: str) -> list[str]: ...

    def read_all(self, path: str) -> bytes: ...

    def replace(self, path: str, parts: Sequence[Part]) -> None:
        """The file has exactly this content, durably, or is as it was."""

    def remove(self, path: str) -> None: ...

    def remove_folder(self, folder: str) -> None: ...

    def sync_folder(self, folder: str) -> None: ...


class Descriptor:
    """A file descriptor that is closed when nobody holds it any more."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


class FileSlice:
    """Bytes of a file that are still to be sent; the file may be removed meanwhile."""

    __slots__ = ("_at", "_file", "_left")

    def __init__(self, file: Descriptor, at: int, size: int) -> None:
        self._file, self._at, self._left = file, at, size

    def __len__(self) -> int:
        return self._left

    def send(self, socket_fd: int, size: int) -> int:
        """Let the kernel copy up to `size` of them; returns how many. Raises `OSError`."""
        size = min(size, self._left)
        return self._taken(os.sendfile(socket_fd, self._file.fd, self._at, size))

    def take(self, size: int) -> bytes:
        """Read some of them instead. Raises `OSError`."""
        data = os.pread(self._file.fd, min(size, self._left), self._at)
        self._taken(len(data))
        return data

    def take_all(self) -> bytes:
        parts = []
        while self._left:
            parts.append(self.take(self._left))
        return b"".join(parts)

    def _taken(self, size: int) -> int:
        if not size:
            raise OSError(errno.ENODATA, "a segment is shorter than it was")
        self._at += size
        self._left -= size
        return size


class RealFile:
    def __init__(self, path: Path) -> None:
        self._file = Descriptor(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        self._fd = self._file.fd
        self.size = os.fstat(self._fd).st_size

    def append(self, parts: Sequence[Part]) -> None:
        left = list(parts)
        while left:
            written = os.pwritev(self._fd, left[:_PARTS_A_CALL], self.size)
            self.size += written
            while left and written >= len(left[0]):
                written -= len(left.pop(0))
            if written:
                left[0] = memoryview(left[0])[written:]

    def read(self, at: int, size: int) -> bytes:
        return os.pread(self._fd, size, at)

    def part(self, at: int, size: int) -> Records | FileSlice:
        if size < _SLICE_BYTES_MIN:
            return self.read(at, size)
        return FileSlice(self._file, at, size)

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def truncate(self, size: int) -> None:
        os.ftruncate(self._fd, size)
        self.size = size

    def close(self) -> None:
        """Slices that are still to be sent keep it open."""
        del self._file


class RealDisk:
    """A folder of this machine, held by one process at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise Misconfigured(
                f"another broker uses {folder}", hint="stop it, or choose another --data"
            ) from None

    def close(self) -> None:
        os.close(self._lock)

    @property
    def folder(self) -> str:
        return str(self._folder.resolve())

    def space(self) -> tuple[int, int]:
        found = os.statvfs(self._folder)
        return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize

    def open(self, path: str) -> RealFile:
        place = self._folder / path
        try:
            return RealFile(place)
        except FileNotFoundError:
            place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            return RealFile(place)

    def exists(self, path: str) -> bool:
        return (self._folder / path).exists()

    def list(self, folder: str) -> list[str]:
        try:
            return sorted(place.name for place in (self._folder / folder).iterdir())
        except FileNotFoundError:
            return []

    def read_all(self, path: str) -> bytes:
        return (self._folder / path).read_bytes()

    def replace(self, path: str, parts: Sequence[Part]) -> None:
        place = self._folder / path
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fresh = place.with_name(place.name + ".new")
        fresh.unlink(missing_ok=True)
        file = RealFile(fresh)
        try:
            file.append(parts)
            file.sync()
        finally:
            file.close()
        fresh.replace(place)
        self.sync_folder(path.rpartition("/")[0])

    def remove(self, path: str) -> None:
        (self._folder / path).unlink(missing_ok=True)

    def remove_folder(self, folder: str) -> None:
        for name in self.list(folder):
            self.remove(f"{folder}/{name}")
        try:
            (self._folder / folder).rmdir()
        except FileNotFoundError:
            return

    def sync_folder(self, folder: str) -> None:
        fd = os.open(self._folder / folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
