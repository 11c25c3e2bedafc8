"""
A driver that stops and says that all is clear has cleared every target, as a sink may be removed
after it: what it left prepared there would then never be listed again (I5).
"""

from __future__ import annotations

from functools import partial

import pytest

from epochal.errors import Fenced, OutcomeUnknown, Refused, RowRejected, TryAgain, Unsettled
from epochal.protocol.admission import Admission, Position
from epochal.terms import EpochNumber

AWAY = OSError("away")
UNANSWERED = OutcomeUnknown("no answer")
AFTER_0 = Position(planned=EpochNumber(0), finished=EpochNumber(0))


def start_without(bench, sink, position=None):
    sinks = tuple(name for name in bench.sinks if name != sink)
    coordinator = bench.coordinator("Z", sinks=sinks)
    coordinator.start(bench.start(sinks, position=position))
    return coordinator


def is_clear(bench):
    return bench.world.judge.truth.is_clear


def test_a_stop_that_could_not_clear_does_not_say_clear(bench2):
    coordinator = bench2.started("A")
    bench2.begin(coordinator)
    coordinator.preparing()
    bench2.prepare(coordinator)
    bench2.before["y", "in_doubt"] = [AWAY] * 10
    coordinator.stop()
    assert bench2.world.targets["y"].prepared
    assert not is_clear(bench2)
    with pytest.raises(Refused, match="y is no longer among the sinks"):
        start_without(bench2, "y")


@pytest.mark.parametrize("verb", ["abort", "in_doubt"])
def test_what_is_left_at_one_target_does_not_wait_for_another(bench2, verb):
    coordinator = bench2.started("A")
    bench2.begin(coordinator)
    coordinator.preparing()
    bench2.prepare(coordinator, attempt=1)
    receipts = bench2.prepare(coordinator, attempt=2)
    bench2.before["x", verb] = [AWAY] * 10
    coordinator.abort(receipts)
    assert bench2.world.targets["x"].prepared
    assert not bench2.world.targets["y"].prepared


def test_what_is_settled_is_on_record_also_where_losers_could_not_be_cleared(bench2):
    coordinator = bench2.started("A")
    bench2.begin(coordinator)
    coordinator.preparing()
    bench2.prepare(coordinator, attempt=1)
    bench2.conclude(coordinator, bench2.prepare(coordinator, attempt=2))
    bench2.before["y", "in_doubt"] = [AWAY] * 10
    coordinator.stop()
    assert bench2.world.judge.truth.unsettled is None
    assert not is_clear(bench2)


def test_an_abort_that_could_not_clear_is_made_up_for_at_the_stop(bench2):
    coordinator = bench2.started("A")
    bench2.begin(coordinator)
    coordinator.preparing()
    receipts = bench2.prepare(coordinator)
    bench2.before["y", "abort"] = [AWAY] * 2
    coordinator.abort(receipts)
    assert bench2.world.targets["y"].prepared
    coordinator.stop()
    assert not bench2.world.targets["y"].prepared
    assert is_clear(bench2)


def test_after_a_decided_epoch_that_could_not_be_carried_out_a_stop_is_not_clear(bench2):
    coordinator = bench2.started("A")
    bench2.begin(coordinator)
    coordinator.preparing()
    bench2.prepare(coordinator, attempt=1)
    bench2.before["x", "commit"] = [AWAY] * 1000
    with pytest.raises(Unsettled):
        bench2.conclude(coordinator, bench2.prepare(coordinator, attempt=2))
    coordinator.stop()
    assert bench2.world.targets["y"].prepared
    with pytest.raises(Refused, match="y is no longer among the sinks"):
        start_without(bench2, "y", AFTER_0)


def test_a_driver_that_only_drains_a_replay_stops_clear(bench2):
    bench2.epoch(bench2.started("A"))
    again = bench2.coordinator("B")
    again.start(bench2.start(position=Position(planned=EpochNumber(0))))
    assert bench2.begin(again) is Admission.REPLAY
    again.stop()
    assert is_clear(bench2)


def test_a_start_that_can_not_sweep_goes_on_and_does_not_make_up_for_a_crash(bench2):
    crashed = bench2.started("A")
    bench2.begin(crashed)
    crashed.preparing()
    bench2.prepare(crashed)
    again = bench2.coordinator("B")
    bench2.before["y", "in_doubt"] = [TryAgain("away")] * 10
    again.start(bench2.start())
    again.stop()
    assert not is_clear(bench2)
    with pytest.raises(Refused, match="y is no longer among the sinks"):
        start_without(bench2, "y")


