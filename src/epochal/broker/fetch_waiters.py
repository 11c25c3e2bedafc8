"""`FetchWaiters`: fetch requests that wait for more records.

A waiting fetch is counted down by the bytes that its partitions grow by, and is answered once: when
there are enough of them, or when its time is up. A partition without a waiting fetch costs one
look-up in a dictionary.
"""

from __future__ import annotations

from collections.abc import Callable

from epochal.broker.core.partitions import Partition


class FetchWaiter:
    __slots__ = ("is_committed", "missing", "offsets", "wake")

    def __init__(
        self,
        offsets: dict[int, int],
        missing: int,
        wake: Callable[[], None],
        *,
        is_committed: bool,
    ) -> None:
        self.offsets = offsets
        """Partition number → the offset to read from."""
        self.missing = missing
        """Bytes, until the request's minimum is reached."""
        self.wake = wake
        self.is_committed = is_committed
        """Whether it reads up to the last stable offset only."""


class FetchWaiters:
    def __init__(self) -> None:
        self._at: dict[int, list[FetchWaiter]] = {}
        self._ready: list[FetchWaiter] = []

    def add(self, waiter: FetchWaiter) -> None:
        for number in waiter.offsets:
            self._at.setdefault(number, []).append(waiter)

    def grown(self, partition: Partition, size: int) -> None:
        """A partition has grown by so many bytes."""
        waiters = self._at.get(partition.number)
        if waiters is None:
            return
        for waiter in waiters:
            if waiter.is_committed and partition.stable_end <= waiter.offsets[partition.number]:
                continue
            if waiter.missing > 0:
                waiter.missing -= size
                if waiter.missing <= 0:
                    self._ready.append(waiter)

    def removed(self, partition: Partition) -> None:
        """A partition was deleted: fetches that wait for it are answered now."""
        for waiter in self._at.get(partition.number, ()):
            if waiter.missing > 0:
                waiter.missing = 0
                self._ready.append(waiter)

    def remove(self, waiter: FetchWaiter) -> None:
        for number in waiter.offsets:
            waiters = self._at.get(number)
            if waiters is None or waiter not in waiters:
                continue
            waiters.remove(waiter)
            if not waiters:
                del self._at[number]

    def wake_ready(self) -> None:
        """Answer the fetches for which there is enough."""
        while self._ready:
            ready, self._ready = self._ready, []
            for waiter in ready:
                self.remove(waiter)
                waiter.wake()
