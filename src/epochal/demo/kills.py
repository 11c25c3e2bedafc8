"""
The loop that starts the driver, kills it, and starts it again until the source is drained.

Two kinds of kill alternate: the driver sends itself SIGKILL right after a step of the protocol, so
that its JVM outlives it; or the whole process group is killed from outside at a random moment after
that step.
"""

from __future__ import annotations

import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from epochal.demo.workspace import Workspace
from epochal.errors import EpochalError

STEPS = ("begun", "prepared", "rehearsed", "gated", "decided", "committed", "settled")

_STARTS_BEYOND_KILLS_MAX = 5
_SILENCE_MAX_S = 900.0


class DemoFailed(EpochalError):
    """A driver ended without being killed and before the source was drained."""

    code = "demo-failed"


@dataclass(slots=True, kw_only=True)
class Progress:
    """What is shown while the demonstration runs."""

    drivers: int = 0
    kills: int = 0
    epoch: int = -1
    step: str = "starting Spark"
    last_kill: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """When and how one driver is killed: at the `epochs`-th time that it reaches `step`."""

    step: str
    epochs: int
    is_from_outside: bool
    delay_s: float

    def __str__(self) -> str:
        where = "the whole process group" if self.is_from_outside else "the driver alone"
        return f"SIGKILL after {self.step!r} ({where})"


def plan_kills(kills: int, seed: int) -> Iterator[Kill]:
    chance = random.Random(seed)
    for number in range(kills):
        yield Kill(
            step=chance.choice(STEPS),
            epochs=chance.randint(1, 3),
            is_from_outside=number % 2 == 1,
            delay_s=chance.uniform(0.0, 0.4),
        )


def run_until_drained(
    workspace: Workspace, *, kills: int, seed: int, show: Callable[[Progress], None]
) -> Progress:
    """Run drivers one after the other; all but the last are killed."""
    progress = Progress()
    planned = plan_kills(kills, seed)
    for _ in range(kills + _STARTS_BEYOND_KILLS_MAX):
        kill = next(planned, None)
        progress.drivers += 1
        progress.step = "starting Spark"
        show(progress)
        if _run_one(workspace, kill, progress, show):
            return progress
    raise DemoFailed(
        f"the source was not drained after {progress.drivers} drivers",
        f"the drivers' output is in {workspace.driver_log}",
    )


def _run_one(
    workspace: Workspace, kill: Kill | None, progress: Progress, show: Callable[[Progress], None]
) -> bool:
    """Return True if this driver drained the source before it was killed."""
    with workspace.driver_log.open("ab") as log:
        driver = _start(workspace, kill, log.fileno())
    try:
        _follow(driver, kill, progress, show)
    except queue.Empty:
        _kill_all(driver)
        raise DemoFailed(
            f"driver {progress.drivers} has printed nothing for {_SILENCE_MAX_S:.0f} s",
            f"its output is in {workspace.driver_log}",
        ) from None
    except BaseException:
        _kill_all(driver)
        raise
    code = driver.wait()
    _kill_all(driver)
    if code == 0:
        return True
    if code != -signal.SIGKILL:
        raise DemoFailed(
            f"driver {progress.drivers} ended with exit code {code}",
            f"its output is in {workspace.driver_log}",
        )
    progress.kills += 1
    progress.last_kill = str(kill)
    show(progress)
    return False


def _start(workspace: Workspace, kill: Kill | None, log: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "epochal.demo.driver", str(workspace.root)]
    if kill is not None and not kill.is_from_outside:
        command += ["--die-at", f"{kill.step}/{kill.epochs}"]
    # In its own session: its JVM and workers are killed with it, and Ctrl-C does not reach it.
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, start_new_session=True)


def _follow(
    driver: subprocess.Popen[bytes],
    kill: Kill | None,
    progress: Progress,
    show: Callable[[Progress], None],
) -> None:
    """Read the driver's steps, and kill its process group where that is planned."""
    epochs_left = kill.epochs if kill is not None and kill.is_from_outside else 0
    for step, epoch in _steps(driver):
        progress.step = step
        progress.epoch = progress.epoch if epoch is None else epoch
        show(progress)
        if kill is None or not epochs_left or not step.startswith(kill.step):
            continue
        epochs_left -= 1
        if epochs_left == 0:
            time.sleep(kill.delay_s)
            _kill_all(driver)


def _steps(driver: subprocess.Popen[bytes]) -> Iterator[tuple[str, int | None]]:
    """Yield the driver's steps until it ends. Raises `queue.Empty` after a long time without."""
    lines: queue.Queue[bytes | None] = queue.Queue()

    def read() -> None:
        for line in driver.stdout or ():
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        line = lines.get(timeout=_SILENCE_MAX_S)
        if line is None:
            return
        if line.startswith(b"{"):
            printed = json.loads(line)
            yield printed["step"], printed["epoch"]


def _kill_all(driver: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(driver.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
