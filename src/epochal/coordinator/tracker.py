"""
What an operator may ask about epochs: phases, rows, bytes, how long each phase took.

Figures of a bounded number of epochs are kept; counters run from the start of this driver.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from epochal.contract import Clock
from epochal.protocol.machine import Phase
from epochal.terms import EpochNumber, Receipts, SinkName

EPOCHS_KEPT = 1000
_SAMPLES_KEPT = 1024


@dataclass(slots=True, kw_only=True)
class SinkFigures:
    rows: int = 0
    bytes: int = 0
    phase: Phase = Phase.ACTIVE


@dataclass(slots=True, kw_only=True)
class EpochFigures:
    """One epoch as this driver saw it."""

    epoch: EpochNumber
    phase: Phase
    opened_at: float
    finished_at: float | None = None
    sinks: dict[SinkName, SinkFigures] = field(default_factory=dict)
    seconds: dict[Phase, float] = field(default_factory=dict)
    """How long the epoch stayed in each phase."""

    @property
    def rows(self) -> int:
        return sum(sink.rows for sink in self.sinks.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    count: int
    avg_s: float
    max_s: float
    p50_s: float
    p99_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    commits: int
    aborts: int
    commit_failures: int
    rows: int
    bytes: int
    latency: Mapping[Phase, Latency]

    @property
    def success_rate(self) -> float:
        """Epochs committed of those that ended; 1.0 before the first."""
        ended = self.commits + self.aborts + self.commit_failures
        return self.commits / ended if ended else 1.0


class _Samples:
    """Durations of one phase: all for the mean and the maximum, the newest for quantiles."""

    def __init__(self) -> None:
        self.count = 0
        self.sum_s = 0.0
        self.max_s = 0.0
        self.recent_s: deque[float] = deque(maxlen=_SAMPLES_KEPT)

    def add(self, seconds: float) -> None:
        self.count += 1
        self.sum_s += seconds
        self.max_s = max(self.max_s, seconds)
        self.recent_s.append(seconds)

    def latency(self) -> Latency:
        ordered = sorted(self.recent_s)
        return Latency(
            count=self.count,
            avg_s=self.sum_s / self.count,
            max_s=self.max_s,
            p50_s=_quantile(ordered, 0.50),
            p99_s=_quantile(ordered, 0.99),
        )


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


class Tracker:
    """Written by one coordinator, read from any thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._epochs: deque[EpochFigures] = deque(maxlen=EPOCHS_KEPT)
        self._samples: dict[Phase, _Samples] = {}
        self._entered_s = 0.0
        self._commits = self._aborts = self._commit_failures = self._rows = self._bytes = 0

    def enter(self, epoch: EpochNumber, phase: Phase) -> None:
        with self._lock:
            now_s = self._clock.monotonic()
            if phase is Phase.ACTIVE or not self._epochs or self._epochs[-1].epoch != epoch:
                opened = EpochFigures(epoch=epoch, phase=phase, opened_at=self._clock.now())
                self._epochs.append(opened)
            else:
                self._leave(self._epochs[-1], now_s)
            self._entered_s = now_s
            self._arrive(self._epochs[-1], phase)

    def prepared(self, receipts: Receipts) -> None:
        with self._lock:
            for sink, some in receipts.items():
                self._epochs[-1].sinks[sink] = SinkFigures(
                    rows=sum(receipt.rows for receipt in some),
                    bytes=sum(receipt.bytes for receipt in some),
                    phase=Phase.PREPARED,
                )

    def sink_committed(self, sink: SinkName) -> None:
        with self._lock:
            self._epochs[-1].sinks.setdefault(sink, SinkFigures()).phase = Phase.COMMITTED

    def last_epochs(self, count: int = EPOCHS_KEPT) -> Sequence[EpochFigures]:
        """The newest epochs, oldest first."""
        with self._lock:
            return tuple(self._epochs)[-count:]

    def metrics(self) -> Metrics:
        with self._lock:
            return Metrics(
                commits=self._commits,
                aborts=self._aborts,
                commit_failures=self._commit_failures,
                rows=self._rows,
                bytes=self._bytes,
                latency={phase: some.latency() for phase, some in self._samples.items()},
            )

    def _leave(self, figures: EpochFigures, now_s: float) -> None:
        spent_s = now_s - self._entered_s
        figures.seconds[figures.phase] = figures.seconds.get(figures.phase, 0.0) + spent_s
        self._samples.setdefault(figures.phase, _Samples()).add(spent_s)

    def _arrive(self, figures: EpochFigures, phase: Phase) -> None:
        figures.phase = phase
        if phase is Phase.COMMITTED:
            self._commits += 1
            self._rows += figures.rows
            self._bytes += sum(sink.bytes for sink in figures.sinks.values())
        elif phase is Phase.ABORTED:
            self._aborts += 1
        elif phase is Phase.FAILED:
            self._commit_failures += 1
        if phase in (Phase.COMMITTED, Phase.ABORTED, Phase.FAILED):
            figures.finished_at = self._clock.now()
