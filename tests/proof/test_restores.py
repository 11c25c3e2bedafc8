"""A target that goes back in time at any call: no gap is hidden, and the judge would see one."""

import pytest

from epochal.coordinator import cleanup
from epochal.testing.crash import Breach
from proof import world
from proof.restores import simulate_restores

SEEDS = range(75)
MORE = pytest.param(range(75, 750), marks=pytest.mark.proof)


def objection(seeds=SEEDS):
    for seed in seeds:
        try:
            simulate_restores(seed)
        except Breach as breach:
            return str(breach)
    return ""


@pytest.mark.parametrize("seeds", [SEEDS, MORE], ids=str)
def test_no_epoch_is_written_over_a_gap_and_nothing_that_was_decided_is_thrown_away(seeds):
    runs = [simulate_restores(seed) for seed in seeds]
    lost = [run for run in runs if any(run.world.judge.lost.values())]
    assert len(lost) >= 5


def test_the_judge_objects_to_a_sweep_that_does_not_ask(monkeypatch):
    monkeypatch.setattr(cleanup, "require_not_back", lambda *_: None)
    assert "I5" in objection(range(400))


def test_the_judge_objects_to_epochs_that_go_on_over_a_gap(monkeypatch):
    monkeypatch.setattr(cleanup, "require_not_back", lambda *_: None)
    monkeypatch.setattr(world, "require_still_committed", lambda *_, **__: None)
    assert objection().startswith(("I4", "I5", "I10"))
