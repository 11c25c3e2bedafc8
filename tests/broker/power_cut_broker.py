"""A broker whose files forget at a SIGKILL what was not synced, as they do when the power goes.

Appended bytes stay in this process until they are synced. Run as `python -m epochal.broker` is.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from epochal.broker import server
from epochal.broker.__main__ import main
from epochal.broker.storage.disk import RealDisk, RealFile
from epochal.kafka.primitives import Part


class ForgetfulFile:
    def __init__(self, file: RealFile, pending: bytearray) -> None:
        self._file = file
        self._pending = pending

    @property
    def size(self) -> int:
        return self._file.size + len(self._pending)

    def append(self, parts: Sequence[Part]) -> None:
        for part in parts:
            self._pending += part

    def read(self, at: int, size: int) -> bytes:
        written = self._file.read(at, size)
        start = max(at - self._file.size, 0)
        return written + bytes(self._pending[start : start + size - len(written)])

    descriptor = None

    def sync(self) -> None:
        self._file.append([bytes(self._pending)])
        self._pending.clear()
        self._file.sync()

    def truncate(self, size: int) -> None:
        self.sync()
        self._file.truncate(size)

    def close(self) -> None:
        self._file.close()


class ForgetfulDisk(RealDisk):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._pending: dict[str, bytearray] = {}

    def open(self, path: str) -> ForgetfulFile:
        return ForgetfulFile(super().open(path), self._pending.setdefault(path, bytearray()))

    def read_all(self, path: str) -> bytes:
        return super().read_all(path) + bytes(self._pending.get(path, b""))

    def remove(self, path: str) -> None:
        self._pending.pop(path, None)
        super().remove(path)


if __name__ == "__main__":
    server.RealDisk = ForgetfulDisk  # type: ignore[misc]
    sys.exit(main())
