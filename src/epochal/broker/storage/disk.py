"""`Disk`: the operations that storage needs of a file system."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from epochal.broker.storage.slices import Descriptor
from epochal.errors import Misconfigured
from epochal.kafka.primitives import Part

_PARTS_A_CALL = 512


class File(Protocol):
    """A file that grows at its end."""

    size: int

    def append(self, parts: Sequence[Part]) -> None:
        """Write at the end. An error leaves an unknown part of it written."""

    def read(self, at: int, size: int) -> bytes: ...

    @property
    def descriptor(self) -> Descriptor | None:
        """For a socket, which takes bytes from the file; None where that can't be done."""

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
        return self._file.read(at, size)

    @property
    def descriptor(self) -> Descriptor:
        return self._file

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
