"""The listener that feeds metrics: counters at the end of an epoch, gauges at each scrape."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from epochal.coordinator import EpochFigures, InDoubtFigures, Tracker, Trouble
from epochal.protocol.machine import Phase
from epochal.protocol.state import State
from epochal.telemetry.instruments import Meters
from epochal.terms import SinkName

_UNSETTLED = frozenset({Phase.DECIDED, Phase.COMMITTING, Phase.FAILED})
_OPEN = frozenset({Phase.PREPARING, Phase.PREPARED, Phase.DECIDED, Phase.COMMITTING})
_KAFKA = "kafka"


class MetricsListener:
    """Sends the measurements of one driver to any number of meters."""

    def __init__(
        self,
        tracker: Tracker,
        meters: Sequence[Meters],
        *,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._tracker = tracker
        self._meters = tuple(meters)
        self._now = now
        self._pipeline = ""
        self._generation = 0
        self._watched: list[tuple[str, tuple[str, ...]]] = []

    def claimed(self, state: State) -> None:
        self._unwatch()
        self._pipeline, self._generation = state.pipeline, state.generation
        for outcome in (Phase.COMMITTED, Phase.ABORTED, Phase.FAILED):
            # A rate is visible only if the series exists before the first event.
            self._add("epochal_epochs_total", (outcome.value,), 0)
        self._watch("epochal_generation", (), lambda: float(self._generation))
        self._watch("epochal_decided_unsettled", (), self._unsettled)
        self._watch("epochal_last_epoch", (), self._last_epoch)
        for sink, described in state.sinks.items():
            self._watch("epochal_in_doubt", (sink,), self._doubt_gauge(sink, _count))
            self._watch(
                "epochal_oldest_in_doubt_seconds", (sink,), self._doubt_gauge(sink, self._age_s)
            )
            if described.get("kind") == _KAFKA:
                self._watch("epochal_kafka_lso_pinned_seconds", (sink,), self._pinned_gauge(sink))

    def troubled(self, trouble: Trouble) -> None:
        self._add("epochal_errors_total", (trouble.code,), 1)

    def ended(self, epoch: EpochFigures) -> None:
        self._add("epochal_epochs_total", (epoch.phase.value,), 1)
        for phase, spent_s in epoch.seconds.items():
            self._observe(("", phase.value), spent_s)
        for sink, figures in epoch.sinks.items():
            for phase, spent_s in figures.seconds.items():
                self._observe((sink, phase.value), spent_s)
            if epoch.phase is Phase.COMMITTED:
                self._add("epochal_rows_total", (sink,), figures.rows)
                self._add("epochal_bytes_total", (sink,), figures.bytes)

    def close(self) -> None:
        self._unwatch()

    # To every meter

    def _add(self, name: str, labels: tuple[str, ...], amount: float) -> None:
        for meters in self._meters:
            meters.add(name, (self._pipeline, *labels), amount)

    def _observe(self, labels: tuple[str, ...], seconds: float) -> None:
        for meters in self._meters:
            meters.observe("epochal_phase_seconds", (self._pipeline, *labels), seconds)

    def _watch(self, name: str, labels: tuple[str, ...], read: Callable[[], float]) -> None:
        whole = (self._pipeline, *labels)
        self._watched.append((name, whole))
        for meters in self._meters:
            meters.watch(name, whole, read)

    def _unwatch(self) -> None:
        for name, labels in self._watched:
            for meters in self._meters:
                meters.unwatch(name, labels)
        self._watched = []

    # Values of gauges

    def _unsettled(self) -> float:
        figures = self._tracker.current()
        return float(figures is not None and figures.phase in _UNSETTLED)

    def _last_epoch(self) -> float:
        figures = self._tracker.current()
        return -1.0 if figures is None else float(figures.epoch)

    def _doubt_gauge(
        self, sink: SinkName, value: Callable[[InDoubtFigures], float]
    ) -> Callable[[], float]:
        def read() -> float:
            found = self._tracker.in_doubt().get(sink)
            return 0.0 if found is None else value(found)

        return read

    def _age_s(self, found: InDoubtFigures) -> float:
        return 0.0 if found.oldest_since is None else max(0.0, self._now() - found.oldest_since)

    def _pinned_gauge(self, sink: SinkName) -> Callable[[], float]:
        """From its first row to its end, an open transaction blocks read_committed consumers."""

        def read() -> float:
            figures = self._tracker.current()
            if figures is None or figures.phase not in _OPEN:
                return 0.0
            of_sink = figures.sinks.get(sink)
            if of_sink is not None and of_sink.phase is Phase.COMMITTED:
                return 0.0
            return max(0.0, self._now() - figures.entered_at.get(Phase.PREPARING, self._now()))

        return read


def _count(found: InDoubtFigures) -> float:
    return float(found.count)


def measure(tracker: Tracker, meters: Iterable[Meters]) -> None:
    """Send the events of a tracker to meters, if there are any."""
    chosen = tuple(meters)
    if chosen:
        tracker.listen(MetricsListener(tracker, chosen))
