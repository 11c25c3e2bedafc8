"""The judge objects: one deliberate breach for each thing it looks at."""

from dataclasses import replace

import pytest

from epochal.errors import Fenced
from epochal.protocol.receipts import lay_beside
from epochal.protocol.records import encode
from epochal.protocol.state import (
    Record,
    RecordKind,
    State,
    claimed,
    decided,
    rewritten,
    settled,
    sinks_done,
    stopped,
)
from epochal.terms import (
    UNCLAIMED,
    Decision,
    EpochNumber,
    Fingerprint,
    Generation,
    Identity,
    Offsets,
    Receipt,
    SinkName,
    Uid,
)
from epochal.testing.crash import Breach
from proof.calls import LOG, TARGET, Call
from proof.judge import LOG_RECORDS_MAX
from proof.world import Source, World

X = SinkName("x")
UID = Uid("a" * 12)


class Scene:
    """A world and a driver that does as it is told."""

    def __init__(self):
        self.world = World(Source.of((1, 1), ()), [X])
        self.state = State(uid=UID, pipeline="p", location="/chk")
        self.number = 0

    def call(self, room, name, verb, *args, generation=1):
        identity = Identity(pipeline="p", uid=UID, sink=X, generation=Generation(generation))
        call = Call("A", room, name, verb, args, identity)
        self.world.issue(call)
        return self.world.land(call)

    def target(self, verb, *args, **more):
        return self.call(TARGET, X, verb, *args, **more)

    def put(self, kind, state, number=None):
        self.number = number or self.number + 1
        record = Record(kind=kind, nonce=str(self.number), written_at=0.0, state=state)
        self.call(LOG, "", "put_if_absent", self.number, encode(record))
        self.state = state

    def claim(self, **changes):
        after = claimed(
            self.state, claim=UNCLAIMED, driver="", sinks={X: {}}, query_id=None, run=None
        )
        self.put(RecordKind.CLAIM, replace(after, **changes))

    def receipt(self, partition, epoch=0, attempt=1, rows=None):
        handle = Identity(pipeline="p", uid=UID, sink=X, generation=Generation(1)).handle(
            EpochNumber(epoch), partition=partition, attempt=attempt
        )
        self.target("prepare", str(handle), rows or (f"e{epoch}p{partition}r0",))
        return Receipt(handle=handle, fingerprint=Fingerprint(1, partition + 1))

    def decision(self, *receipts, epoch=0, digest=None):
        return Decision(
            epoch=EpochNumber(epoch),
            generation=Generation(1),
            offsets=Offsets(digest=digest or f"offsets-{epoch}"),
            receipts={X: receipts},
            decided_at=0.0,
        )

    def decide(self, *receipts, rehearse=True, **more):
        if rehearse:
            self.target("rehearse", more.get("epoch", 0), receipts)
        self.put(RecordKind.COMMIT, decided(self.state, self.decision(*receipts, **more)))

    def settle(self):
        self.state = settled(sinks_done(self.state, frozenset({X})))

    def whole(self):
        """Both epochs, and a stop."""
        receipts = (self.receipt(0), self.receipt(1))
        self.decide(*receipts)
        self.target("commit", 0, receipts)
        self.settle()
        self.decide(epoch=1)
        self.target("commit", 1, ())
        self.settle()
        self.put(RecordKind.STOP, stopped(self.state, is_clear=True))


@pytest.fixture
def scene():
    scene = Scene()
    scene.claim()
    return scene


def objects(rule, breach, *args, **more):
    with pytest.raises(Breach) as caught:
        breach(*args, **more)
    assert caught.value.rule == rule, caught.value


def test_two_epochs_by_the_rules_meet_no_objection(scene):
    scene.whole()
    scene.world.judge.at_rest(scene.world)
    scene.world.judge.partly(scene.world)


def test_i1_a_commit_of_a_handle_that_no_decision_names(scene):
    receipts = (scene.receipt(0), scene.receipt(1))
    scene.decide(*receipts)
    objects("I1", scene.target, "commit", 0, (scene.receipt(0, attempt=2),))


def test_i1_a_row_that_is_visible_without_a_decision(scene):
    scene.whole()
    scene.world.targets[X].visible["stranger"] = ("e0p0r0",)
    objects("I1", scene.world.judge.at_rest, scene.world)
    objects("I1", scene.world.judge.partly, scene.world)


def test_i2_an_epoch_decided_twice(scene):
    receipts = (scene.receipt(0), scene.receipt(1))
    scene.decide(*receipts)
    scene.target("commit", 0, receipts)
    again = decided(
        State(uid=UID, pipeline="p", location="/chk"), scene.decision(*receipts, digest="z")
    )
    changed = replace(again, generation=Generation(1), sinks={X: {}})
    objects("I2", scene.put, RecordKind.COMMIT, changed)


