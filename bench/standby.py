"""[standby_takeover] From SIGKILL of the driver to the next new epoch: a standby, a cold restart.

    python -m bench.standby FOLDER standby|cold    one driver, in a process of its own

Both write the same stream to files, with the checkpoint in the same folder. The cold driver is
started at the moment of the kill, as by a supervisor that loses no time.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.harness import Comparison
from epochal.coordinator import read_state
from epochal.logs import checkpoint_log
from epochal.protocol.state import State
from epochal.sinks.files import Files
from epochal.spark.local_session import local_session
from epochal.spark.pipeline import Pipeline

ROUNDS = 3
_ROWS = 100
_PATIENCE_S = 300.0
_LOOK_EVERY_S = 0.02
_WAITS = "waits"


def run() -> Comparison:
    comparison = Comparison(
        name="standby_takeover",
        peer_name="a cold restart",
        unit="seconds from SIGKILL to the next epoch",
        is_rate=False,
    )
    comparison.run(lambda: _takeover_s("standby"), lambda: _takeover_s("cold"), rounds=ROUNDS)
    return comparison


RUNS = {"standby_takeover": run}


def _takeover_s(how: str) -> float:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with _driver(folder, "standby") as first:
            _await_epoch(folder, above=2, generation=1)
            if how == "standby":
                with _driver(folder, "standby") as second:
                    _await((folder / f"{_WAITS}-{second.pid}").exists)
                    return _killed(first, folder)
            started_s = time.monotonic()
            os.killpg(first.pid, signal.SIGKILL)
            with _driver(folder, "cold"):
                _await_epoch(folder, above=_last(folder), generation=2)
                return time.monotonic() - started_s


def _killed(first: subprocess.Popen[bytes], folder: Path) -> float:
    started_s = time.monotonic()
    os.killpg(first.pid, signal.SIGKILL)
    _await_epoch(folder, above=_last(folder), generation=2)
    return time.monotonic() - started_s


@contextmanager
def _driver(folder: Path, how: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "bench.standby", str(folder), how]
    with (folder / "drivers.txt").open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _state(folder: Path) -> State | None:
    return read_state(checkpoint_log(folder / "checkpoint"))


def _last(folder: Path) -> int:
    """The newest epoch that was decided before the kill: it is recovered, and is not new."""
    state = _state(folder)
    return -1 if state is None or state.last is None else int(state.last.epoch)


def _await_epoch(folder: Path, *, above: int, generation: int) -> None:
    """
    Until a driver of this generation has committed a new epoch: the one after it was then decided,
    or its record says that nothing is pending.
    """

    def is_there() -> bool:
        state = _state(folder)
        if state is None or state.last is None or state.generation < generation:
            return False
        pending = state.unsettled is not None and bool(state.pending)
        return int(state.last.epoch) - pending > above

    _await(is_there)


def _await(is_so: Any) -> None:
    deadline_s = time.monotonic() + _PATIENCE_S
    while not is_so():
        if time.monotonic() > deadline_s:
            raise TimeoutError("a driver does not get on; see drivers.txt in its folder")
        time.sleep(_LOOK_EVERY_S)


def _drive(folder: Path, how: str) -> None:
    spark = local_session("bench", threads=2)

    def numbers() -> Any:
        source = spark.readStream.format("rate-micro-batch")
        return source.option("rowsPerBatch", _ROWS).option("numPartitions", 2).load()

    pipeline = Pipeline("bench", [Files(str(folder / "out"))])
    checkpoint = folder / "checkpoint"
    if how == "cold":
        pipeline.start(numbers(), checkpoint).awaitTermination()
        return
    standby = pipeline.start(numbers, checkpoint, standby=True)
    while standby.isActive:
        if standby.role.value == "waiting":
            (folder / f"{_WAITS}-{os.getpid()}").touch()
        time.sleep(0.1)
    standby.awaitTermination()


if __name__ == "__main__":
    _drive(Path(sys.argv[1]), sys.argv[2])
