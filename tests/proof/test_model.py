"""Every interleaving at small size; and for each rule, the one that breaks without it."""

import logging
from dataclasses import replace

import pytest

from epochal.coordinator import cleanup, coordinator
from epochal.coordinator.commit import Commit
from epochal.coordinator.coordinator import Coordinator
from epochal.coordinator.journal import Journal
from epochal.coordinator.rehearsal import Rehearsal
from epochal.errors import PreparedLost
from epochal.protocol import invariants, recovery, state
from epochal.protocol.admission import Admission
from epochal.terms import Proof
from proof.calls import SimCommitter
from proof.model import explore, main
from proof.scenarios import SCENARIOS

BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
BY_NAME["crash-then-late"] = replace(BY_NAME["takeover-faults"], kinds=frozenset({"crash", "late"}))


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


LARGE = {"fault", "deleted"}
"""Quick scenarios that still take half a minute each."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(one.name, marks=[pytest.mark.proof] if one.name in LARGE else [])
        for one in SCENARIOS
        if one.is_quick
    ],
)
def test_no_interleaving_breaks_a_promise(name):
    walk = explore(BY_NAME[name])
    assert walk.breach is None, "\n".join(walk.trace)
    assert walk.is_complete
    assert walk.states > 500
    assert walk.ends > 10


def test_the_run_prints_states_transitions_and_bounds(capsys):
    assert main(["--only", "empty", "--jobs", "1"]) == 0
    printed = capsys.readouterr().out
    assert " states, " in printed
    assert "1 drivers, 2 sinks, 3 epochs of 1 tasks, 1 faults" in printed
    assert "0 of them not walked to the end, 0 breaches" in printed


def test_a_bound_that_ends_a_walk_is_reported():
    walk = explore(BY_NAME["takeover"], seconds_max=0.01)
    assert not walk.is_complete
    assert "NOT COMPLETE" in str(walk)


def objects(rule, *names):
    """The model checker finds the interleaving that breaks without what was patched away."""
    for name in names:
        walk = explore(BY_NAME[name], seconds_max=60)
        if walk.breach is not None:
            assert rule == "any" or walk.breach.rule in rule.split(), walk.breach
            assert len(walk.trace) > 5
            return walk.trace
    raise AssertionError("nobody objects")


def never_lists(self, number, state, **more):
    return number, state


def test_without_a_list_after_the_put_a_driver_that_slept_decides(monkeypatch):
    monkeypatch.setattr(Journal, "_above_pauses", never_lists)
    trace = objects("I1 I3", "deleted")
    assert any("delete" in step for step in trace)


def test_a_gap_read_as_the_end_lets_a_driver_that_slept_decide(monkeypatch):
    def next_slot_only(self, number, state, **more):
        if number + 1 in self._log.numbers():
            raise self._fenced("taken")
        return number, state

    monkeypatch.setattr(Journal, "_above_pauses", next_slot_only)
    objects("I1 I3", "deleted")


def test_without_a_nonce_somebody_elses_record_is_taken_for_ones_own(monkeypatch):
    monkeypatch.setattr(Journal, "_holds", lambda self, number, nonce: True)
    objects("any", "fault")


def test_an_unanswered_decision_taken_for_failed_and_aborted_stands_all_the_same(monkeypatch):
    real = Journal.append

    def append(self, *facts, **more):
        try:
            real(self, *facts, **more)
        finally:
            self.is_halted = False

    monkeypatch.setattr(Journal, "append", append)
    trace = objects("I5", "faults")
    assert any(step.startswith("lands late") for step in trace)


def test_claims_outside_the_sequence_let_a_superseded_driver_decide(monkeypatch):
    real = Journal.claim

    def claim(self, follow, *kind, **named):
        number, before = self._newest()
        if before is None:
            return real(self, follow, *kind, **named)
        self._number, self._state = number, follow(before)
        return self._state

    monkeypatch.setattr(Journal, "claim", claim)
    objects("any", "takeover", "faults")


def test_committing_before_the_decision_shows_rows_of_none(monkeypatch):
    real = Coordinator._decide

    def decide(self, receipts, offsets):
        for sink, some in receipts.items():
            self._targets.committers[sink].commit(self._open_epoch, some)
        real(self, receipts, offsets)

    monkeypatch.setattr(Coordinator, "_decide", decide)
    objects("I3", "faults")


def test_deciding_what_was_not_rehearsed_is_found(monkeypatch):
    def examine(self, state, epoch, receipts, frame):
        self._tracker.prepared(receipts)

    monkeypatch.setattr(Rehearsal, "examine", examine)
    objects("I3", "faults")


def test_without_a_fence_check_a_superseded_driver_aborts(monkeypatch):
    monkeypatch.setattr(Journal, "require_newest", lambda self: None)
    objects("I7", "fault")


def test_a_zombie_that_ignores_later_generations_aborts_their_work(monkeypatch):
    ignore = lambda mine, seen, where: None  # noqa: E731
    monkeypatch.setattr(Journal, "require_newest", lambda self: None)
    monkeypatch.setattr(invariants, "require_newest", ignore)
    monkeypatch.setattr(recovery, "require_newest", ignore)
    objects("any", "fault")


def test_aborting_what_a_decision_names_loses_rows(monkeypatch):
    monkeypatch.setattr(state.State, "named", property(lambda self: frozenset()))
    objects("I5", "thrown-away", "faults", "patient")


def test_losers_that_nobody_aborts_stay(monkeypatch):
    monkeypatch.setattr(cleanup, "abort_judged", lambda committer, judged, state: None)
    objects("I5", "attempts")


def test_an_unknown_outcome_taken_for_done_drops_a_decision(monkeypatch):
    monkeypatch.setattr(Commit, "_is_proven", lambda self, group: True)
    objects("any", "faults")


def test_an_unknown_outcome_taken_for_lost_writes_rows_twice(monkeypatch):
    real = SimCommitter.outcome

    def outcome(self, epoch, receipt):
        proof = real(self, epoch, receipt)
        return Proof.ABORTED if proof is Proof.UNKNOWN else proof

    monkeypatch.setattr(SimCommitter, "outcome", outcome)
    objects("I4", "crash-then-late")


def test_lost_rows_that_are_dropped_are_missed(monkeypatch):
    real = Commit._ended

    def ended(self, group, result, pending):
        real(self, group, None if isinstance(result, PreparedLost) else result, pending)

    monkeypatch.setattr(Commit, "_ended", ended)
    objects("I4", "thrown-away")


def test_other_rows_written_again_are_found(monkeypatch):
    monkeypatch.setattr(recovery, "_is_equal", lambda *facts: True)
    objects("I4", "thrown-away-other")


def test_an_empty_epoch_that_is_skipped_is_missed(monkeypatch):
    real = Coordinator.conclude

    def conclude(self, receipts, **more):
        if any(receipts.values()):
            real(self, receipts, **more)
        else:
            self.abort({})

    monkeypatch.setattr(Coordinator, "conclude", conclude)
    objects("any", "empty")


def test_a_decided_epoch_that_is_written_again_is_found(monkeypatch):
    monkeypatch.setattr(coordinator, "admit_epoch", lambda *_, **__: Admission.FRESH)
    objects("any", "faults")


def test_a_start_that_does_not_carry_out_what_is_decided_gets_stuck(monkeypatch):
    monkeypatch.setattr(Coordinator, "_recover", lambda self: self._cleanup.sweep())
    objects("any", "faults")
