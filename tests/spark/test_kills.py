"""
Drivers killed at named steps, frozen and thawed behind their successor, and with their JVM killed.

Every row of every target is compared in the end. `make proof KILLS=50` is the long form.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import victim
from kill_stage import KILLS, SEED, TO_THE_END, expected, judge, lives, running_targets

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


def deaths(count: int, seed: int) -> Iterator[str]:
    """Every step first, then steps by chance; two of three are plain kills."""
    yield from EVERY_STEP[:count]
    chance = random.Random(seed)
    for _ in range(count - len(EVERY_STEP)):
        how = chance.choice(("kill", "kill", "kill", "kill", "freeze", "jvm"))
        yield f"{how} {chance.choice(tuple(victim.QUERIES))} {chance.choice(STEPS)}"


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
