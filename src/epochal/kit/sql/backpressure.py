"""Backpressure: latencies and errors of the target decide how fast a task sends.

Four paces: continue, slow (a short wait before the next block), pause (a long one), drop. Drop
never loses a row: the epoch fails with `Backpressure`, is aborted, and is tried again whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from epochal.errors import Backpressure


class Pace(Enum):
    CONTINUE = "continue"
    SLOW = "slow"
    PAUSE = "pause"
    DROP = "drop"


@dataclass(frozen=True, slots=True)
class Advice:
    pace: Pace
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PressureLimits:
    """When a target counts as slow. A block is a few megabytes: milliseconds on a healthy one."""

    slow_above_s: float = 2.0
    """A block that takes longer, on average, makes the task wait before the next one."""
    pause_above_s: float = 10.0
    """The same, for longer."""
    drop_above_s: float = 120.0
    """The epoch is given up, and tried again."""
    slow_wait_s: float = 0.2
    pause_wait_s: float = 2.0
    lock_waits_max: int = 3
    """So many lock waits without a block between them give the epoch up."""
    errors_max: int = 5
    """So many errors without a block between them do so too."""


DEFAULT_PRESSURE = PressureLimits()
_WEIGHT_OF_NEWEST = 0.5


class Pressure:
    """Keeps a moving mean of latencies, and counts errors and lock waits since the last success."""

    def __init__(self, limits: PressureLimits = DEFAULT_PRESSURE) -> None:
        self._limits = limits
        self._latency_s = 0.0
        self._errors = 0
        self._lock_waits = 0

    def sent(self, took_s: float) -> None:
        known = self._latency_s or took_s
        self._latency_s = _WEIGHT_OF_NEWEST * took_s + (1 - _WEIGHT_OF_NEWEST) * known
        self._errors = self._lock_waits = 0

    def failed(self, *, is_lock_wait: bool = False) -> None:
        self._errors += 1
        self._lock_waits += is_lock_wait

    def decide(self) -> Advice:
        """What the task may do now; raises `Backpressure` where that is to drop."""
        advice = self._advice()
        if advice.pace is Pace.DROP:
            raise Backpressure(
                f"the target takes {self._latency_s:.1f} s per block, with {self._errors} errors "
                f"and {self._lock_waits} lock waits in a row: more than it may",
                "nothing is lost: the epoch is tried again; find out what keeps the target busy",
            )
        return advice

    def _advice(self) -> Advice:
        limits = self._limits
        too_many = self._lock_waits >= limits.lock_waits_max or self._errors >= limits.errors_max
        if too_many or self._latency_s > limits.drop_above_s:
            return Advice(Pace.DROP)
        if self._lock_waits or self._latency_s > limits.pause_above_s:
            return Advice(Pace.PAUSE, limits.pause_wait_s)
        if self._errors or self._latency_s > limits.slow_above_s:
            return Advice(Pace.SLOW, limits.slow_wait_s)
        return Advice(Pace.CONTINUE)
