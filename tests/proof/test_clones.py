"""Two drivers with copies of one log: no epoch is carried out twice, and the judge would see it."""

from dataclasses import replace

import pytest

from epochal.coordinator import cleanup
from epochal.protocol.recovery import Verdict
from epochal.terms import UNCLAIMED
from epochal.testing.crash import Breach
from proof import simulation
from proof.clones import simulate_clones
from proof.world import Target

SEEDS = range(50)
MORE = pytest.param(range(50, 500), marks=pytest.mark.proof)


def objections(seeds=SEEDS):
    for seed in seeds:
        try:
            simulate_clones(seed)
        except Breach as breach:
            yield str(breach)


@pytest.mark.parametrize("seeds", [SEEDS, MORE], ids=str)
def test_copies_of_one_log_carry_no_epoch_out_twice_and_lose_none(seeds):
    assert list(objections(seeds)) == []


def test_the_judge_objects_to_an_epoch_that_both_carry_out(monkeypatch):
    monkeypatch.setattr(Target, "_take", lambda *_: None)
    assert any(one.startswith("I1") for one in objections())


def test_the_judge_objects_to_a_ledger_row_of_other_handles_taken_for_proof(monkeypatch):
    commit = Target.commit

    def any_row(self, identity, epoch, receipts, after=None):
        if (identity.uid, epoch) not in self.epochs:
            commit(self, identity, epoch, receipts, after)

    monkeypatch.setattr(Target, "commit", any_row)
    assert any("is taken for done" in one for one in objections())


def test_the_judge_objects_to_a_sweep_of_what_the_other_side_prepared(monkeypatch):
    judge = cleanup.judge

    def abort_all(found, state):
        return replace(judge(found, state), verdict=Verdict.ABORT)

    monkeypatch.setattr(cleanup, "judge", abort_all)
    assert any("I5" in one for one in objections())


def test_the_judge_objects_to_drivers_that_share_a_claim(monkeypatch):
    real = simulation.Environment
    monkeypatch.setattr(
        simulation,
        "Environment",
        lambda **given: real(**{**given, "new_claim": lambda: UNCLAIMED}),
    )
    assert any(one.startswith(("I5", "I6")) for one in objections())
