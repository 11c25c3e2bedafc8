"""A target that went back in time is noticed before anything is thrown away or written there."""

import pytest

from epochal.coordinator import by_hand
from epochal.errors import OutcomeUnknown, Refused, Unsettled, WentBack
from epochal.protocol.admission import Position
from epochal.protocol.state import Accepted, GivenUp
from epochal.terms import EpochNumber, Limits
from proof.calls import SimLog, SimSink
from proof.world import Source, World

EPOCHS = 6
SWEEPS_SELDOM = Limits(sweep_every_s=1e6, commit_retry_max_s=1.0, retry_backoff_ms=(100,))


@pytest.fixture
def bench(bench):
    bench.world = World(Source.of(*[(1, 1)] * EPOCHS), ["x"])
    bench.limits = SWEEPS_SELDOM
    return bench


def before_commit_of(bench, coordinator, epoch):
    """Carry this epoch out; returns the target as it was when its rows were only prepared."""
    bench.begin(coordinator, epoch)
    coordinator.preparing()
    receipts = bench.prepare(coordinator, epoch)
    old = bench.world.targets["x"].copy()
    bench.conclude(coordinator, receipts, epoch)
    return old


def at(planned, finished):
    return Position(planned=EpochNumber(planned), finished=EpochNumber(finished))


def went_back(bench, old):
    bench.world.go_back("x", old)
    bench.calls.clear()


def untouched(bench, old, committed):
    """Nothing of the epochs that the target lists as prepared again was aborted or committed."""
    assert bench.world.targets["x"] is old
    assert len(old.prepared) == 2
    assert old.committed == committed
    assert bench.verbs("abort", "commit", "prune") == []


@pytest.fixture
def back(bench):
    """Epochs 0 to 2 were committed, and the target is as it was before the commit of 2."""
    coordinator = bench.started()
    bench.epoch(coordinator, 0)
    bench.epoch(coordinator, 1)
    old = before_commit_of(bench, coordinator, 2)
    went_back(bench, old)
    return coordinator, old, set(old.committed)


def test_a_running_driver_notices_it_at_its_next_epoch(bench, back):
    coordinator, old, committed = back
    with pytest.raises(WentBack, match="proves epochs up to 1, and epoch 2 was committed there"):
        bench.epoch(coordinator, 3)
    assert old.committed == committed
    aborted = [str(r.handle) for call in bench.calls if call.verb == "abort" for r in call.args[1]]
    assert all("-e3-" in handle for handle in aborted)
    assert len(old.prepared) == 2
    assert coordinator.state.expected == 3


def test_a_sweep_that_is_due_touches_nothing_there(bench, back):
    coordinator, old, committed = back
    bench.clock.sleep(2 * SWEEPS_SELDOM.sweep_every_s)
    with pytest.raises(WentBack, match="epoch 2"):
        bench.begin(coordinator, 3)
    untouched(bench, old, committed)


def test_an_idle_driver_notices_it_in_its_sweep(bench, back):
    coordinator, old, committed = back
    bench.clock.sleep(2 * SWEEPS_SELDOM.sweep_every_s)
    with pytest.raises(WentBack):
        coordinator.sweep()
    untouched(bench, old, committed)


def test_a_driver_that_stops_touches_nothing_there(bench, back):
    coordinator, old, committed = back
    coordinator.stop()
    untouched(bench, old, committed)


def test_a_start_notices_it_before_it_sweeps(bench, back):
    coordinator, old, committed = back
    coordinator.stop()
    with pytest.raises(WentBack, match="the target went back in time"):
        bench.coordinator("B").start(bench.start(position=at(2, 2)))
    untouched(bench, old, committed)


def test_a_start_with_a_decided_epoch_carries_nothing_out_there(bench):
    """The driver died after the decision of 2; the target has lost 1."""
    coordinator = bench.started()
    bench.epoch(coordinator, 0)
    old = before_commit_of(bench, coordinator, 1)
    bench.before["commit"] = [OutcomeUnknown("no answer")] * 20
    with pytest.raises(Unsettled):
        bench.epoch(coordinator, 2)
    bench.before.clear()
    went_back(bench, old)
    with pytest.raises(WentBack, match="epoch 1"):
        bench.coordinator("B").start(bench.start(position=at(2, 1)))
    untouched(bench, old, set(old.committed))


