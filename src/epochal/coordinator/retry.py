"""Waits between attempts (`backoff`), and calls to several targets at once (`in_threads`)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import copy_context
from typing import Protocol

from epochal.errors import OutcomeUnknown

logger = logging.getLogger("epochal")

Result = BaseException | None


class StillRunning(OutcomeUnknown):
    """A target has not answered in the time given, and the call to it goes on."""

    code = "still-running"


class RunParallel(Protocol):
    """Runs jobs at the same time; returns each one's error, or None, in their order."""

    def __call__(
        self, jobs: Sequence[Callable[[], None]], *, slow_s: float, give_up_s: float
    ) -> Sequence[Result]: ...


def backoff(waits_ms: Sequence[int], random: Callable[[], float]) -> Iterator[float]:
    """
    Seconds to wait before each further attempt: as listed, then the last one for ever.

    Half of each wait is random, so that drivers that failed together don't retry together.
    """
    at = 0
    while True:
        wait_s = waits_ms[min(at, len(waits_ms) - 1)] / 1000
        yield wait_s / 2 + wait_s / 2 * random()
        at += 1


def in_threads(
    jobs: Sequence[Callable[[], None]], *, slow_s: float, give_up_s: float
) -> Sequence[Result]:
    """
    Run each job in a daemon thread. One that hangs is reported and left behind, and does not keep
    the process from ending; what became of it is asked of the target at the next start (I9).
    """
    results: list[Result] = [StillRunning(f"no answer within {give_up_s:.0f} s") for _ in jobs]

    def run(at: int, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:  # noqa: BLE001  the caller sorts errors of any class
            results[at] = error
        else:
            results[at] = None

    threads = [
        threading.Thread(
            target=copy_context().run,  # so that its log lines carry pipeline, epoch and sink
            args=(run, *item),
            name=f"epochal-{item[0]}",
            daemon=True,
        )
        for item in enumerate(jobs)
    ]
    began_s = time.monotonic()
    for thread in threads:
        thread.start()
    if late := _alive_at(began_s + min(slow_s, give_up_s), threads):
        logger.warning(
            "%d of %d targets have not answered after %.0f s", len(late), len(jobs), slow_s
        )
        _alive_at(began_s + give_up_s, late)
    return tuple(results)


def _alive_at(deadline_s: float, threads: Sequence[threading.Thread]) -> list[threading.Thread]:
    """Wait for all of them until one common deadline; returns those that still run then."""
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    return [thread for thread in threads if thread.is_alive()]
