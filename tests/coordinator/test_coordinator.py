"""The coordinator's verbs, one rule at a time; their interleavings are the model checker's."""

from dataclasses import replace

import pytest

from epochal.contract import Begin
from epochal.coordinator import Coordinator, Environment
from epochal.coordinator.journal import Journal
from epochal.coordinator.targets import by_name
from epochal.errors import (
    Fenced,
    IllegalMove,
    InvariantBroken,
    Misconfigured,
    OutcomeUnknown,
    PreparedLost,
    Refused,
    RowRejected,
    TryAgain,
    Unsettled,
)
from epochal.logs import MemoryLog
from epochal.protocol.admission import Admission, Position
from epochal.protocol.machine import Phase
from epochal.protocol.records import decode
from epochal.protocol.state import RecordKind, State, claimed, decided, settled, sinks_done
from epochal.sinks.memory import Memory
from epochal.terms import UNCLAIMED, Decision, EpochNumber, Mark, Offsets, Uid
from proof.calls import SimCommitter
from proof.world import Source, World


def kinds(bench):
    return [decode(call.args[1], "").kind for call in bench.calls if call.verb == "put_if_absent"]


def test_the_verbs_of_an_epoch_come_in_their_order(bench):
    coordinator = bench.started()
    bench.calls.clear()
    bench.epoch(coordinator)
    assert bench.verbs("prepare", "rehearse", "put_if_absent", "numbers", "commit") == [
        "x.prepare",
        "x.prepare",
        "x.rehearse",
        "put_if_absent",
        "numbers",
        "x.commit",
    ]
    assert [step for step, _ in bench.watched] == [
        "claimed",
        "begun",
        "prepared",
        "rehearsed",
        "gated",
        "decided",
        "committed x",
        "settled",
    ]


def test_an_epoch_costs_one_put_in_steady_state(bench2):
    coordinator = bench2.started()
    bench2.epoch(coordinator, 0)
    bench2.calls.clear()
    bench2.epoch(coordinator, 1)
    assert kinds(bench2) == [RecordKind.COMMIT]


def test_an_empty_epoch_is_decided_and_settled_like_others(bench):
    coordinator = bench.started()
    bench.epoch(coordinator, 0)
    bench.epoch(coordinator, 1)
    bench.epoch(coordinator, 2)
    coordinator.stop()
    assert bench.world.judge.truth.last.epoch == 2
    bench.world.judge.at_rest(bench.world)


def test_a_pipeline_needs_sinks_of_different_names(bench):
    with pytest.raises(Misconfigured, match="at least one sink"):
        Coordinator(log=MemoryLog(), sinks=[])
    with pytest.raises(Misconfigured, match="share the name x"):
        bench.coordinator(sinks=["x", "x"])


def test_nothing_works_before_the_start(bench):
    with pytest.raises(Misconfigured, match="has not been started"):
        bench.coordinator().begin(EpochNumber(0))


def test_an_epoch_that_begins_while_another_is_open_is_refused(bench):
    coordinator = bench.started()
    bench.begin(coordinator)
    with pytest.raises(IllegalMove, match="but the epoch is active"):
        bench.begin(coordinator)


# Before the decision everything can be thrown away


@pytest.mark.parametrize("error", [RowRejected("never"), TryAgain("busy"), OSError("down")])
def test_a_failed_rehearsal_aborts_the_epoch(bench, error):
    coordinator = bench.started()
    bench.before["rehearse"] = [error]
    with pytest.raises(type(error)):
        bench.epoch(coordinator)
    assert coordinator.phase is Phase.ABORTED
    assert not bench.world.targets["x"].prepared
    assert bench.verbs("commit") == []


def test_offsets_that_changed_meanwhile_abort_the_epoch(bench):
    coordinator = bench.started()
    bench.begin(coordinator)
    coordinator.preparing()
    receipts = bench.prepare(coordinator)
    with pytest.raises(Refused, match="offsets changed while"):
        coordinator.conclude(
            receipts, offsets=lambda: Offsets(digest="other"), began_with=bench.offsets(0)
        )
    assert not bench.world.targets["x"].prepared
    assert bench.world.judge.truth.last is None