def test_a_target_that_goes_back_after_a_start_has_asked_is_noticed_by_the_commit(bench):
    """The driver died after the decision of 2; the target loses 1 just before 2 is committed."""
    coordinator = bench.started()
    bench.epoch(coordinator, 0)
    old = before_commit_of(bench, coordinator, 1)
    bench.before["commit"] = [OutcomeUnknown("no answer")] * 20
    with pytest.raises(Unsettled):
        bench.epoch(coordinator, 2)
    bench.before.clear()
    committed = set(old.committed)
    send = bench.send

    def send_and_go_back(call):
        if call.verb == "commit":
            bench.world.go_back("x", old)
        return send(call)

    bench.send = send_and_go_back
    with pytest.raises(WentBack, match="epoch 1"):
        bench.coordinator("B").start(bench.start(position=at(2, 1)))
    assert old.committed == committed
    assert len(old.prepared) == 2
    assert bench.verbs("abort") == []


def test_a_target_that_goes_back_while_an_epoch_is_prepared_is_noticed_before_the_decision(bench):
    coordinator = bench.started()
    bench.epoch(coordinator, 0)
    old = before_commit_of(bench, coordinator, 1)
    bench.begin(coordinator, 2)
    coordinator.preparing()
    bench.world.go_back("x", old)
    receipts = bench.prepare(coordinator, 2)
    with pytest.raises(WentBack, match="epoch 1"):
        bench.conclude(coordinator, receipts, 2)
    assert coordinator.state.expected == 2
    assert [name for name in old.prepared if "-e1-" in name]


def test_nothing_is_finished_or_aborted_by_hand_there(bench, back):
    coordinator, old, committed = back
    coordinator.stop()
    sink = SimSink(name="x", send=bench.send, actor="H")
    name = min(old.prepared)
    with pytest.raises(WentBack):
        by_hand.abort_undecided(SimLog(bench.send, "H"), sink, name=name, note="by ann")
    untouched(bench, old, committed)


# What is no sign of it


def test_a_lost_reply_to_a_commit_is_no_sign_of_it(bench):
    coordinator = bench.started()
    bench.epoch(coordinator, 0)
    bench.after["commit"] = [OutcomeUnknown("no answer")]
    bench.epoch(coordinator, 1)
    bench.epoch(coordinator, 2)
    coordinator.stop()
    bench.coordinator("B").start(bench.start(position=at(2, 2)))


@pytest.mark.parametrize("is_there", [True, False], ids=["was-committed", "was-not"])
def test_an_epoch_that_was_given_up_is_no_sign_of_it(bench, is_there):
    coordinator = bench.started()
    bench.epoch(coordinator, 0)
    troubles = bench.after if is_there else bench.before
    troubles["commit"] = [OutcomeUnknown("no answer")] * 20
    bench.before["outcome"] = [OutcomeUnknown("no answer")] * 20
    with pytest.raises(Unsettled):
        bench.epoch(coordinator, 1)
    coordinator.stop()
    bench.before.clear()
    bench.after.clear()
    word = GivenUp(epoch=EpochNumber(1), sink="x", kept_at="/kept", by="ann", because="away")
    by_hand.give_up(SimLog(bench.send, "H"), word)
    bench.world.targets["x"].prepared.clear()
    after = bench.coordinator("B")
    after.start(bench.start(position=at(1, 1)))
    bench.epoch(after, 2)
    bench.epoch(after, 3)
    after.stop()
    bench.coordinator("C").start(bench.start(position=at(3, 3)))


def test_a_sink_that_is_added_is_no_sign_of_it(bench):
    coordinator = bench.started()
    bench.epoch(coordinator, 0)
    coordinator.stop()
    bench.world.targets["y"] = type(bench.world.targets["x"])("y")
    bench.sinks = ("x", "y")
    after = bench.coordinator("B")
    after.start(bench.start(position=at(0, 0)))
    bench.epoch(after, 1)
    bench.epoch(after, 2)


# What a person may do


def word(**changes):
    numbers = {"after": EpochNumber(1), "since": EpochNumber(2), "through": EpochNumber(2)}
    return Accepted(sink="x", by="ann", because="restored", **{**numbers, **changes})


def test_what_a_person_accepts_ends_the_refusal(bench, back):
    coordinator, old, _ = back
    coordinator.stop()
    by_hand.accept(SimLog(bench.send, "H"), word())
    bench.world.judge.accepted("x")
    old.prepared.clear()
    after = bench.coordinator("B")
    after.start(bench.start(position=at(2, 2)))
    assert after.state.accepted == (word(),)
    bench.epoch(after, 3)
    bench.epoch(after, 4)
    after.stop()
    bench.coordinator("C").start(bench.start(position=at(4, 4)))


def test_nothing_is_accepted_that_a_person_did_not_see(bench, back):
    back[0].stop()
    with pytest.raises(Refused, match="epoch 2 is the newest that was committed there, not 1"):
        by_hand.accept(SimLog(bench.send, "H"), word(through=EpochNumber(1)))
