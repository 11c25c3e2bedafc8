"""
Compaction of small files beside a running pipeline: the option `compact=`, and its thread.

An epoch every few seconds makes thousands of small files. A sink whose target can put others in
their place by one commit of its own (`Operable.compact`) does so every now and then, on a committer
of its own, so that no epoch waits for it. It reads what is visible and nothing else: prepared files
are in no version or snapshot yet, and are left alone (I5).
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass

from epochal.contract import Committer, Sink
from epochal.errors import Misconfigured
from epochal.kit.sink_base import Compacted, Operable
from epochal.terms import Identity, Limits

logger = logging.getLogger("epochal")

TARGET_MB = 128
_MB = 1024 * 1024
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_EVERY = re.compile(r"(\d+)\s*([smhd])")
_CLOSE_WAIT_S = 5.0
_HINT = 'compact={"target_mb": 128, "every": "1h"}; a time is a number with s, m, h or d'

CompactOption = Mapping[str, int | str]
"""`{"target_mb": 128, "every": "1h"}`"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    target_bytes: int
    every_s: float


def parse_schedule(sink: str, given: CompactOption) -> Schedule:
    """The option `compact=` of a sink, or `Misconfigured`."""
    unknown = sorted(given.keys() - {"target_mb", "every"})
    target_mb = given.get("target_mb", TARGET_MB)
    every = _EVERY.fullmatch(str(given.get("every", "1h")).strip())
    is_number = isinstance(target_mb, int) and not isinstance(target_mb, bool) and target_mb > 0
    if unknown or not is_number or every is None or not int(every[1]):
        raise Misconfigured(f"{sink}: compact={dict(given)!r}", _HINT)
    return Schedule(
        target_bytes=int(target_mb) * _MB, every_s=float(int(every[1]) * _UNIT_S[every[2]])
    )


def compacted(committer: Committer, target_bytes: int, *, is_dry_run: bool = False) -> Compacted:
    if not isinstance(committer, Operable):
        return Compacted(because="this kind of target can't be compacted")
    return committer.compact(target_bytes=target_bytes, is_dry_run=is_dry_run)


def describe(done: Compacted, *, is_dry_run: bool = False) -> str:
    if done.because:
        return done.because
    if not done.files_before:
        return "nothing to compact"
    verb = "would become about" if is_dry_run else "became"
    return f"{done.files_before:,} files {verb} {done.files_after:,}"


def compactor_of(
    sink: Sink, option: CompactOption | None, identity: Identity, limits: Limits
) -> Compactor | None:
    """The compactor that a sink's committer calls after its commits; None without the option."""
    if option is None:
        return None
    schedule = parse_schedule(sink.name, option)
    return Compactor(sink.name, schedule, lambda: sink.committer(identity, limits))


class Compactor:
    """Compacts one sink's table now and then: first after the first commit of a driver's life."""

    def __init__(self, sink: str, schedule: Schedule, opened: Callable[[], Committer]) -> None:
        self._sink = sink
        self._schedule = schedule
        self._opened = opened
        self._began_s: float | None = None
        self._thread: threading.Thread | None = None

    def after_commit(self) -> None:
        """Begin one where it is due and none is running."""
        now = time.monotonic()
        is_due = self._began_s is None or now - self._began_s >= self._schedule.every_s
        if not is_due or (self._thread is not None and self._thread.is_alive()):
            return
        self._began_s = now
        self._thread = threading.Thread(
            target=self._compact, name=f"epochal-compact-{self._sink}", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Wait a moment for one that is running. What it does later does no harm."""
        if self._thread is not None:
            self._thread.join(_CLOSE_WAIT_S)

    def _compact(self) -> None:
        try:
            with closing(self._opened()) as target:
                done = compacted(target, self._schedule.target_bytes)
        except Exception as error:  # noqa: BLE001  rows are as they were, and the next one tries again
            logger.warning("sink %s: files were not compacted: %s", self._sink, error)
        else:
            logger.info("sink %s: %s", self._sink, describe(done))
