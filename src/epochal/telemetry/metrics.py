"""The listener that feeds metrics: counters at the end of an epoch, gauges at each scrape."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from types import MappingProxyType
from typing import TypeAlias

from epochal.contract import Room
from epochal.coordinator import EpochFigures, InDoubtFigures, Retry, Tracker, Trouble
from epochal.coordinator.tracker import ENDS, KeptFigures
from epochal.errors import error_classes
from epochal.protocol.machine import Phase
from epochal.protocol.state import State
from epochal.telemetry.health import Condition, Facts, Health, Liveness, Pending, health_of
from epochal.telemetry.history import heartbeat
from epochal.telemetry.history_writer import FLUSH_EVERY_S
from epochal.telemetry.instruments import Meters
from epochal.terms import SinkName

_UNSETTLED = frozenset({Phase.DECIDED, Phase.COMMITTING, Phase.FAILED})
_OPEN = frozenset({Phase.PREPARING, Phase.PREPARED, Phase.DECIDED, Phase.COMMITTING})
_KAFKA = "kafka"
_USED: Callable[[Room], int] = attrgetter("used_bytes")
_SPOOL = MappingProxyType({"epochal_spool_bytes": _USED})
_ROOM: Mapping[str, Mapping[str, Callable[[Room], int]]] = {
    "postgres": {
        "epochal_staging_bytes": _USED,
        "epochal_staging_bytes_max": attrgetter("limit_bytes"),
    },
    "http": _SPOOL,
    "callback": _SPOOL,
    "kafka": _SPOOL,
}
"""What is measured of the room for prepared rows, by the kind of sink."""


Labels: TypeAlias = tuple[str, ...]
Read: TypeAlias = Callable[[], float]

_guard = threading.Lock()
_readers: dict[tuple[Meters, str, Labels], list[Read]] = {}
"""
By gauge, the drivers of this process that it may be read from; it is read from the newest. A load
may run beside the query of its pipeline, under the same labels.
"""


def _watch(meters: Meters, name: str, labels: Labels, read: Read) -> None:
    with _guard:
        _readers.setdefault((meters, name, labels), []).append(read)
        meters.watch(name, labels, read)


def _unwatch(meters: Meters, name: str, labels: Labels, read: Read) -> None:
    with _guard:
        readers = _readers[meters, name, labels]
        readers.remove(read)
        if readers:
            meters.watch(name, labels, readers[-1])
        else:
            del _readers[meters, name, labels]
            meters.unwatch(name, labels)


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
        self._state: State | None = None
        self._watched: list[tuple[str, Labels, Read]] = []

    def claimed(self, state: State) -> None:
        self._unwatch()
        self._pipeline, self._state = state.pipeline, state
        self._begin_counters(state)
        self._watch("epochal_generation", (), lambda: float(state.generation))
        self._watch("epochal_heartbeat_timestamp_seconds", (), self._now)
        self._watch("epochal_decided_unsettled", (), self._unsettled)
        self._watch("epochal_last_epoch", (), self._last_epoch)
        self._watch("epochal_last_decided_timestamp_seconds", (), self._last_decided)
        for place in ("log", "history"):
            self._watch("epochal_kept", (place,), self._kept_gauge(place, attrgetter("count")))
            self._watch(
                "epochal_kept_limit", (place,), self._kept_gauge(place, attrgetter("limit"))
            )
        self._watch("epochal_input_rows_per_second", (), self._input_rate)
        self._watch("epochal_source_behind", (), self._behind)
        for health in Health:
            self._watch("epochal_health", (health.value,), self._health_gauge(health))
        for phase in Phase:
            self._watch("epochal_phase_age_seconds", (phase.value,), self._phase_gauge(phase))
        for sink, described in state.sinks.items():
            given_up = sum(one.sink == sink for one in state.given_up)
            self._watch("epochal_given_up_epochs", (sink,), partial(float, given_up))
            self._watch("epochal_retrying_seconds", (sink,), self._retrying_gauge(sink))
            self._watch("epochal_in_doubt", (sink,), self._doubt_gauge(sink, _count))
            self._watch(
                "epochal_oldest_in_doubt_seconds", (sink,), self._doubt_gauge(sink, self._age_s)
            )
            for name, value in _ROOM.get(str(described.get("kind")), {}).items():
                self._watch(name, (sink,), self._room_gauge(sink, value))
            if described.get("kind") == _KAFKA:
                self._watch("epochal_kafka_lso_pinned_seconds", (sink,), self._pinned_gauge(sink))

    def _begin_counters(self, state: State) -> None:
        """At zero: an increase is visible only if the series is there before the first event."""
        for outcome in (Phase.COMMITTED, Phase.ABORTED, Phase.FAILED):
            self._add("epochal_epochs_total", (outcome.value,), 0)
        for code in sorted({one.code for one in error_classes()}):
            self._add("epochal_errors_total", (code,), 0)
        for sink in state.sinks:
            self._add("epochal_rejected_rows_total", (sink,), 0)

    def troubled(self, trouble: Trouble) -> None:
        self._add("epochal_errors_total", (trouble.code,), 1)

    def retried(self, sink: SinkName, retry: Retry) -> None:
        self._add("epochal_retries_total", (sink, retry.trouble.code), 1)

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
                if figures.is_rejected:
                    self._add("epochal_rejected_rows_total", (sink,), figures.rows)

    def close(self) -> None:
        self._unwatch()

    # To every meter

    def _add(self, name: str, labels: tuple[str, ...], amount: float) -> None:
        for meters in self._meters:
            meters.add(name, (self._pipeline, *labels), amount)

    def _observe(self, labels: tuple[str, ...], seconds: float) -> None:
        for meters in self._meters:
            meters.observe("epochal_phase_seconds", (self._pipeline, *labels), seconds)

    def _watch(self, name: str, labels: Labels, read: Read) -> None:
        whole = (self._pipeline, *labels)
        self._watched.append((name, whole, read))
        for meters in self._meters:
            _watch(meters, name, whole, read)

    def _unwatch(self) -> None:
        for name, labels, read in self._watched:
            for meters in self._meters:
                _unwatch(meters, name, labels, read)
        self._watched = []

    # Values of gauges

    def _unsettled(self) -> float:
        figures = self._tracker.current()
        return float(figures is not None and figures.phase in _UNSETTLED)

    def _last_epoch(self) -> float:
        figures = self._tracker.current()
        return -1.0 if figures is None else float(figures.epoch)

    def _last_decided(self) -> float:
        """From the epochs of this driver; before its first, from the log."""
        for figures in reversed(self._tracker.last_epochs()):
            if Phase.DECIDED in figures.entered_at:
                return figures.entered_at[Phase.DECIDED]
        last = None if self._state is None else self._state.last
        return 0.0 if last is None else last.decided_at

    def _input_rate(self) -> float:
        sources = self._tracker.sources()
        return 0.0 if sources is None else sources.rows_per_s

    def _behind(self) -> float:
        sources = self._tracker.sources()
        return 0.0 if sources is None else float(sum(sources.behind.values()))

    def _health_gauge(self, health: Health) -> Callable[[], float]:
        return lambda: float(self._condition().health is health)

    def _condition(self) -> Condition:
        """As the log and a heartbeat of this moment would show it."""
        state, now = self._state, self._now()
        if state is None:
            raise RuntimeError("a gauge is read before the driver has claimed")
        facts = Facts(
            liveness=Liveness.ALIVE,
            driver=state.driver,
            live=heartbeat(self._tracker, state, at=now, every_s=FLUSH_EVERY_S),
            pending=self._pending(),
        )
        return health_of(facts, now=now)

    def _pending(self) -> Pending | None:
        figures = self._tracker.current()
        if figures is None or figures.phase not in _UNSETTLED:
            return None
        waiting = [name for name, one in figures.sinks.items() if one.phase is not Phase.COMMITTED]
        return Pending(
            epoch=figures.epoch,
            decided_at=figures.entered_at.get(Phase.DECIDED, figures.opened_at),
            sinks=waiting,
        )

    def _phase_gauge(self, phase: Phase) -> Callable[[], float]:
        def read() -> float:
            figures = self._tracker.current()
            if figures is None or figures.phase is not phase or phase in ENDS:
                return 0.0
            return max(0.0, self._now() - figures.entered_at[phase])

        return read

    def _retrying_gauge(self, sink: SinkName) -> Callable[[], float]:
        def read() -> float:
            figures = self._tracker.current()
            found = None if figures is None else figures.sinks.get(sink)
            if found is None or found.retry is None:
                return 0.0
            return max(0.0, self._now() - found.retry.since)

        return read

    def _kept_gauge(self, place: str, value: Callable[[KeptFigures], int]) -> Callable[[], float]:
        def read() -> float:
            found = self._tracker.kept().get(place)
            return 0.0 if found is None else float(value(found))

        return read

    def _room_gauge(self, sink: SinkName, value: Callable[[Room], int]) -> Callable[[], float]:
        def read() -> float:
            found = self._tracker.rooms().get(sink)
            return 0.0 if found is None else float(value(found))

        return read

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
