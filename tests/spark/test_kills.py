"""Drivers killed with SIGKILL at each named step: two pipelines at a time, one with state."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import victim

from epochal.logs import checkpoint_log
from epochal.protocol.records import decode
from epochal.protocol.state import State
from epochal.sinks.files import Files, read_epochs
from epochal.terms import Identity, Limits, SinkName

DEATHS = (
    "plain claimed",
    "windows begun",
    "plain prepared",
    "windows rehearsed",
    "plain gated",
    "windows decided",
    "plain decided",
    "plain committed all",
    "windows settled",
)
TO_THE_END = ""


def _start(root: Path) -> subprocess.Popen[str]:
    # Into a file: the JVM outlives its driver for a moment, and would keep a pipe open.
    with (root / "driver.txt").open("a") as output:
        command = [sys.executable, victim.__file__, str(root)]
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=output, text=True
        )


def _lives(root: Path, deaths: Sequence[str]) -> Iterator[str]:
    """
    Drivers one after the other, each with one epoch more to write; what each has died of.

    While one works the next starts its Spark, and no more than that.
    """
    drivers = [_start(root)]
    try:
        for epoch, death in enumerate(deaths):
            if epoch + 1 < len(deaths):
                drivers.append(_start(root))
            victim.add_epoch(root, epoch)
            yield _live(root, drivers[epoch], death)
    finally:
        for driver in drivers:
            driver.kill()
            driver.communicate()


def _live(root: Path, driver: subprocess.Popen[str], death: str) -> str:
    note = root / "died.txt"
    note.unlink(missing_ok=True)
    driver.communicate(f"{death}\n", timeout=900)
    if driver.returncode == 0:
        return TO_THE_END
    if driver.returncode != -signal.SIGKILL:
        pytest.fail((root / "driver.txt").read_text()[-4000:])
    return note.read_text()


@pytest.mark.proof
@pytest.mark.timeout(1200)
def test_a_driver_killed_at_every_step_loses_no_row_and_repeats_none(tmp_path: Path) -> None:
    root = tmp_path / "killed"
    (root / "in").mkdir(parents=True)
    lives = [*DEATHS, TO_THE_END]
    assert list(_lives(root, lives)) == lives
    numbers = list(range(len(lives) * victim.ROWS))
    assert _column(root, "all", "id") == numbers
    assert _column(root, "odd", "id") == [n for n in numbers if n % 2]
    # The watermark ends at the last event less 5 s: windows that end by then are out, once each.
    ends = [start for start in range(0, numbers[-1], 10) if start + 10 <= numbers[-1] - 5]
    assert _column(root, "counts", "id") == ends
    assert _column(root, "counts", "total") == [sum(range(n, n + 10)) for n in ends]
    for pipeline, sinks in victim.SINKS.items():
        state = _state(root / pipeline)
        assert state.is_stopped
        assert state.unsettled is None
        for sink in sinks:
            assert _left_behind(root, state, sink) == []


def _column(root: Path, sink: str, column: str) -> list[int]:
    return sorted(read_epochs(str(victim.folder(root, sink))).to_table()[column].to_pylist())


def _state(checkpoint: Path) -> State:
    log = checkpoint_log(checkpoint)
    newest = log.numbers()[-1]
    return decode(log.read(newest) or b"", str(newest)).state


def _left_behind(root: Path, state: State, sink: str) -> list[object]:
    who = Identity(
        pipeline=state.pipeline, uid=state.uid, sink=SinkName(sink), generation=state.generation
    )
    return list(
        Files(str(victim.folder(root, sink)), name=SinkName(sink))
        .committer(who, Limits())
        .in_doubt()
    )
