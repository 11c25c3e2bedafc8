"""The clock that the coordinator and others are given, and `SystemClock`, that of this machine."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Time as a dependency: a simulation gives another."""

    def now(self) -> float:
        """Seconds since 1970: for people."""

    def monotonic(self) -> float:
        """Seconds that never go back: for waits and latencies."""

    def sleep(self, seconds: float) -> None: ...


class SystemClock:
    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