def test_receipts_that_are_not_ours_abort_the_epoch(bench):
    coordinator = bench.started()
    bench.begin(coordinator)
    coordinator.preparing()
    receipts = bench.prepare(coordinator)
    receipts["x"] += bench.prepare(coordinator, attempt=2)["x"]
    with pytest.raises(InvariantBroken, match="I6"):
        bench.conclude(coordinator, receipts)
    assert bench.visible() == []


def test_an_abort_whose_target_is_away_is_no_error(bench):
    coordinator = bench.started()
    bench.begin(coordinator)
    bench.before["in_doubt"] = [OSError("down")]
    coordinator.abort({})
    assert coordinator.phase is Phase.ABORTED


def test_what_late_attempts_left_is_cleared_by_the_next_sweep_and_at_the_stop(bench):
    coordinator = bench.started()
    bench.epoch(coordinator, 0)
    bench.prepare(coordinator, 0, attempt=77)
    bench.clock.sleep(coordinator._limits.sweep_every_s)
    bench.begin(coordinator, 1)
    assert not bench.world.targets["x"].prepared
    coordinator.preparing()
    bench.conclude(coordinator, bench.prepare(coordinator, 1), 1)
    bench.prepare(coordinator, 0, attempt=78)
    coordinator.stop()
    assert not bench.world.targets["x"].prepared


# The decision


def test_an_unanswered_decision_is_neither_aborted_nor_committed(bench):
    coordinator = bench.started()
    bench.begin(coordinator)
    coordinator.preparing()
    receipts = bench.prepare(coordinator)
    bench.calls.clear()
    bench.before["put_if_absent"] = [OutcomeUnknown("no answer")] * 1000
    with pytest.raises(OutcomeUnknown):
        bench.conclude(coordinator, receipts)
    coordinator.stop()
    assert bench.verbs("commit", "abort") == []
    assert len(bench.world.targets["x"].prepared) == 2


def test_a_door_that_aborts_after_an_unanswered_decision_changes_nothing(bench):
    coordinator = bench.started()
    bench.begin(coordinator)
    coordinator.preparing()
    receipts = bench.prepare(coordinator)
    bench.before["put_if_absent"] = [OutcomeUnknown("no answer")] * 1000
    with pytest.raises(OutcomeUnknown):
        bench.conclude(coordinator, receipts)
    coordinator.abort(receipts)
    assert bench.verbs("abort") == []


def test_a_superseded_driver_decides_and_aborts_nothing(bench):
    old = bench.started("A")
    bench.begin(old)
    old.preparing()
    receipts = bench.prepare(old)
    bench.started("B")
    bench.calls.clear()
    with pytest.raises(Fenced):
        bench.conclude(old, receipts)
    old.stop()
    assert bench.verbs("commit", "abort") == []


def test_a_superseded_driver_whose_epoch_fails_aborts_nothing(bench):
    old = bench.started("A", gates=[lambda epoch: "no"])
    bench.begin(old)
    old.preparing()
    receipts = bench.prepare(old)
    bench.started("B")
    bench.calls.clear()
    with pytest.raises(Fenced):
        bench.conclude(old, receipts)
    assert bench.verbs("abort", "in_doubt") == []


def test_a_driver_whose_log_was_moved_away_commits_nothing(bench):
    coordinator = bench.started("A")
    bench.begin(coordinator)
    coordinator.preparing()
    receipts = bench.prepare(coordinator)
    bench.world.log.records.clear()
    with pytest.raises(InvariantBroken, match="moved or removed"):
        bench.conclude(coordinator, receipts)
    coordinator.stop()
    assert bench.verbs("commit", "abort") == []
    assert bench.visible() == []


def test_a_claim_alone_is_enough_to_fence(bench):
    bench.started("A")
    new = bench.started("B")
    assert new.state.generation == 2
    assert new.identity("x").generation == 2


