"""Members of a shared journal by seeds of trouble; and every rule, broken, is objected to."""

from __future__ import annotations

import pytest

from proof import shared_journal

SEEDS = 200
"""`make proof ONLY=shared-journal` runs 20,000."""
CONTROL_SEEDS = 3_000
"""At most: the first objection ends the search."""


def test_no_seed_breaks_a_promise() -> None:
    found = {seed: breach for seed in range(SEEDS) if (breach := shared_journal.simulate(seed))}
    assert not found


@pytest.mark.parametrize("rule", shared_journal.CONTROLS)
def test_every_rule_is_needed(rule: str) -> None:
    assert any(
        shared_journal.simulate_control(rule, range(seed, seed + 1))
        for seed in range(CONTROL_SEEDS)
    )


def test_a_seed_is_replayed_to_the_letter() -> None:
    first, second = (shared_journal.Simulation(7, keeps_trace=True) for _ in range(2))
    first.run()
    second.run()
    assert first.trace
    assert first.trace == second.trace
