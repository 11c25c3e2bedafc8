"""An epoch log in this process: the shortest correct one, and the measure of the others."""

from __future__ import annotations

import threading
from collections.abc import Sequence


class MemoryLog:
    """For tests, simulation and sessions whose targets end with the process, as this log does."""

    place = "memory"

    def __init__(self) -> None:
        self._records: dict[int, bytes] = {}
        self._lock = threading.Lock()

    def put_if_absent(self, number: int, record: bytes) -> bool:
        with self._lock:
            if number in self._records:
                return False
            self._records[number] = record
            return True

    def numbers(self) -> Sequence[int]:
        with self._lock:
            return sorted(self._records)

    def read(self, number: int) -> bytes | None:
        with self._lock:
            return self._records.get(number)

    def delete(self, numbers: Sequence[int]) -> None:
        with self._lock:
            for number in numbers:
                self._records.pop(number, None)

    def close(self) -> None:
        """Nothing to let go."""