def test_a_driver_that_is_refused_has_claimed_nothing(bench):
    running = bench.started("A")
    other = bench.coordinator("B")
    wrong = bench.start(position=Position(planned=EpochNumber(7), finished=EpochNumber(7)))
    with pytest.raises(Refused):
        other.start(wrong)
    bench.epoch(running)


def test_with_fencing_off_a_running_driver_is_left_alone(bench):
    running = bench.started("A")
    with pytest.raises(Refused, match="fence_on_start is off"):
        bench.coordinator("B").start(bench.start(fence=False))
    bench.epoch(running)
    running.stop()
    bench.coordinator("C").start(bench.start(fence=False, position=_at(0, 0)))


# After the decision everything can be repeated


def _at(planned, finished):
    return Position(
        planned=EpochNumber(planned), finished=None if finished is None else EpochNumber(finished)
    )


def unsettled(bench, error, times=1000):
    """Epoch 0 decided by A, and not carried out."""
    coordinator = bench.started("A")
    bench.before["commit"] = [error] * times
    with pytest.raises(Unsettled):
        bench.epoch(coordinator)
    bench.before.clear()
    return coordinator


def test_a_start_carries_out_what_is_decided_first(bench):
    unsettled(bench, OSError("down")).stop()
    bench.calls.clear()
    coordinator = bench.coordinator("B")
    coordinator.start(bench.start(position=_at(0, None)))
    assert len(bench.visible()) == 2
    assert kinds(bench) == [RecordKind.CLAIM, RecordKind.SETTLED]
    assert bench.begin(coordinator, 0) is Admission.REPLAY
    assert bench.begin(coordinator, 1) is Admission.FRESH


def test_a_start_takes_over_from_a_driver_that_goes_on_meanwhile(bench):
    """Epochs end between a look at the log and the look at the checkpoint."""
    bench = replace(bench, world=World(Source.of(*[(1,)] * 6), bench.sinks))
    busy, done = bench.started("A"), []

    def position():
        for _ in range(2 if len(done) < 4 else 0):
            bench.epoch(busy, len(done))
            done.append(len(done))
        return _at(done[-1], done[-1])

    successor = bench.coordinator("B")
    successor.start(bench.start(), position=position)
    with pytest.raises(Fenced):
        bench.epoch(busy, len(done))
    bench.epoch(successor, len(done))
    assert len(bench.visible()) == len(done) + 1


@pytest.mark.parametrize("epoch", [0, 1])
def test_after_an_unsettled_epoch_neither_the_next_begins_nor_is_it_reported_as_done(bench, epoch):
    coordinator = unsettled(bench, OSError("down"))
    with pytest.raises(Unsettled, match=f"epoch {epoch} can't begin: 0 is decided"):
        bench.begin(coordinator, epoch)


def test_a_sink_that_is_done_is_on_record_while_another_is_not(bench2):
    coordinator = bench2.started("A")
    bench2.before["y", "commit"] = [OSError("down")] * 1000
    with pytest.raises(Unsettled):
        bench2.epoch(coordinator)
    assert bench2.world.judge.truth.done == {"x"}
    bench2.before.clear()
    bench2.calls.clear()
    again = bench2.coordinator("B")
    again.start(bench2.start(position=_at(0, None)))
    assert bench2.verbs("commit") == ["y.commit"]


def lost(bench, handles=None):
    """Epoch 0 decided, its rows thrown away by the target; B has recovered."""
    coordinator = bench.started("A")
    bench.begin(coordinator)
    coordinator.preparing()
    receipts = bench.prepare(coordinator)
    names = [str(receipt.handle) for receipt in receipts["x"]][:handles]
    bench.world.expire("x", names)
    with pytest.raises(Unsettled, match="threw its prepared rows away"):
        bench.conclude(coordinator, receipts)
    again = bench.coordinator("B")
    again.start(bench.start(position=_at(0, None)))
    assert again.lost == {"x": tuple(names)}
    assert bench.begin(again, 0) is Admission.REPLAY
    return again


