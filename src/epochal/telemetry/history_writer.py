"""The writer of a pipeline's history: queues lines on the driver's thread, stores them on its own.

A storage that hangs or fails delays no epoch. Lines wait in a bounded queue; when it is full, the
oldest are dropped.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby, islice
from operator import attrgetter

from epochal.coordinator import EpochFigures, Retry, Tracker, Trouble
from epochal.coordinator.journal import EpochLog
from epochal.errors import EpochalError
from epochal.protocol.state import State
from epochal.storage import Store
from epochal.telemetry.history import (
    LIVE,
    History,
    epoch_line,
    header,
    heartbeat,
    history_of,
    live_bytes,
    past,
    segment_name,
)
from epochal.terms import EpochNumber, Generation, SinkName

logger = logging.getLogger("epochal")

FLUSH_EVERY_S = 5.0
REMOTE_FLUSH_EVERY_S = 15.0
"""Less often: object stores charge per put, and databases keep replaced rows until vacuum."""
_NEAR = ("/", "sqlite:")
_CLOSE_WAIT_MAX_S = 3.0
_SEGMENT_EPOCHS = 500
_WAITING_MAX = 10_000


def record_history(tracker: Tracker, log: EpochLog, *, epochs_kept: int) -> None:
    """Keep a history of what this tracker sees, beside a log that outlives the process."""
    if epochs_kept <= 0:
        return
    try:
        history = history_of(log)
    except Exception as error:  # noqa: BLE001  never the reason why a pipeline does not start
        logger.warning("%s: no history will be kept: %s", log.place, error)
        return
    if history is not None:
        is_near = history.store.location.startswith(_NEAR)
        every_s = FLUSH_EVERY_S if is_near else REMOTE_FLUSH_EVERY_S
        tracker.listen(
            Recorder(tracker, history.store, epochs_kept=epochs_kept, flush_every_s=every_s)
        )


@dataclass(slots=True)
class _Segment:
    name: str
    generation: Generation
    lines: list[bytes] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class _Line:
    """Compared by identity: a full queue may drop its oldest lines while they are written."""

    epoch: EpochNumber
    generation: Generation
    text: bytes


class Recorder:
    """Writes the history of one driver. One thread makes every put; it ends with the driver."""

    def __init__(
        self,
        tracker: Tracker,
        store: Store,
        *,
        epochs_kept: int,
        flush_every_s: float,
    ) -> None:
        self._tracker = tracker
        self._store = store
        self._segments_kept = max(1, -(-epochs_kept // _SEGMENT_EPOCHS))
        self._flush_every_s = flush_every_s
        self._waiting: deque[_Line] = deque(maxlen=_WAITING_MAX)
        self._lock = threading.Lock()
        self._is_closing = False
        self._is_woken = threading.Event()
        self._thread: threading.Thread | None = None
        self._state: State | None = None
        self._segment: _Segment | None = None
        self._parts = 0
        self._is_failing = False

    # On the driver's thread

    def claimed(self, state: State) -> None:
        self._state = state
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="epochal-history", daemon=True)
            self._thread.start()

    def troubled(self, trouble: Trouble) -> None:
        """The line of the epoch carries the error."""

    def retried(self, sink: SinkName, retry: Retry) -> None:  # noqa: ARG002
        # A status that is read now must not show that all is well.
        if retry.attempts == 1:
            self._is_woken.set()

    def ended(self, epoch: EpochFigures) -> None:
        line = epoch_line(past(epoch, self._generation))
        with self._lock:
            self._waiting.append(_Line(epoch.epoch, self._generation, line))

    def close(self) -> None:
        self._is_closing = True
        self._is_woken.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_WAIT_MAX_S)

    # On its own thread

    def _run(self) -> None:
        while not self._is_closing:
            self._write(is_last=False)
            self._is_woken.wait(self._flush_every_s)
            self._is_woken.clear()
        self._write(is_last=True)

    def _write(self, *, is_last: bool) -> None:
        try:
            try:
                self._flush()
            finally:
                # What keeps lines from being written must not make a driver look dead.
                self._put_live(is_last=is_last)
            self._is_failing = False
        except Exception as error:  # noqa: BLE001  a history must not stop the pipeline
            level = logging.DEBUG if self._is_failing else logging.WARNING
            logger.log(level, "the history can't be written now, it is tried again: %s", error)
            self._is_failing = True

    def _flush(self) -> None:
        while self._waiting:
            segment = self._segment_for(self._waiting[0])
            room = _SEGMENT_EPOCHS + 1 - len(segment.lines)
            with self._lock:
                waiting = list(islice(_of_one_generation(self._waiting), room))
            taken = [line.text for line in waiting]
            self._store.put(segment.name, b"".join([*segment.lines, *taken]))
            segment.lines += taken
            with self._lock:
                while self._waiting and self._waiting[0] in waiting:
                    self._waiting.popleft()
            self._segment = segment if len(segment.lines) <= _SEGMENT_EPOCHS else None

    def _segment_for(self, first: _Line) -> _Segment:
        """Return the current segment, or a new one: a segment belongs to one generation."""
        if self._segment is not None and self._segment.generation == first.generation:
            return self._segment
        state = self._state
        if state is None:
            raise RuntimeError("an epoch ended before its driver had claimed")
        name = segment_name(first.epoch, first.generation, self._parts)
        self._parts += 1
        first_line = header(
            uid=state.uid,
            pipeline=state.pipeline,
            generation=first.generation,
            driver=state.driver,
        )
        self._forget_old()
        return _Segment(name, first.generation, [first_line])

    def _forget_old(self) -> None:
        segments = History(store=self._store).segments()
        self._tracker.keeps("history", len(segments), limit=self._segments_kept)
        if len(segments) < self._segments_kept:
            return
        try:
            self._store.delete(segments[: len(segments) - self._segments_kept + 1])
        except (EpochalError, OSError) as error:
            logger.warning("old parts of the history can't be deleted: %s", error)

    def _put_live(self, *, is_last: bool) -> None:
        state = self._state
        if state is None:
            return
        every_s = 0.0 if is_last else self._flush_every_s
        live = heartbeat(self._tracker, state, at=time.time(), every_s=every_s)
        self._store.put(LIVE, live_bytes(live))

    @property
    def _generation(self) -> Generation:
        return Generation(0) if self._state is None else self._state.generation


def _of_one_generation(lines: Iterable[_Line]) -> Iterator[_Line]:
    """Yield the first lines, up to those of another generation."""
    return next((some for _, some in groupby(lines, attrgetter("generation"))), iter(()))
