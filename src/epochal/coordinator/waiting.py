"""How long to wait before the next attempt, and doing several things at a time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import copy_context
from typing import Protocol

from epochal.errors import OutcomeUnknown

logger = logging.getLogger("epochal")

Result = BaseException | None


class StillRunning(OutcomeUnknown):
    """A target has not answered in the time given, and the call to it goes on."""

    code = "still-running"


class Together(Protocol):
    """Runs jobs at the same time and gives each one's error, or None, in their order."""

    def __call__(
        self, jobs: Sequence[Callable[[], None]], *, slow_s: float, give_up_s: float
    ) -> Sequence[Result]: ...


def backoff(waits_ms: Sequence[int], chance: Callable[[], float]) -> Iterator[float]:
    """
    Seconds to wait before each further attempt: as listed, the last one again and again.

    Half of each wait is left to chance, so that drivers that failed together don't retry together.
    """
    at = 0
    while True:
        wait_s = waits_ms[min(at, len(waits_ms) - 1)] / 1000
        yield wait_s / 2 + wait_s / 2 * chance()
        at += 1


def in_threads(
    jobs: Sequence[Callable[[], None]], *, slow_s: float, give_up_s: float
) -> Sequence[Result]:
    """
    Each job in a daemon thread: one that hangs can be reported and left, and does not keep the
    process from ending. The target then has the last word, at the next start (I9).
    """
    results: list[Result] = [StillRunning(f"no answer within {give_up_s:.0f} s") for _ in jobs]

    def run(at: int, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:  # noqa: BLE001  whatever it is, the caller sorts it
            results[at] = error
        else:
            results[at] = None

    threads = [
        threading.Thread(
            target=copy_context().run,  # so that its log lines know what they are about
            args=(run, *item),
            name=f"epochal-{item[0]}",
            daemon=True,
        )
        for item in enumerate(jobs)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(min(slow_s, give_up_s))
    late = [thread for thread in threads if thread.is_alive()]
    if late:
        logger.warning(
            "%d of %d targets have not answered after %.0f s", len(late), len(jobs), slow_s
        )
    for thread in late:
        thread.join(max(0.0, give_up_s - slow_s))
    return tuple(results)