@pytest.mark.parametrize("handles", [None, 1])
def test_rows_that_a_target_lost_are_written_again(bench, handles):
    coordinator = lost(bench, handles)
    coordinator.rewrite(bench.prepare(coordinator, 0, attempt=5))
    assert len(bench.visible()) == 2
    assert coordinator.lost == {}
    bench.epoch(coordinator, 1)
    bench.epoch(coordinator, 2)
    coordinator.stop()
    bench.world.judge.at_rest(bench.world)


def test_other_rows_are_not_written_again_and_are_cleared(bench):
    coordinator = lost(bench)
    bench.world.source = type(bench.world.source).of((2, 1))
    with pytest.raises(Unsettled, match="2 rows"):
        coordinator.rewrite(bench.prepare(coordinator, 0, attempt=5))
    assert not bench.world.targets["x"].prepared
    assert bench.visible() == []


def test_a_superseded_driver_clears_nothing_after_a_rewrite_that_was_refused(bench):
    coordinator = lost(bench)
    bench.world.source = type(bench.world.source).of((2, 1))
    again = bench.prepare(coordinator, 0, attempt=5)
    bench.started("C", gates=())
    bench.calls.clear()
    with pytest.raises(Fenced):
        coordinator.rewrite(again)
    assert bench.verbs("abort") == []


def test_nothing_is_rewritten_where_nothing_was_lost(bench):
    coordinator = bench.started()
    bench.epoch(coordinator)
    bench.calls.clear()
    coordinator.rewrite({})
    assert bench.calls == []


def test_a_target_that_says_nothing_about_which_rows_it_lost_stops_the_query(bench):
    coordinator = bench.started()
    bench.before["commit"] = [PreparedLost("gone")]
    with pytest.raises(Unsettled):
        bench.epoch(coordinator)


# The wrong log, the wrong target


def test_a_log_older_than_its_target_is_refused(bench):
    coordinator = bench.started("A")
    old, judge = dict(bench.world.log.records), bench.world.judge.copy()
    bench.epoch(coordinator, 0)
    coordinator.stop()
    # The judge, too, knows nothing of what came after.
    bench.world.log.records, bench.world.judge = old, judge
    with pytest.raises(Refused, match="the log is older than the target"):
        bench.coordinator("B").start(bench.start(position=_at(0, None)))


def test_a_target_older_than_its_log_is_refused(bench):
    coordinator = bench.started("A")
    bench.epoch(coordinator, 0)
    coordinator.stop()
    bench.world.targets["x"].epochs.clear()
    with pytest.raises(Refused, match="the target went back in time"):
        bench.coordinator("B").start(bench.start(position=_at(0, 0)))


def test_a_reset_checkpoint_is_found_by_the_marks_of_the_other_life(bench):
    other = Uid("z" * 12)
    bench.world.targets["x"].epochs.add((other, 41))
    assert bench.world.targets["x"].newest(None) == (Mark(uid=other, epoch=EpochNumber(41)),)
    with pytest.raises(Refused, match="up to epoch 41 under another uid"):
        bench.started("A")


def test_the_last_epoch_again_with_other_offsets_is_refused(bench):
    coordinator = bench.started()
    bench.epoch(coordinator)
    with pytest.raises(Refused, match="decided for other offsets"):
        coordinator.begin(EpochNumber(0), query_id="q", offsets=Offsets(digest="other"))


# The cost of a start


def history(epochs, bench):
    """A log after that many epochs, as a driver that tidies leaves it."""
    last = EpochNumber(epochs - 1)
    state = claimed(
        State(uid=Uid("a" * 12), pipeline="p", location="/chk", first=last),
        claim=UNCLAIMED,
        driver="",
        sinks={"x": {"target": "t"}},
        query_id="q",
        run=None,
    )
    decision = Decision(
        epoch=last,
        generation=state.generation,
        offsets=Offsets(digest=""),
        receipts={"x": ()},
        decided_at=0.0,
    )
    state = settled(sinks_done(decided(state, decision), frozenset({"x"})))
    log = MemoryLog()
    journal = Journal(log, limits=bench.limits, environment=Environment(clock=bench.clock))
    log.put_if_absent(epochs, b"the record before")
    journal._number = epochs
    for _ in range(bench.limits.log_records_kept):
        journal.append(RecordKind.STOP, state)
    return log, last


