"""An object that is read piece by piece, as a file."""

from __future__ import annotations

import io
from typing import IO, Any, Protocol, cast

_READ_BYTES = 4 * 1024 * 1024


class Ranged(Protocol):
    @property
    def root(self) -> str: ...

    def size(self, key: str) -> int | None: ...

    def read_range(self, key: str, start: int, end: int) -> bytes: ...


def opened(store: Ranged, key: str) -> IO[bytes]:
    size = store.size(key)
    if size is None:
        raise FileNotFoundError(f"{store.root}/{key}")
    return cast("IO[bytes]", io.BufferedReader(_Ranges(store, key, size), _READ_BYTES))


class _Ranges(io.RawIOBase):
    def __init__(self, store: Ranged, key: str, size: int) -> None:
        super().__init__()
        self._store = store
        self._key = key
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        end = min(self._at + len(buffer), self._size)
        if end <= self._at:
            return 0
        content = self._store.read_range(self._key, self._at, end)
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)
