"""
`IdleSweep`: a thread that sweeps the targets while no epoch begins (I5).

An epoch begins with a sweep where one is due. A source that is idle begins none, and without this
thread two things would wait for its next row:

    driver A, taken for dead              driver B, its successor
                                          claims, sweeps: nothing is in doubt
    a task wakes and prepares g1-e7-p0    no epoch comes
                                          sweep_every_s later: lists g1-e7-p0 and aborts it
    its own sweep asks the log and
    finds B's claim: Fenced, it stops

A sweep also learns of a pause, by which the run ends as well. A run whose epochs are decided learns
of it from its decision, and the thread stops it between two epochs, a few seconds later.

The sweep holds the lock under which its owner begins and concludes epochs, so it runs between two
epochs or not at all. What a target that is away keeps is cleared by a later sweep.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from epochal.coordinator.coordinator import Coordinator
from epochal.errors import EpochalError
from epochal.protocol.state import Pause

logger = logging.getLogger("epochal")

_EVERY_MIN_S = 1.0
_EVERY_MAX_S = 2.0
"""A sweep that is not due costs nothing, and a pause is noticed earlier."""

OnError = Callable[[EpochalError], None]
"""Called without the lock, on the thread of the sweep, with the error that ends the run."""
OnPause = Callable[[Pause], None]
"""Called like `OnError`, once, where a person has paused the pipeline."""


class IdleSweep:
    def __init__(
        self,
        coordinator: Coordinator,
        lock: AbstractContextManager[Any],
        *,
        every_s: float,
        on_error: OnError,
        on_pause: OnPause | None = None,
    ) -> None:
        self._is_over = threading.Event()
        # Weak, so that an owner that is dropped without being closed ends the thread.
        self._thread = threading.Thread(
            target=_run,
            args=(weakref.ref(coordinator), lock, self._is_over, on_error, on_pause),
            kwargs={"every_s": min(max(every_s, _EVERY_MIN_S), _EVERY_MAX_S)},
            name="epochal-idle-sweep",
            daemon=True,
        )
        self._thread.start()

    def stop(self) -> None:
        """No sweep begins any more. One that runs has ended once its lock can be taken."""
        self._is_over.set()

    def join(self) -> None:
        """After `stop`, and without the lock: wait until the thread has ended."""
        self._thread.join()


def _run(
    reference: weakref.ref[Coordinator],
    lock: AbstractContextManager[Any],
    is_over: threading.Event,
    on_error: OnError,
    on_pause: OnPause | None,
    *,
    every_s: float,
) -> None:
    while not is_over.wait(every_s):
        pause = None
        try:
            with lock:
                coordinator = reference()
                if coordinator is None or is_over.is_set():
                    return
                coordinator.sweep()
                pause = coordinator.state.pause
        except EpochalError as error:
            on_error(error)
            return
        except Exception:
            logger.exception("a sweep between epochs failed and is tried again")
        finally:
            coordinator = None
        if pause is not None and on_pause is not None:
            on_pause(pause)
            return
