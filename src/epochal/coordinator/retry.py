"""
Waits between attempts (`backoff`), limits that allow them (`require_usable`), rows that the driver
itself prepares (`prepare_on_driver`), and calls to several targets at once (`in_threads`).
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import copy_context
from dataclasses import fields
from functools import partial
from typing import Protocol

from epochal.clock import Clock
from epochal.errors import Misconfigured, OutcomeUnknown, TaskFailed, TryAgain
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


def require_usable(limits: Limits) -> None:
    """Refuse limits with which no epoch could be carried out."""
    for field in fields(limits):
        value = getattr(limits, field.name)
        if isinstance(value, int | float) and value < 0:
            raise Misconfigured(f"Limits({field.name}={value})", "a number that is not negative")
    if not limits.retry_backoff_ms or min(limits.retry_backoff_ms) < 0:
        raise Misconfigured(
            f"Limits(retry_backoff_ms={limits.retry_backoff_ms})",
            "at least one wait, in milliseconds: Limits(retry_backoff_ms=(100, 500, 2000))",
        )


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
        # With its context, so that its log lines carry pipeline, epoch and sink.
        _start(f"epochal-{item[0]}", partial(copy_context().run, run, *item))
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


_idle: list[queue.SimpleQueue[tuple[str, Callable[[], None]]]] = []
"""
Inboxes of daemon threads that wait for another job. A new thread waits for its turn on the
processor longer than one that wakes up: on a busy machine more than a millisecond, for each call.
"""
IDLE = "epochal-idle"
os.register_at_fork(after_in_child=_idle.clear)


def _start(name: str, job: Callable[[], None]) -> None:
    """Run a job, which raises nothing, in a daemon thread."""
    try:
        inbox = _idle.pop()
    except IndexError:
        inbox = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(inbox,), daemon=True).start()
    inbox.put((name, job))


def _serve(inbox: queue.SimpleQueue[tuple[str, Callable[[], None]]]) -> None:
    me = threading.current_thread()
    while True:
        me.name, job = inbox.get()
        job()
        del job  # what it holds on to must not live until the next one
        me.name = IDLE
        _idle.append(inbox)
