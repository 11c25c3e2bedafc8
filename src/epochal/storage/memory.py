"""A store in this process: the shortest correct one, and the measure of the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from epochal.storage.store import Entry, checked, gone


class MemoryStore:
    """For tests, simulation and sessions whose targets end with the process, as this store does."""

    def __init__(self, location: str = "memory") -> None:
        self._location = location
        self._contents: dict[str, tuple[bytes, float]] = {}
        self._others: dict[str, MemoryStore] = {}
        self._lock = threading.Lock()

    @property
    def location(self) -> str:
        return self._location

    def put(self, key: str, content: bytes) -> None:
        with self._lock:
            self._contents[checked(key)] = (bytes(content), time.time())

    def put_if_absent(self, key: str, content: bytes) -> bool:
        with self._lock:
            created = (bytes(content), time.time())
            return self._contents.setdefault(checked(key), created) is created

    def read(self, key: str) -> bytes | None:
        with self._lock:
            found = self._contents.get(checked(key))
        return None if found is None else found[0]

    def read_range(self, key: str, start: int, end: int) -> bytes:
        found = self.read(key)
        if found is None:
            raise gone(self.location, key)
        return found[start:end]

    def names(self, folder: str = "", after: str = "") -> Sequence[str]:
        return sorted(rest for rest in self._below(folder) if "/" not in rest and rest > after)

    def folders(self, folder: str = "") -> Sequence[str]:
        return sorted({rest.partition("/")[0] for rest in self._below(folder) if "/" in rest})

    def entries(self, folder: str = "") -> Sequence[Entry]:
        keys = [f"{folder}/{name}" if folder else name for name in self.names(folder)]
        return [found for key in keys if (found := self.entry(key)) is not None]

    def entry(self, key: str) -> Entry | None:
        with self._lock:
            found = self._contents.get(checked(key))
        if found is None:
            return None
        return Entry(name=key.rpartition("/")[2], size=len(found[0]), modified_at=found[1])

    def delete(self, keys: Sequence[str]) -> None:
        with self._lock:
            for key in keys:
                self._contents.pop(checked(key), None)

    def beside(self, name: str) -> MemoryStore:
        with self._lock:
            return self._others.setdefault(name, MemoryStore(f"{self._location}/{name}"))

    def close(self) -> None:
        """Nothing is open."""

    def _below(self, folder: str) -> list[str]:
        start = f"{folder}/" if folder else ""
        with self._lock:
            return [key[len(start) :] for key in self._contents if key.startswith(start)]
