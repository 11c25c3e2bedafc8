"""
Waits between attempts (`backoff`), rows that the driver itself prepares (`prepare_on_driver`), and
calls to several targets at once (`in_threads`).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import copy_context
from typing import Protocol

from epochal.clock import Clock
from epochal.errors import OutcomeUnknown, TaskFailed, TryAgain
from epochal.terms import Limits, Receipt

Result = BaseException | None
OnEnd = Callable[[int, Result], None]
"""Called on the driver's thread with the number of a job that has ended and its error, or None."""
OnLate = Callable[[float], None]
"""Called on the driver's thread where some jobs still run after so many seconds."""


class StillRunning(OutcomeUnknown):
    """A target has not answered in the time given, and the call to it goes on."""

    code = "still-running"


class RunParallel(Protocol):
    """
    Runs jobs at the same time, all under one deadline; returns each one's error, or None, in their
    order. `on_end` is called for each job as it ends, while others still run; `on_late` at each
    time of `late_s` at which some do.
    """

    def __call__(
        self,
        jobs: Sequence[Callable[[], None]],
        *,
        late_s: Sequence[float],
        give_up_s: float,
        on_end: OnEnd,
        on_late: OnLate,
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


def prepare_on_driver(
    prepare: Callable[[bool], Receipt],
    *,
    limits: Limits,
    clock: Clock,
    random: Callable[[], float],
    note_late: Callable[[], None],
) -> Receipt:
    """
    Prepare rows in the driver's process, with one attempt more than there are waits. `prepare` is
    given whether it is the first. Each attempt has a handle of its own, and what a failed one left
    is cleared like that of any task (I5). `note_late` is called where one was not answered, and may
    still prepare.
    """
    waits = backoff(limits.retry_backoff_ms, random)
    failed = 0
    while True:
        try:
            return prepare(failed == 0)
        except (TryAgain, OutcomeUnknown, OSError) as error:
            if not isinstance(error, TryAgain):
                note_late()
            failed += 1
            if failed > len(limits.retry_backoff_ms):
                raise
            clock.sleep(next(waits))


def in_threads(
    jobs: Sequence[Callable[[], None]],
    *,
    late_s: Sequence[float],
    give_up_s: float,
    on_end: OnEnd,
    on_late: OnLate,
) -> Sequence[Result]:
    """
    Run each job in a daemon thread. One that hangs is reported and left behind, and does not keep
    the process from ending; what became of it is asked of the target at the next start (I9).
    """
    results: list[Result] = [StillRunning(f"no answer within {give_up_s:.0f} s") for _ in jobs]
    ended: queue.SimpleQueue[tuple[int, Result]] = queue.SimpleQueue()

    def run(at: int, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:  # noqa: BLE001  the caller sorts errors of any class
            ended.put((at, error))
        except BaseException as error:  # noqa: BLE001  sys.exit() in a sink ends its call, no more
            ended.put((at, TaskFailed(f"{type(error).__name__}: {error}")))
        else:
            ended.put((at, None))

    began_s = time.monotonic()
    for item in enumerate(jobs):
        threading.Thread(
            target=copy_context().run,  # so that its log lines carry pipeline, epoch and sink
            args=(run, *item),
            name=f"epochal-{item[0]}",
            daemon=True,
        ).start()
    running = set(range(len(jobs)))

    def take_until(deadline_s: float) -> None:
        while running:
            try:
                at, result = ended.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                return
            running.remove(at)
            results[at] = result
            on_end(at, result)

    for mark_s in sorted(mark_s for mark_s in late_s if mark_s < give_up_s):
        take_until(began_s + mark_s)
        if running:
            on_late(mark_s)
    take_until(began_s + give_up_s)
    for at in sorted(running):
        on_end(at, results[at])
    return tuple(results)