def test_i2_a_decision_changed_by_another_kind_of_record(scene):
    receipts = (scene.receipt(0), scene.receipt(1))
    scene.decide(*receipts)
    changed = rewritten(scene.state, X, receipts[:1])
    objects("I2", scene.put, RecordKind.PROGRESS, changed)


def test_i2_a_slot_skipped(scene):
    objects("I2", scene.put, RecordKind.STOP, scene.state, number=5)


def test_i2_an_epoch_that_was_never_decided(scene):
    receipts = (scene.receipt(0), scene.receipt(1))
    scene.decide(*receipts)
    scene.target("commit", 0, receipts)
    scene.settle()
    scene.put(RecordKind.STOP, stopped(scene.state, is_clear=True))
    objects("I2", scene.world.judge.at_rest, scene.world)


def test_i3_a_commit_without_a_decision(scene):
    objects("I3", scene.target, "commit", 0, (scene.receipt(0),))


def test_i3_a_decision_that_was_not_rehearsed(scene):
    receipts = (scene.receipt(0), scene.receipt(1))
    objects("I3", scene.decide, *receipts, rehearse=False)


def test_i4_a_decision_taken_for_done(scene):
    scene.decide(scene.receipt(0), scene.receipt(1))
    scene.settle()
    objects("I4", scene.put, RecordKind.STOP, stopped(scene.state, is_clear=True))


def test_i4_a_rewrite_while_the_old_rows_are_still_there(scene):
    receipts = (scene.receipt(0), scene.receipt(1))
    scene.decide(*receipts)
    again = (scene.receipt(0, attempt=5), scene.receipt(1, attempt=6))
    objects("I4", scene.put, RecordKind.REWRITE, rewritten(scene.state, X, again))


def test_i4_a_row_that_is_missing_at_rest(scene):
    scene.whole()
    scene.world.targets[X].visible.popitem()
    objects("I4", scene.world.judge.at_rest, scene.world)


def test_i4_a_log_that_is_not_at_rest(scene):
    objects("I4", scene.world.judge.at_rest, scene.world)


def test_i5_an_abort_of_what_a_decision_names(scene):
    receipts = (scene.receipt(0), scene.receipt(1))
    scene.decide(*receipts)
    objects("I5", scene.target, "abort", 0, receipts)


def test_i5_a_decision_that_names_what_was_aborted(scene):
    receipts = (scene.receipt(0), scene.receipt(1))
    scene.target("abort", 0, receipts[:1])
    objects("I5", scene.decide, *receipts)


def test_i5_something_left_in_doubt_at_rest(scene):
    scene.whole()
    scene.world.targets[X].prepared["left"] = ()
    objects("I5", scene.world.judge.at_rest, scene.world)


def test_i5_a_clear_stop_with_something_left(scene):
    scene.receipt(0)
    objects("I5", scene.put, RecordKind.STOP, stopped(scene.state, is_clear=True))


@pytest.mark.parametrize("is_late", [True, False])
def test_i5_nobody_is_blamed_for_what_comes_behind_the_back_of_a_stop(scene, is_late):
    scene.claim()
    if is_late:
        handle = "epochal-aaaaaaaaaaaa-g2-caaaaaaaa-e0-s00000000-p0-t1"
        scene.world.land_late(Call("A", TARGET, X, "prepare", (handle, ())))
    else:
        scene.receipt(0)
    scene.put(RecordKind.STOP, stopped(scene.state, is_clear=True))


def test_i5_a_task_that_prepares_after_its_driver_said_that_none_can(scene):
    scene.put(RecordKind.STOP, stopped(scene.state, is_clear=True))
    objects("I5", scene.receipt, 0)


def test_i5_a_late_task_of_a_driver_that_promised_nothing_meets_no_objection(scene):
    scene.put(RecordKind.STOP, stopped(scene.state, is_clear=False))
    scene.receipt(0)


def test_i5_an_idle_driver_that_leaves_what_a_zombie_prepared(scene):
    scene.world.judge.idle(scene.world, [X])
    scene.receipt(0)
    objects("I5", scene.world.judge.idle, scene.world, [X])


def hung(scene, verb, *args):
    identity = Identity(pipeline="p", uid=UID, sink=X, generation=Generation(1))
    scene.world.judge.hangs(Call("A", TARGET, "y", verb, args, identity))


