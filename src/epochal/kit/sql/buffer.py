"""A writer's buffer: small batches are coalesced, by rows, by bytes or by time, and then sent.

Memory stays bounded whatever the size of an epoch: one block is being filled while at most one
other is on its way to the server, in a thread of its own, as drivers let go of the interpreter
while they send.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import pyarrow as pa

from epochal.kit.sql.backpressure import Pressure


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferLimits:
    rows: int
    bytes: int = 8 * 1024 * 1024
    flush_interval_s: float = 5.0
    """A block that is older than this is sent with the next batch, however small it is."""


@dataclass(slots=True)
class BufferMetrics:
    rows: int = 0
    bytes: int = 0
    blocks: int = 0
    send_s: float = 0.0
    held_back_s: float = 0.0
    """How long backpressure made the task wait."""

    def efficiency(self, limits: BufferLimits) -> float:
        """How full the blocks were, against the most that one may hold by rows or by bytes."""
        if not self.blocks:
            return 1.0
        by_rows = self.rows / (self.blocks * limits.rows)
        return max(by_rows, self.bytes / (self.blocks * limits.bytes))


class Buffer:
    """Coalesces batches into blocks and sends them, one at a time, in order."""

    def __init__(
        self,
        send: Callable[[pa.Table, int], None],
        *,
        limits: BufferLimits,
        pressure: Pressure,
        get_ready: Callable[[], object] = lambda: None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._send = send
        self._get_ready = get_ready
        self._limits = limits
        self._pressure = pressure
        self._sleep = sleep
        self._batches: list[pa.RecordBatch] = []
        self._rows = 0
        self._bytes = 0
        self._since_s = 0.0
        self._sender: ThreadPoolExecutor | None = None
        self._under_way: Future[float] | None = None
        self.metrics = BufferMetrics()
        self.is_single = False
        """All rows are in one block, which is sent last of all."""

    def add(self, batch: pa.RecordBatch) -> None:
        if not self._batches:
            self._since_s = time.monotonic()
        self._batches.append(batch)
        self._rows += batch.num_rows
        self._bytes += batch.nbytes
        if self._is_full():
            self._flush()

    def drain(self) -> None:
        """Send what is left, and wait until all of it has arrived."""
        if self._under_way is None:
            # A single block: a thread would gain nothing.
            self.is_single = True
            self._flush_here()
        else:
            self._flush()
            self._wait()
        self.close()

    def close(self) -> None:
        """End the thread, after the block that is being sent; rows not sent yet are dropped."""
        self._batches = []
        if self._sender is not None:
            self._sender.shutdown(wait=True)
            self._sender = None

    def _is_full(self) -> bool:
        return (
            self._rows >= self._limits.rows
            or self._bytes >= self._limits.bytes
            or time.monotonic() - self._since_s >= self._limits.flush_interval_s
        )

    def _take(self) -> tuple[pa.Table, int]:
        block, first = pa.Table.from_batches(self._batches), self.metrics.rows
        self.metrics.rows += self._rows
        self.metrics.bytes += self._bytes
        self.metrics.blocks += 1
        self._batches, self._rows, self._bytes = [], 0, 0
        return block, first

    def _flush(self) -> None:
        self._wait()
        if not self._batches:
            return
        if self._sender is None:
            self._sender = ThreadPoolExecutor(1, thread_name_prefix="epochal-send")
        self._under_way = self._sender.submit(self._timed, *self._take())

    def _flush_here(self) -> None:
        if self._batches:
            self.metrics.send_s += self._timed(*self._take())

    def _timed(self, block: pa.Table, first: int) -> float:
        # The time to connect is no sign of how busy the target is.
        self._get_ready()
        started = time.monotonic()
        self._send(block, first)
        return time.monotonic() - started

    def _wait(self) -> None:
        """Until the previous block has arrived, and as much longer as backpressure asks for."""
        if self._under_way is None:
            return
        took_s = self._under_way.result()
        self._under_way = None
        self.metrics.send_s += took_s
        self._pressure.sent(took_s)
        wait_s = self._pressure.decide().wait_s
        if wait_s:
            self.metrics.held_back_s += wait_s
            self._sleep(wait_s)
