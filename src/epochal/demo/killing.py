"""
Starting the driver, killing it, and starting it again until the source is drained.

Two ways to die, in turn: the driver kills itself right after a step of the protocol, leaving its
JVM to find out; or everything it started is killed from outside at a moment left to chance.
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

from epochal.demo.place import Place
from epochal.errors import EpochalError

STEPS = ("begun", "prepared", "rehearsed", "gated", "decided", "committed", "settled")

_STARTS_BEYOND_KILLS_MAX = 5
_SILENCE_S = 180.0


class DemoFailed(EpochalError):
    """The driver ended by itself before its work was done."""

    code = "demo-failed"


@dataclass(slots=True, kw_only=True)
class Progress:
    """What the audience sees."""

    drivers: int = 0
    kills: int = 0
    epoch: int = -1
    step: str = "starting Spark"
    last_kill: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Killing:
    """When one driver is to die."""

    step: str
    epochs: int
    is_from_outside: bool
    delay_s: float

    def __str__(self) -> str:
        where = "from outside, all it started" if self.is_from_outside else "by its own hand"
        return f"SIGKILL after {self.step!r} ({where})"


def plan_killings(kills: int, seed: int) -> Iterator[Killing]:
    chance = random.Random(seed)
    for number in range(kills):
        yield Killing(
            step=chance.choice(STEPS),
            epochs=chance.randint(1, 3),
            is_from_outside=number % 2 == 1,
            delay_s=chance.uniform(0.0, 0.4),
        )


def run_until_drained(
    place: Place, *, kills: int, seed: int, show: Callable[[Progress], None]
) -> Progress:
    """Run drivers one after the other; all but the last are killed."""
    progress = Progress()
    planned = plan_killings(kills, seed)
    for _ in range(kills + _STARTS_BEYOND_KILLS_MAX):
        killing = next(planned, None)
        progress.drivers += 1
        progress.step = "starting Spark"
        show(progress)
        if _run_one(place, killing, progress, show):
            return progress
    raise DemoFailed(
        f"the source was not drained after {progress.drivers} drivers",
        f"the drivers' own words are in {place.driver_log}",
    )


def _run_one(
    place: Place, killing: Killing | None, progress: Progress, show: Callable[[Progress], None]
) -> bool:
    """True if this driver drained the source before it could be killed."""
    with place.driver_log.open("ab") as log:
        driver = _start(place, killing, log.fileno())
    try:
        _follow(driver, killing, progress, show)
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
            f"its own words are in {place.driver_log}",
        )
    progress.kills += 1
    progress.last_kill = str(killing)
    show(progress)
    return False


def _start(place: Place, killing: Killing | None, log: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "epochal.demo.driver", str(place.root)]
    if killing is not None and not killing.is_from_outside:
        command += ["--die-at", f"{killing.step}/{killing.epochs}"]
    # A session of its own: its JVM and workers can be killed with it, and Ctrl-C is ours alone.
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, start_new_session=True)


def _follow(
    driver: subprocess.Popen[bytes],
    killing: Killing | None,
    progress: Progress,
    show: Callable[[Progress], None],
) -> None:
    """Read the driver's steps, and kill it from outside where that is planned."""
    epochs_left = killing.epochs if killing is not None and killing.is_from_outside else 0
    for step, epoch in _steps(driver):
        progress.step = step
        progress.epoch = progress.epoch if epoch is None else epoch
        show(progress)
        if killing is None or not epochs_left or not step.startswith(killing.step):
            continue
        epochs_left -= 1
        if epochs_left == 0:
            time.sleep(killing.delay_s)
            _kill_all(driver)


def _steps(driver: subprocess.Popen[bytes]) -> Iterator[tuple[str, int | None]]:
    """The driver's steps until it ends; a driver that says nothing for long is given up."""
    lines: queue.Queue[bytes | None] = queue.Queue()

    def read() -> None:
        for line in driver.stdout or ():
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=_SILENCE_S)
        except queue.Empty:
            raise DemoFailed(f"the driver has said nothing for {_SILENCE_S:.0f} s") from None
        if line is None:
            return
        if line.startswith(b"{"):
            told = json.loads(line)
            yield told["step"], told["epoch"]


def _kill_all(driver: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(driver.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
