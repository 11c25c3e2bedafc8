"""
The history of a pipeline: a JSON line per ended epoch, in segments of a few hundred lines.

    00000000000000000120-0000000003-0000.jsonl    first epoch, generation, part
    live.json                                     heartbeat: the driver's state, every few seconds

The first line of a segment identifies its driver. Only a driver's newest segment is still written,
each time as a whole, so a reader never sees half a line. Names sort by time, because epoch numbers
never decrease within a log: one listing finds a page, whatever the number of epochs.

The history is for people. The last seconds of a killed driver may be missing, and no decision
depends on it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from epochal.coordinator import (
    EpochFigures,
    InDoubtFigures,
    Retry,
    SinkFigures,
    SourceFigures,
    Tracker,
    Trouble,
)
from epochal.coordinator.journal import EpochLog
from epochal.errors import CorruptRecord, require_known_format
from epochal.logs import StoredLog
from epochal.protocol.machine import Phase
from epochal.protocol.state import State
from epochal.storage import Store
from epochal.storage.memory import MemoryStore
from epochal.terms import EpochNumber, Generation, SinkName

LIVE = "live.json"
_NAME = "history"
_VERSION = 1
_SEGMENT = re.compile(r"(?P<first>\d{20})-(?P<generation>\d{10})-(?P<part>\d{4,})\.jsonl")
_CURSOR = re.compile(r"(?P<segment>\d{20}-\d{10}-\d{4,}\.jsonl):(?P<line>\d+)")
_DIGITS = 6
_SEGMENTS_SEARCHED_MAX = 20
_RATE_EPOCHS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PastSink:
    rows: int
    bytes: int
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PastEpoch:
    """One ended attempt at one epoch."""

    epoch: EpochNumber
    generation: Generation
    outcome: str
    """committed, aborted (tried again under its number) or failed (decided, committed later)."""
    opened_at: float
    finished_at: float | None
    seconds: Mapping[str, float]
    """By phase."""
    sinks: Mapping[SinkName, PastSink]
    trouble: Trouble | None = None

    @property
    def rows(self) -> int:
        return sum(sink.rows for sink in self.sinks.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A page of epochs, newest first, and the cursor of the next page."""

    epochs: Sequence[PastEpoch]
    cursor: str | None
    """None if there is nothing older."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """The heartbeat of a driver."""

    at: float
    every_s: float
    """The interval between heartbeats; 0 in the last one of a driver that ended."""
    generation: Generation
    driver: str
    epoch: EpochNumber | None = None
    phase: str = Phase.IDLE.value
    opened_at: float | None = None
    rows: int = 0
    rows_per_s: float = 0.0
    """Over its last epochs, until now."""
    epochs_per_minute: float = 0.0
    seconds: Mapping[str, float] = field(default_factory=dict)
    entered_at: float | None = None
    """When the epoch came into its phase."""
    in_doubt: Mapping[SinkName, InDoubtFigures] = field(default_factory=dict)
    retrying: Mapping[SinkName, Retry] = field(default_factory=dict)
    """Sinks that did not take a decided epoch at the first attempt."""
    lost: Sequence[SinkName] = ()
    """Sinks whose target proved that it threw rows of the decided epoch away."""
    trouble: Trouble | None = None
    """The last error, until an epoch is committed."""
    sources: SourceFigures | None = None


def heartbeat(tracker: Tracker, state: State, *, at: float, every_s: float) -> Live:
    """The heartbeat of a driver at this moment."""
    live = Live(
        at=at,
        every_s=every_s,
        generation=state.generation,
        driver=state.driver,
        in_doubt=tracker.in_doubt(),
        lost=tracker.lost,
        trouble=tracker.trouble,
        sources=tracker.sources(),
    )
    figures = tracker.current()
    if figures is None:
        return live
    rows_per_s, epochs_per_minute = _rates(tracker.last_epochs(_RATE_EPOCHS), at)
    return replace(
        live,
        epoch=figures.epoch,
        phase=figures.phase.value,
        opened_at=figures.opened_at,
        rows=figures.rows,
        rows_per_s=rows_per_s,
        epochs_per_minute=epochs_per_minute,
        seconds={phase.value: round(s, 3) for phase, s in figures.seconds.items()},
        entered_at=figures.entered_at.get(figures.phase),
        retrying={name: one.retry for name, one in figures.sinks.items() if one.retry is not None},
    )


def _rates(epochs: Sequence[EpochFigures], now: float) -> tuple[float, float]:
    """Return rows per second and epochs per minute, from the first of these epochs until now."""
    done = [epoch for epoch in epochs if epoch.phase is Phase.COMMITTED]
    if not done:
        return 0.0, 0.0
    window_s = max(now - done[0].opened_at, 0.001)
    rows = sum(epoch.rows for epoch in done)
    return round(rows / window_s, 3), round(60 * len(done) / window_s, 3)


def past(figures: EpochFigures, generation: Generation) -> PastEpoch:
    return PastEpoch(
        epoch=figures.epoch,
        generation=generation,
        outcome=figures.phase.value,
        opened_at=figures.opened_at,
        finished_at=figures.finished_at,
        seconds=_rounded(figures.seconds),
        sinks={name: _past_sink(sink) for name, sink in figures.sinks.items()},
        trouble=figures.trouble,
    )


def figures_in(past: PastEpoch) -> EpochFigures:
    """An epoch of another process as `Tracker.last_epochs` shows it."""
    ended = Phase(past.outcome)
    return EpochFigures(
        epoch=past.epoch,
        phase=ended,
        opened_at=past.opened_at,
        finished_at=past.finished_at,
        sinks={
            name: SinkFigures(
                rows=sink.rows, bytes=sink.bytes, phase=ended, seconds=_phases(sink.seconds)
            )
            for name, sink in past.sinks.items()
        },
        seconds=_phases(past.seconds),
        trouble=past.trouble,
    )


def _phases(seconds: Mapping[str, float]) -> dict[Phase, float]:
    return {Phase(phase): spent_s for phase, spent_s in seconds.items()}


def _past_sink(sink: SinkFigures) -> PastSink:
    return PastSink(rows=sink.rows, bytes=sink.bytes, seconds=_rounded(sink.seconds))


def _rounded(seconds: Mapping[Phase, float]) -> dict[str, float]:
    return {phase.value: round(spent_s, _DIGITS) for phase, spent_s in seconds.items()}


# The format


def segment_name(first: EpochNumber, generation: Generation, part: int) -> str:
    return f"{first:020d}-{generation:010d}-{part:04d}.jsonl"


def header(*, uid: str, pipeline: str, generation: Generation, driver: str) -> bytes:
    identity = {"history": _VERSION, "uid": uid, "pipeline": pipeline}
    return _line({**identity, "generation": generation, "driver": driver})


def epoch_line(epoch: PastEpoch) -> bytes:
    return _line(asdict(epoch))


def live_bytes(live: Live) -> bytes:
    return _line({"live": _VERSION, **asdict(live)})


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _epoch_in(line: bytes) -> PastEpoch:
    read = json.loads(line)
    read["sinks"] = {name: PastSink(**sink) for name, sink in read["sinks"].items()}
    read["trouble"] = None if read["trouble"] is None else Trouble(**read["trouble"])
    return PastEpoch(**read)


def _retry(read: Mapping[str, Any]) -> Retry:
    return Retry(**{**read, "trouble": Trouble(**read["trouble"])})


# Reading


def history_of(log: EpochLog) -> History | None:
    """The history in a store beside the log's own; None where the log is in memory."""
    if not isinstance(log, StoredLog) or isinstance(log.store, MemoryStore):
        return None
    return History(store=log.store.beside(_NAME))


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Reads the history of one log."""

    store: Store

    def segments(self) -> list[str]:
        return [name for name in self.store.names() if _SEGMENT.fullmatch(name)]

    def page(self, *, limit: int, cursor: str | None = None, only: str | None = None) -> Page:
        """
        Return the newest epochs, or those older than a cursor; `only` selects one outcome.

        With `only`, a bounded part of the history is searched: the page may then hold fewer epochs
        than `limit`, or none, and the next page continues from there.
        """
        segments, below = self._before(cursor)
        searched_max = len(segments) if only is None else _SEGMENTS_SEARCHED_MAX
        taken: list[PastEpoch] = []
        for name in reversed(segments[-searched_max:]):
            for at, epoch in self._newest_first(name, below, only):
                taken.append(epoch)
                if len(taken) == limit:
                    is_last = at == 0 and name == segments[0]
                    return Page(epochs=taken, cursor=None if is_last else f"{name}:{at}")
            below = None
        is_all = len(segments) <= searched_max
        return Page(epochs=taken, cursor=None if is_all else f"{segments[-searched_max]}:0")

    def _before(self, cursor: str | None) -> tuple[list[str], int | None]:
        """Return the segments up to a cursor, and the number of lines of the newest to read."""
        segments = self.segments()
        if cursor is None:
            return segments, None
        found = _CURSOR.fullmatch(cursor)
        if found is None:
            raise ValueError(f"{cursor!r} is not a cursor")
        older = [name for name in segments if name <= found["segment"]]
        return older, int(found["line"]) if found["segment"] in older else None

    def _newest_first(
        self, segment: str, below: int | None, only: str | None
    ) -> Iterator[tuple[int, PastEpoch]]:
        lines = self._lines(segment)
        mark = b"" if only is None else b'"%s"' % only.encode()
        for at in reversed(range(len(lines))[:below]):
            # A search in the bytes first: decoding costs far more, and most lines don't match.
            if mark in lines[at]:
                epoch = _decoded(segment, lines[at])
                if only in (None, epoch.outcome):
                    yield at, epoch

    def attempts(self, epoch: EpochNumber) -> list[PastEpoch]:
        """Return every attempt at one epoch, oldest first."""
        found: list[PastEpoch] = []
        for name in reversed([name for name in self.segments() if _first(name) <= epoch]):
            found[:0] = [past_ for past_ in self.read(name) if past_.epoch == epoch]
            if _first(name) < epoch:
                break
        return found

    def read(self, segment: str) -> list[PastEpoch]:
        return [_decoded(segment, line) for line in self._lines(segment)]

    def _lines(self, segment: str) -> list[bytes]:
        """Return all lines but the first, which has the version and the driver."""
        lines = (self.store.read(segment) or b"").splitlines()
        try:
            version = json.loads(lines[0])["history"] if lines else _VERSION
        except (KeyError, TypeError, ValueError) as error:
            raise _unreadable(segment, error) from error
        require_known_format(f"{segment} of the history", version, _VERSION)
        return lines[1:]

    def live(self) -> Live | None:
        """Return the last heartbeat; None if there is no readable one."""
        try:
            read = json.loads(self.store.read(LIVE) or b"null")
            if read is None or read.pop("live") > _VERSION:
                return None
            doubts = {name: InDoubtFigures(**figures) for name, figures in read["in_doubt"].items()}
            retrying = {name: _retry(retry) for name, retry in read["retrying"].items()}
            trouble = None if read["trouble"] is None else Trouble(**read["trouble"])
            sources = None if read["sources"] is None else SourceFigures(**read["sources"])
            parts = {"in_doubt": doubts, "retrying": retrying, "trouble": trouble}
            return Live(**{**read, **parts, "sources": sources})
        except (AttributeError, KeyError, TypeError, ValueError):
            return None

    def all(self) -> Iterator[PastEpoch]:
        """Yield every epoch, oldest first."""
        for name in self.segments():
            yield from self.read(name)


def _decoded(segment: str, line: bytes) -> PastEpoch:
    try:
        return _epoch_in(line)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _unreadable(segment, error) from error


def _unreadable(segment: str, error: Exception) -> CorruptRecord:
    return CorruptRecord(
        f"{segment}: this part of the history can't be read: {error!r}",
        "remove the file: the history is for people, and nothing depends on it",
    )


def _first(segment: str) -> int:
    return int(segment.partition("-")[0])