@pytest.mark.parametrize("epochs", [1_000, 1_000_000])
def test_a_start_costs_the_same_whatever_the_history(bench, epochs):
    log, last = history(epochs, bench)
    bench.world.log.records = {number: log.read(number) for number in log.numbers()}
    calls = count_of_a_start(bench, last)
    assert calls <= 14
    assert len(bench.world.log.records) <= 2 * bench.limits.log_records_kept


def count_of_a_start(bench, last):
    bench.world.targets["x"].epochs.add((Uid("a" * 12), last))
    made = []

    def send(call):
        made.append(call)
        room = bench.world.log if call.room == "log" else bench.world.targets["x"]
        args = call.args if call.room == "log" else (call.identity, *call.args)
        return getattr(room, call.verb)(*args)

    bench.send = send
    bench.coordinator("B").start(bench.start(position=_at(last, last)))
    return len(made)


def test_the_log_stays_small_whatever_runs(bench):
    epochs = 500
    bench.world = World(Source.of(*[(1,)] * epochs), ["x"])
    coordinator = bench.started()
    for epoch in range(epochs):
        bench.clock.sleep(1.0)
        bench.epoch(coordinator, epoch)
    coordinator.stop()
    assert len(bench.world.log.records) <= 4 * coordinator._limits.log_records_kept


def test_the_log_stays_small_between_two_sweeps(bench):
    """Fifty epochs a second make three thousand records a minute."""
    epochs = 300
    bench.world = World(Source.of(*[(1,)] * epochs), ["x"])
    coordinator = bench.started()
    for epoch in range(epochs):
        bench.epoch(coordinator, epoch)
        assert len(bench.world.log.records) <= 2 * bench.limits.log_records_kept + 2


def test_a_committer_is_given_epoch_offsets_and_the_newest_epoch_committed_at_its_sink(
    bench, monkeypatch
):
    begun = []
    monkeypatch.setattr(SimCommitter, "begin", lambda committer, begin: begun.append(begin))
    coordinator = bench.started()
    bench.epoch(coordinator, 0)
    bench.epoch(coordinator, 1)
    assert begun == [
        Begin(epoch=0, offsets=bench.offsets(0), newest_committed=None),
        Begin(epoch=1, offsets=bench.offsets(1), newest_committed=0),
    ]
    coordinator.stop()
    later = bench.coordinator("B")
    later.start(bench.start(position=Position(planned=1, finished=1)))
    bench.begin(later, 2)
    assert begun[-1].newest_committed == 1


def test_an_epoch_that_a_full_disk_kept_from_being_decided_is_aborted_and_tried_again(bench):
    coordinator = bench.started()
    bench.begin(coordinator)
    coordinator.preparing()
    receipts = bench.prepare(coordinator)
    full = TryAgain("cannot write /log/2: No space left on device", "free some space")
    bench.before["put_if_absent"] = [full] * 1000
    with pytest.raises(TryAgain, match="No space left on device"):
        bench.conclude(coordinator, receipts)
    assert coordinator.phase is Phase.ABORTED
    assert not bench.world.targets["x"].prepared
    bench.before.clear()
    bench.epoch(coordinator)
    coordinator.stop()
    assert bench.visible() == ["e0p0r0", "e0p1r0"]


def test_a_sweep_between_epochs_leaves_the_open_epoch_alone(bench):
    coordinator = bench.started(limits=replace(bench.limits, sweep_every_s=0.0))
    bench.begin(coordinator)
    coordinator.preparing()
    receipts = bench.prepare(coordinator)
    coordinator.sweep()
    bench.conclude(coordinator, receipts)
    assert bench.visible() == ["e0p0r0", "e0p1r0"]


@pytest.mark.parametrize(
    ("sinks", "words"),
    [(Memory(), "is a Memory, not a list"), ([Memory], "the class Memory"), ([], "at least one")],
)
def test_what_is_no_list_of_sinks_is_refused(sinks, words):
    with pytest.raises(Misconfigured, match=words):
        by_name(sinks)
