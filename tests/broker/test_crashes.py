"""Whatever was acknowledged is there after a crash, at any change of the disk."""

from __future__ import annotations

import itertools
import random
from copy import deepcopy

import pytest
from history import LIMITS, Crash, History, judge
from memory_disk import MemoryDisk
from table import Table

STEPS = 45


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("is_synced", [False, True], ids=["crash", "power-loss"])
def test_a_crash_at_any_change_keeps_every_promise(seed: int, is_synced: bool) -> None:
    crash_at = 0
    chance = random.Random(seed)
    while True:
        crash_at += 1
        disk = MemoryDisk()
        disk.crash_at = crash_at
        history = History(seed, disk, is_synced=is_synced)
        try:
            history.run(STEPS)
        except Crash:
            pass
        else:
            break
        found = disk.after_power_loss(chance) if is_synced else disk.restarted()
        judge(history, found)
    assert crash_at > STEPS


def test_a_crash_during_recovery_keeps_every_promise() -> None:
    for crash_at in (40, 90, 140):
        disk = MemoryDisk()
        disk.crash_at = crash_at
        history = History(crash_at, disk, is_synced=False)
        with pytest.raises(Crash):
            history.run(STEPS * 8)
        for again in itertools.count(1):
            found = disk.restarted()
            found.crash_at = again
            try:
                Table(found, **LIMITS)
            except Crash:
                judge(copied(history), found.restarted())
            else:
                break


def copied(history: History) -> History:
    fresh = History(0, MemoryDisk(), is_synced=history.is_synced)
    fresh.promise, fresh.open, fresh.sent = deepcopy((history.promise, history.open, history.sent))
    return fresh


@pytest.mark.parametrize("seed", range(6))
def test_a_restart_brings_back_the_same_state(seed: int) -> None:
    history = History(seed, MemoryDisk(), is_synced=False)
    history.run(150)
    before = sorted(map(repr, history.table.broker.state.known()))
    again = Table(history.disk.restarted(), **LIMITS)
    assert sorted(map(repr, again.broker.state.known())) == before


def test_the_judge_sees_a_lost_row() -> None:
    history = History(3, MemoryDisk(), is_synced=False)
    history.run(60)
    history.promise.visible.add(b"never written")
    with pytest.raises(AssertionError, match="J1"):
        judge(history, history.disk.restarted())


def test_the_judge_sees_what_was_aborted_and_shows() -> None:
    history = History(3, MemoryDisk(), is_synced=False)
    history.run(60)
    history.promise.hidden.add(next(iter(history.promise.visible)))
    with pytest.raises(AssertionError, match="J3"):
        judge(history, history.disk.restarted())