def test_a_driver_that_closed_its_targets_does_not_say_that_they_are_clear(bench2):
    """As a client of Spark Connect does that could not start its query after all."""
    crashed = bench2.started("A")
    bench2.begin(crashed)
    crashed.preparing()
    bench2.prepare(crashed, attempt=1)
    bench2.before["x", "commit"] = [AWAY] * 1000
    with pytest.raises(Unsettled):
        bench2.conclude(crashed, bench2.prepare(crashed, attempt=2))
    bench2.before.clear()
    bench2.before["y", "in_doubt"] = [TryAgain("away")] * 10
    again = bench2.coordinator("B")
    again.start(bench2.start(position=Position(planned=EpochNumber(0))))
    again.hand_over()
    again.stop()
    assert bench2.world.targets["y"].prepared
    assert not is_clear(bench2)


def test_a_start_that_failed_after_a_clear_stop_leaves_it_clear(bench2):
    before = bench2.started("A")
    bench2.epoch(before)
    before.stop()
    again = bench2.coordinator("B")
    bench2.before["y", "newest"] = [TryAgain("away")]
    with pytest.raises(TryAgain):
        again.start(bench2.start(position=AFTER_0))
    again.stop()
    assert is_clear(bench2)
    start_without(bench2, "y", AFTER_0)


def test_nothing_in_the_way_of_an_abort_hides_why_the_epoch_is_thrown_away(bench2):
    coordinator = bench2.started("A")
    bench2.begin(coordinator)
    coordinator.preparing()
    receipts = bench2.prepare(coordinator)
    bench2.before["x", "rehearse"] = [RowRejected("no such column")]
    bench2.before["y", "abort"] = [ValueError("a driver library's own")]
    with pytest.raises(RowRejected, match="no such column"):
        bench2.conclude(coordinator, receipts)
    coordinator.stop()
    assert not bench2.world.targets["y"].prepared


def test_a_target_that_can_not_be_closed_keeps_no_other_open(bench2, monkeypatch):
    coordinator = bench2.started("A")
    closed = []
    for name, committer in coordinator._targets.committers.items():
        monkeypatch.setattr(committer, "close", partial(_close, name, closed))
    coordinator.stop()
    assert closed == ["x", "y"]
    assert is_clear(bench2)


def _close(name, closed):
    closed.append(name)
    raise ValueError("a driver library's own")


def test_a_stop_after_tasks_were_cancelled_does_not_say_that_all_is_clear(bench2):
    coordinator = bench2.started("A")
    bench2.begin(coordinator)
    coordinator.preparing()
    coordinator.note_late_tasks()
    coordinator.abort({})
    coordinator.stop()
    truth = bench2.world.judge.truth
    assert (truth.is_stopped, truth.is_clear) == (True, False)
    bench2.prepare(coordinator)
    with pytest.raises(Refused, match="y is no longer among the sinks"):
        start_without(bench2, "y")
    again = bench2.started("B")
    assert not bench2.world.targets["y"].prepared
    again.stop()
    start_without(bench2, "y")


def test_a_driver_that_could_not_clear_has_stopped_all_the_same(bench2):
    coordinator = bench2.started("A")
    bench2.begin(coordinator)
    coordinator.preparing()
    bench2.prepare(coordinator)
    bench2.before["y", "in_doubt"] = [AWAY] * 10
    coordinator.stop()
    assert bench2.world.judge.truth.is_stopped
    bench2.before.clear()
    bench2.coordinator("B").start(bench2.start(fence=False))


def test_a_driver_whose_last_word_went_unanswered_begins_nothing_more(bench):
    coordinator = lost_answer(bench)
    calls = len(bench.calls)
    with pytest.raises(Unsettled, match="did not answer"):
        bench.begin(coordinator)
    assert len(bench.calls) == calls


def lost_answer(bench):
    """Rows are written again after the decision, and nobody knows whether that is on record."""
    coordinator = bench.started("A")
    bench.begin(coordinator)
    coordinator.preparing()
    receipts = bench.prepare(coordinator)
    bench.world.expire("x", [str(receipt.handle) for receipt in receipts["x"]])
    with pytest.raises(Unsettled):
        bench.conclude(coordinator, receipts)
    assert bench.begin(coordinator) is Admission.REPLAY
    bench.before["put_if_absent"] = [UNANSWERED] * 1000
    with pytest.raises(OutcomeUnknown):
        coordinator.rewrite(bench.prepare(coordinator, attempt=5))
    bench.before.clear()
    return coordinator


def test_a_fenced_driver_that_goes_on_is_fenced_again(bench):
    coordinator = bench.started("A")
    bench.started("B")
    with pytest.raises(Fenced):
        bench.epoch(coordinator)
    with pytest.raises(Fenced):
        bench.begin(coordinator)
