"""
Drivers killed at named steps, frozen and thawed behind their successor, and with their JVM killed.

Every row of every target is compared in the end. `make proof KILLS=50` is the long form.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import victim
from kill_stage import expected, judge, running_targets
from servers.processes import await_paused

KILLS = int(os.environ.get("EPOCHAL_KILLS", "13"))
SEED = int(os.environ.get("EPOCHAL_KILLS_SEED", "20261117"))
EVERY_STEP = (
    "kill plain claimed",
    "kill windows begun",
    "freeze joined prepared",
    "kill plain prepared",
    "jvm windows prepared",
    "kill windows rehearsed",
    "freeze plain gated",
    "kill joined gated",
    "jvm joined decided",
    "kill windows decided",
    "freeze windows decided",
    "kill plain committed topic",
    "kill joined settled",
)
STEPS = ("begun", "prepared", "rehearsed", "gated", "decided", "committed table", "settled")
TO_THE_END = ""
_ENDS_WITHIN_S = 300


def deaths(count: int, seed: int) -> Iterator[str]:
    """Every step first, then steps by chance; two of three are plain kills."""
    yield from EVERY_STEP[:count]
    chance = random.Random(seed)
    for _ in range(count - len(EVERY_STEP)):
        how = chance.choice(("kill", "kill", "kill", "kill", "freeze", "jvm"))
        yield f"{how} {chance.choice(tuple(victim.QUERIES))} {chance.choice(STEPS)}"


class Driver:
    """One life of the driver, in a process group of its own with its JVM."""

    def __init__(self, root: Path, program: str) -> None:
        self._root = root
        # Into a file: the JVM outlives its driver for a moment, and would keep a pipe open.
        with self._output.open("a") as output:
            self._process = subprocess.Popen(
                [sys.executable, program, str(root)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                text=True,
                start_new_session=True,
            )

    @property
    def _output(self) -> Path:
        return self._root / "driver.txt"

    def live(self, death: str) -> str:
        """Let it work until it dies, is frozen, or has nothing left to do; returns which."""
        note = self._root / victim.DIED
        note.unlink(missing_ok=True)
        assert self._process.stdin is not None
        self._process.stdin.write(f"{death}\n")
        self._process.stdin.close()
        if death.startswith("freeze") and await_paused(self._process, _ENDS_WITHIN_S):
            return note.read_text()
        code = self._process.wait(_ENDS_WITHIN_S)
        if code == 0:
            return TO_THE_END
        if code != -signal.SIGKILL and not death.startswith("jvm"):
            pytest.fail(f"exit code {code}: {self._output.read_text()[-4000:]}")
        return note.read_text()

    def thaw(self) -> None:
        """It goes on where it was frozen, and must end by itself: its successor has claimed."""
        os.killpg(self._process.pid, signal.SIGCONT)
        assert self._process.wait(_ENDS_WITHIN_S) != 0, "a fenced driver ended as if all were well"

    def kill(self) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self._process.wait()


def lives(root: Path, ends: Sequence[str], program: str = victim.__file__) -> Iterator[str]:
    """
    Drivers one after the other, each with one epoch more to write; how each has ended.

    While one works the next starts its Spark, and no more than that. A frozen one is thawed when
    its successor has ended.
    """
    frozen: Driver | None = None
    drivers = [Driver(root, program)]
    try:
        for epoch, death in enumerate(ends):
            if epoch + 1 < len(ends):
                drivers.append(Driver(root, program))
            victim.add_epoch(root, epoch)
            yield drivers[epoch].live(death)
            if frozen is not None:
                frozen.thaw()
            frozen = drivers[epoch] if death.startswith("freeze") else None
    finally:
        for driver in drivers:
            driver.kill()


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    with running_targets(tmp_path) as folder:
        yield folder


@pytest.mark.proof
@pytest.mark.timeout(7200)
def test_a_driver_that_dies_at_any_step_loses_no_row_and_repeats_none(root: Path) -> None:
    ends = [*deaths(KILLS, SEED), TO_THE_END]
    assert list(lives(root, ends)) == ends
    numbers = range(len(ends) * victim.ROWS)
    for pipeline, rows in expected(numbers).items():
        judge(root, pipeline, rows)
