"""
`Tracker`: figures of epochs for operators: phases, rows, bytes, how long each phase took.

Figures of a bounded number of epochs are kept; counters run from the start of this driver. History,
metrics and traces are listeners: they are called after the fact, on the driver's own thread, must
not wait, and an exception that they raise is logged and changes nothing.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

from epochal.clock import Clock
from epochal.contract import Room
from epochal.errors import EpochalError, TryAgain
from epochal.protocol.machine import Phase
from epochal.protocol.receipts import sum_of
from epochal.protocol.recovery import Judgement
from epochal.protocol.state import State
from epochal.terms import EpochNumber, Receipts, SinkName

logger = logging.getLogger("epochal")

ABOUT: ContextVar[Mapping[str, str | int]] = ContextVar("about", default=MappingProxyType({}))
"""What this thread works on: pipeline, epoch, sink. For log lines."""
EPOCHS_KEPT = 1000
ENDS = frozenset({Phase.COMMITTED, Phase.ABORTED, Phase.FAILED})
"""Phases in which an epoch rests: FAILED until the next start."""
_SAMPLES_KEPT = 1024
_MESSAGE_CHARS_MAX = 500


class Stopped(TryAgain):
    """The engine was stopped on purpose in the middle of an epoch: no error is counted."""

    code = "stopped"
    if_active: EpochalError | None = None
    """The error that it is where the engine turns out to be active."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """Why an epoch, or a start, did not go on."""

    code: str
    message: str
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """A decided epoch that one target did not take at the first attempt, and is asked again to."""

    attempts: int
    since: float
    """When the first attempt failed."""
    until: float
    """When the driver gives up: the epoch stays decided, and the next start goes on with it."""
    trouble: Trouble
    """Of the last attempt."""


@dataclass(slots=True, kw_only=True)
class SinkFigures:
    rows: int = 0
    bytes: int = 0
    phase: Phase = Phase.ACTIVE
    seconds: dict[Phase, float] = field(default_factory=dict)
    """How long this sink alone took to prepare and to commit, where it was measured."""
    is_rejected: bool = False
    """These rows were rejected by another sink's target."""
    retry: Retry | None = None
    """While the commit of this sink is attempted again."""


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
    entered_at: dict[Phase, float] = field(default_factory=dict)
    """When it came into each phase, first."""
    trouble: Trouble | None = None

    @property
    def rows(self) -> int:
        return sum(sink.rows for sink in self.sinks.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class InDoubtFigures:
    """What one target held in doubt after the last sweep had cleared what it could."""

    count: int
    oldest_since: float | None
    """Seconds since 1970, where the target could tell."""
    left: int
    """How many of them only a person can settle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptFigures:
    """How much one place beside the pipeline keeps, and how much it keeps while all is well."""

    count: int
    limit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFigures:
    """What the engine says of the sources of a query, as of its last batch."""

    rows_per_s: float
    """Rows that arrived, per second."""
    behind: Mapping[str, int] = field(default_factory=dict)
    """By source that can tell: records, or files, that are there and not read yet."""


class Listener(Protocol):
    """Receives what one driver does. Called on the driver's thread: quick, and never waits."""

    def claimed(self, state: State) -> None:
        """This driver has claimed the pipeline."""

    def troubled(self, trouble: Trouble) -> None:
        """Something went wrong, in an epoch or between two."""

    def retried(self, sink: SinkName, retry: Retry) -> None:
        """An attempt to commit a sink failed and is repeated. On the thread of that sink."""

    def ended(self, epoch: EpochFigures) -> None:
        """An epoch came to rest. The figures are the listener's own to keep."""

    def close(self) -> None:
        """The driver stops."""


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
        self._in_doubt: dict[SinkName, InDoubtFigures] = {}
        self._kept: dict[str, KeptFigures] = {}
        self._rooms: dict[SinkName, Room] = {}
        self._listeners: list[Listener] = []
        self._last_error: BaseException | None = None
        self._trouble: Trouble | None = None
        self._read_sources: Callable[[], SourceFigures | None] = lambda: None
        self._lost: tuple[SinkName, ...] = ()
        self._pipeline = ""

    # What the coordinator reports

    def listen(self, listener: Listener) -> None:
        """Call `listener` from here on, until `close`."""
        self._listeners.append(listener)

    def watch_sources(self, read: Callable[[], SourceFigures | None]) -> None:
        """From here on, `read` returns what the engine says of the sources."""
        self._read_sources = read

    def claimed(self, state: State) -> None:
        self._pipeline = state.pipeline
        ABOUT.set({"pipeline": self._pipeline})
        self._notify(lambda listener: listener.claimed(state))

    def enter(self, epoch: EpochNumber, phase: Phase) -> None:
        ABOUT.set({"pipeline": self._pipeline, "epoch": epoch})
        with self._lock:
            now_s = self._clock.monotonic()
            if phase is Phase.ACTIVE or not self._epochs or self._epochs[-1].epoch != epoch:
                opened = EpochFigures(epoch=epoch, phase=phase, opened_at=self._clock.now())
                self._epochs.append(opened)
            else:
                self._leave(self._epochs[-1], now_s)
            self._entered_s = now_s
            self._arrive(self._epochs[-1], phase)
            ended = deepcopy(self._epochs[-1]) if phase in ENDS and self._listeners else None
        if ended is not None:
            self._notify(lambda listener: listener.ended(ended))

    def prepared(self, receipts: Receipts, *, is_rejected: bool = False) -> None:
        with self._lock:
            for sink, some in receipts.items():
                figures = self._epochs[-1].sinks.setdefault(sink, SinkFigures())
                counted = sum_of(some)
                figures.rows, figures.bytes = counted.fingerprint.rows, counted.bytes
                figures.phase, figures.is_rejected = Phase.PREPARED, is_rejected

    def sink_committed(self, sink: SinkName) -> None:
        with self._lock:
            figures = self._epochs[-1].sinks.setdefault(sink, SinkFigures())
            figures.phase, figures.retry = Phase.COMMITTED, None

    def sink_retried(self, sink: SinkName, error: BaseException, *, give_up_in_s: float) -> None:
        """An attempt to commit a sink failed, and it is attempted again."""
        now = self._clock.now()
        with self._lock:
            figures = self._epochs[-1].sinks.setdefault(sink, SinkFigures())
            before = figures.retry
            retry = Retry(
                attempts=1 if before is None else before.attempts + 1,
                since=now if before is None else before.since,
                until=now + give_up_in_s,
                trouble=trouble_of(error),
            )
            figures.retry = retry
        self._notify(lambda listener: listener.retried(sink, retry))

    def rows_lost(self, sinks: Iterable[SinkName]) -> None:
        """These targets prove that they threw rows of the decided epoch away; none: no more."""
        self._lost = tuple(sinks)

    @contextmanager
    def timing(self, sink: SinkName, phase: Phase) -> Iterator[None]:
        """Measure what one sink does in a phase, also on a thread of its own."""
        began_s = self._clock.monotonic()
        about = ABOUT.set({**ABOUT.get(), "sink": sink})
        try:
            yield
        finally:
            ABOUT.reset(about)
            spent_s = self._clock.monotonic() - began_s
            with self._lock:
                if self._epochs:
                    seconds = self._epochs[-1].sinks.setdefault(sink, SinkFigures()).seconds
                    seconds[phase] = seconds.get(phase, 0.0) + spent_s

    def troubled(self, error: BaseException) -> None:
        """Reported once per error, however many layers pass it on."""
        if error is self._last_error:
            return
        self._last_error = error
        trouble = trouble_of(error)
        with self._lock:
            if self._epochs and self._epochs[-1].phase not in ENDS:
                self._epochs[-1].trouble = trouble
        if not isinstance(error, Stopped):
            self._trouble = trouble
            self._notify(lambda listener: listener.troubled(trouble))

    def swept(self, sink: SinkName, judged: Sequence[Judgement], left: int) -> None:
        """What a target listed as in doubt."""
        ages = [one.found.age_s for one in judged if one.found.age_s is not None]
        oldest = self._clock.now() - max(ages) if ages else None
        self._in_doubt[sink] = InDoubtFigures(count=len(judged), oldest_since=oldest, left=left)

    def has_room(self, sink: SinkName, room: Room) -> None:
        """How much of prepared rows a target keeps, and may keep."""
        self._rooms[sink] = room

    def keeps(self, place: str, count: int, *, limit: int) -> None:
        """How much a place keeps that is cleared from time to time. Called on any thread."""
        self._kept[place] = KeptFigures(count=count, limit=limit)

    def close(self) -> None:
        self._notify(lambda listener: listener.close())
        self._listeners = []

    # What anybody may ask

    def last_epochs(self, count: int = EPOCHS_KEPT) -> Sequence[EpochFigures]:
        """The newest epochs, oldest first, as they stand."""
        with self._lock:
            epochs = list(self._epochs)
            # Only the newest still changes, perhaps while another thread reads it.
            epochs[-1:] = [deepcopy(one) for one in epochs[-1:]]
            return tuple(epochs[-count:])

    def current(self) -> EpochFigures | None:
        """The newest epoch as it stands, the time in its present phase included."""
        with self._lock:
            if not self._epochs:
                return None
            figures = deepcopy(self._epochs[-1])
            if figures.phase not in ENDS:
                spent_s = self._clock.monotonic() - self._entered_s
                before_s = figures.seconds.get(figures.phase, 0.0)
                figures.seconds[figures.phase] = before_s + spent_s
            return figures

    def in_doubt(self) -> Mapping[SinkName, InDoubtFigures]:
        """What the last sweep left in doubt at the targets."""
        return dict(self._in_doubt)

    def kept(self) -> Mapping[str, KeptFigures]:
        """What the log and the history keep, by place."""
        return dict(self._kept)

    def rooms(self) -> Mapping[SinkName, Room]:
        """What the last sweep found of the targets that have a limit for prepared rows."""
        return dict(self._rooms)

    @property
    def trouble(self) -> Trouble | None:
        """The last error of this driver; None once an epoch has been committed after it."""
        return self._trouble

    def sources(self) -> SourceFigures | None:
        """None where no query runs, or it has not finished a batch yet."""
        return self._read_sources()

    @property
    def lost(self) -> Sequence[SinkName]:
        """The targets that threw rows of the decided epoch away, until they are written again."""
        return self._lost

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

    # Inside

    def _leave(self, figures: EpochFigures, now_s: float) -> None:
        spent_s = now_s - self._entered_s
        figures.seconds[figures.phase] = figures.seconds.get(figures.phase, 0.0) + spent_s
        self._samples.setdefault(figures.phase, _Samples()).add(spent_s)

    def _arrive(self, figures: EpochFigures, phase: Phase) -> None:
        figures.phase = phase
        figures.entered_at.setdefault(phase, self._clock.now())
        if phase is Phase.COMMITTED:
            self._commits += 1
            self._trouble = None
            self._rows += figures.rows
            self._bytes += sum(sink.bytes for sink in figures.sinks.values())
        elif phase is Phase.ABORTED:
            self._aborts += 1
        elif phase is Phase.FAILED:
            self._commit_failures += 1
        if phase in ENDS:
            figures.finished_at = self._clock.now()

    def _notify(self, notify: Callable[[Listener], None]) -> None:
        for listener in self._listeners:
            try:
                notify(listener)
            except Exception as error:  # noqa: BLE001  a listener must not stop an epoch
                logger.warning("%s failed: %s", type(listener).__name__, error)


def metrics_of(epochs: Iterable[EpochFigures]) -> Metrics:
    """The same of epochs that have ended."""
    ended = list(epochs)
    done = [one for one in ended if one.phase is Phase.COMMITTED]
    samples: dict[Phase, _Samples] = {}
    for one in ended:
        for phase, spent_s in one.seconds.items():
            samples.setdefault(phase, _Samples()).add(spent_s)
    return Metrics(
        commits=len(done),
        aborts=sum(one.phase is Phase.ABORTED for one in ended),
        commit_failures=sum(one.phase is Phase.FAILED for one in ended),
        rows=sum(one.rows for one in done),
        bytes=sum(sink.bytes for one in done for sink in one.sinks.values()),
        latency={phase: some.latency() for phase, some in samples.items()},
    )


def trouble_of(error: BaseException) -> Trouble:
    if not isinstance(error, EpochalError):
        return Trouble(code=type(error).__name__, message=str(error)[:_MESSAGE_CHARS_MAX])
    return Trouble(
        code=error.code,
        message=error.message[:_MESSAGE_CHARS_MAX],
        hint=error.hint[:_MESSAGE_CHARS_MAX],
    )
