"""The index of all pipelines below a root. A thread refreshes it, so pages wait for no storage."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from epochal.coordinator.journal import EpochLog
from epochal.errors import EpochalError
from epochal.reports.discover import find_logs, found_log
from epochal.reports.model import PipelineReport, StatusReport, UnreadableReport
from epochal.reports.status import pipeline_status, unreadable_report, urgency
from epochal.telemetry.health import Health

logger = logging.getLogger("epochal.console")

_READERS = 8
_FIND_EVERY_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All pipelines at one moment."""

    at: float
    pipelines: Mapping[str, PipelineReport] = field(default_factory=dict)
    """By the key that identifies a pipeline in a URL."""
    unreadable: Sequence[UnreadableReport] = ()
    error: str = ""
    """Why the root could not be searched."""

    def find(self, query: str, health: str) -> list[tuple[str, PipelineReport]]:
        """Return the matching pipelines: proven loss first, then by health, the oldest first."""
        terms = query.casefold().split()
        found = [
            (key, one)
            for key, one in self.pipelines.items()
            if (not health or one.health.value == health)
            and all(term in _searched(one) for term in terms)
        ]
        return sorted(found, key=lambda pair: (urgency(pair[1]), pair[0]))

    def counts(self) -> dict[str, int]:
        counted = {health.value: 0 for health in Health}
        for one in self.pipelines.values():
            counted[one.health.value] += 1
        counted[Health.UNREADABLE.value] += len(self.unreadable)
        return counted

    def report(self, root: str) -> StatusReport:
        return StatusReport(
            root=root, pipelines=tuple(self.pipelines.values()), unreadable=self.unreadable
        )


def _searched(one: PipelineReport) -> str:
    return f"{one.pipeline} {one.location} {one.run or ''}".casefold()


def key_of(location: str) -> str:
    return hashlib.blake2b(location.encode(), digest_size=8).hexdigest()


class Index:
    """Searches the root for logs every half minute, and reads the logs every few seconds."""

    def __init__(self, root: str, *, every_s: float = 2.0) -> None:
        self.root = root
        self._every_s = every_s
        self._snapshot = Snapshot(at=0.0)
        self._locations: list[str] = []
        self._found_at = float("-inf")
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="epochal-index", daemon=True)

    @property
    def snapshot(self) -> Snapshot:
        return self._snapshot

    def start(self) -> None:
        self.refresh()
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join()

    def log(self, key: str) -> EpochLog | None:
        """Open the log of a pipeline. The caller closes it."""
        found = (one for one in self._locations if key_of(one) == key)
        return next((found_log(self.root, location) for location in found), None)

    def refresh(self) -> None:
        try:
            self._find_if_due()
        except (EpochalError, OSError) as error:
            self._snapshot = Snapshot(
                at=time.time(), pipelines=self._snapshot.pipelines, error=str(error)
            )
            return
        with ThreadPoolExecutor(_READERS, thread_name_prefix="epochal-index") as readers:
            reports = list(readers.map(self._read, self._locations))
        self._snapshot = Snapshot(
            at=time.time(),
            pipelines={
                key_of(location): one
                for location, one in zip(self._locations, reports, strict=True)
                if isinstance(one, PipelineReport)
            },
            unreadable=[one for one in reports if isinstance(one, UnreadableReport)],
        )

    def _find_if_due(self) -> None:
        # While there is no pipeline yet, search every time: the first one may be starting.
        if self._locations and time.monotonic() - self._found_at < _FIND_EVERY_S:
            return
        found = []
        for log in find_logs(self.root):
            found.append(log.place)
            log.close()
        self._locations, self._found_at = found, time.monotonic()

    def _run(self) -> None:
        while not self._is_over.wait(self._every_s):
            try:
                self.refresh()
            except Exception:
                # The thread must go on: the page shows how old its figures are.
                logger.exception("the pipelines below %s could not be read", self.root)

    def _read(self, location: str) -> PipelineReport | UnreadableReport:
        log = found_log(self.root, location)
        try:
            return pipeline_status(log)
        except (EpochalError, OSError) as error:
            return unreadable_report(log, error)
        finally:
            log.close()