def test_i4_what_is_done_and_not_noted_while_another_target_hangs(scene):
    receipts = (scene.receipt(0), scene.receipt(1))
    scene.decide(*receipts)
    hung(scene, "commit", 0, ())
    scene.world.judge.kept_waiting("A")
    identity = Identity(pipeline="p", uid=UID, sink=X, generation=Generation(1))
    scene.world.judge.answered(Call("A", TARGET, X, "commit", (0, receipts), identity))
    objects("I4", scene.world.judge.kept_waiting, "A")
    scene.target("commit", 0, receipts)
    scene.put(RecordKind.PROGRESS, sinks_done(scene.state, frozenset({X})))
    scene.world.judge.kept_waiting("A")


def test_a_call_to_a_target_that_has_not_answered_the_last_one(scene):
    identity = Identity(pipeline="p", uid=UID, sink=X, generation=Generation(1))
    scene.world.judge.hangs(Call("A", TARGET, X, "in_doubt", (), identity))
    objects("contract", scene.target, "newest")


def test_i6_two_attempts_that_share_a_handle(scene):
    scene.receipt(0)
    objects("I6", scene.receipt, 0, rows=("something else",))


def test_i6_a_decision_without_all_rows(scene):
    objects("I6", scene.decide, scene.receipt(0))


def test_i6_a_decision_with_both_attempts(scene):
    objects("I6", scene.decide, scene.receipt(0), scene.receipt(0, attempt=2), scene.receipt(1))


def test_i7_a_record_of_an_older_generation(scene):
    before = scene.state
    scene.claim()
    objects("I7", scene.put, RecordKind.STOP, stopped(before, is_clear=True))


def test_i7_the_newest_driver_is_fenced(scene):
    objects("I7", scene.world.judge.ended, "A", Fenced("by nobody"))
    scene.world.judge.ended("B", Fenced("A claimed after it"))
    scene.world.judge.ended("A", None)


def test_i7_a_driver_goes_on_though_its_claim_is_below_the_newest_record(scene):
    late = Call("B", TARGET, X, "newest")
    objects("I7", scene.world.issue, late)


def test_i3_i4_lists_that_the_newest_record_names(scene):
    receipts = (scene.receipt(0), scene.receipt(1))
    scene.target("rehearse", 0, receipts)
    decision, lists = lay_beside(
        scene.decision(*receipts), inline_bytes_max=0, nonce=lambda: "a nonce"
    )
    state = decided(scene.state, decision)
    objects("I3", scene.put, RecordKind.COMMIT, state)
    again = Scene()
    again.claim()
    for partition in (0, 1):
        again.receipt(partition)
    again.target("rehearse", 0, receipts)
    for name, content in lists.items():
        again.call(LOG, "", "put_list", name, content)
    again.put(RecordKind.COMMIT, state)
    objects("I4", again.call, LOG, "", "delete_lists", tuple(lists))


def test_i4_a_list_that_no_record_names_is_left(scene):
    scene.whole()
    scene.call(LOG, "", "put_list", "x", b"left")
    objects("I4", scene.world.judge.at_rest, scene.world)


def test_i7_a_claim_that_skips_a_generation(scene):
    objects("I7", scene.claim, generation=Generation(9))


def test_i7_an_abort_of_a_superseded_driver_that_did_not_ask(scene):
    receipt = scene.receipt(0)
    scene.claim()
    objects("I7", scene.target, "abort", 0, (receipt,))
    scene.call(LOG, "", "numbers")
    scene.target("abort", 0, (receipt,))


def test_i8_an_empty_epoch_that_is_not_proven(scene):
    scene.whole()
    scene.world.targets[X].epochs.discard((UID, 1))
    objects("I8", scene.world.judge.at_rest, scene.world)


def test_i9_a_proof_forgotten_that_may_still_be_asked_for(scene):
    scene.whole()
    scene.target("prune", 1)
    objects("I9", scene.target, "prune", 2)


def test_i10_another_uid(scene):
    objects("I10", scene.put, RecordKind.STOP, replace(scene.state, uid=Uid("z" * 12)))


def test_i10_other_offsets_than_the_engine_planned(scene):
    objects("I10", scene.decide, scene.receipt(0), scene.receipt(1), digest="other")


def test_a_log_that_grows_is_found(scene):
    scene.whole()
    for number in range(LOG_RECORDS_MAX + 1):
        scene.world.log.records.setdefault(number, b"")
    objects("I2", scene.world.judge.at_rest, scene.world)


def test_a_copy_of_a_world_does_not_share_what_changes(scene):
    copy = scene.world.copy()
    key = copy.key()
    scene.whole()
    assert copy.key() == key
    assert scene.world.key() != key
    assert not copy.targets[X].visible
