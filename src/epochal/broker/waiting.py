"""Readers that wait for more to read.

A waiting reader is counted down by the bytes that its partitions grow by, and is looked at again
once: when there are enough of them, or when its time is up. Partitions that nobody waits at cost a
look-up in a dictionary.
"""

from __future__ import annotations

from collections.abc import Callable

from epochal.broker.core.partitions import Partition


class Waiter:
    __slots__ = ("is_committed", "missing", "places", "wake")

    def __init__(
        self,
        places: dict[int, int],
        missing: int,
        wake: Callable[[], None],
        *,
        is_committed: bool,
    ) -> None:
        self.places = places
        """Partition number → the offset it would read from."""
        self.missing = missing
        """Bytes, until it is worth an answer."""
        self.wake = wake
        self.is_committed = is_committed
        """Whether it reads up to the last stable offset only."""


class Waiting:
    def __init__(self) -> None:
        self._at: dict[int, list[Waiter]] = {}
        self._ready: list[Waiter] = []

    def add(self, waiter: Waiter) -> None:
        for number in waiter.places:
            self._at.setdefault(number, []).append(waiter)

    def moved(self, partition: Partition, size: int) -> None:
        """A partition has grown by so many bytes."""
        waiters = self._at.get(partition.number)
        if waiters is None:
            return
        for waiter in waiters:
            if waiter.is_committed and partition.stable_end <= waiter.places[partition.number]:
                continue
            if waiter.missing > 0:
                waiter.missing -= size
                if waiter.missing <= 0:
                    self._ready.append(waiter)

    def gone(self, partition: Partition) -> None:
        """A partition is no more: whoever waits at it is to hear so, however little there is."""
        for waiter in self._at.get(partition.number, ()):
            if waiter.missing > 0:
                waiter.missing = 0
                self._ready.append(waiter)

    def remove(self, waiter: Waiter) -> None:
        for number in waiter.places:
            waiters = self._at.get(number)
            if waiters is None or waiter not in waiters:
                continue
            waiters.remove(waiter)
            if not waiters:
                del self._at[number]

    def wake_ready(self) -> None:
        """Look at those for whom there is enough."""
        while self._ready:
            ready, self._ready = self._ready, []
            for waiter in ready:
                self.remove(waiter)
                waiter.wake()
