"""Which start and which epoch may go on: every refusal states the facts and a way out (I10)."""

from dataclasses import replace

import pytest

from epochal.errors import Misconfigured, Refused, WentBack
from epochal.protocol.admission import (
    Admission,
    Position,
    Start,
    Unfinished,
    admit_epoch,
    admit_marks,
    admit_start,
    newborn,
)
from epochal.protocol.state import (
    EpochEnd,
    GivenUp,
    adopted,
    decided,
    gave_up,
    settled,
    sinks_done,
)
from epochal.terms import EpochNumber, Mark, Offsets, Uid

OTHER = Uid("zzzzzzzzzzzz")


@pytest.fixture
def start(make):
    return Start(pipeline="shop", location="/chk", sinks=make.fresh().sinks, query_id="query")


@pytest.fixture
def done(make):
    """Epoch 0 is decided and settled."""
    return settled(sinks_done(make.unsettled(), frozenset({make.orders, make.audit})))


def at(planned, finished):
    return Position(
        planned=None if planned is None else EpochNumber(planned),
        finished=None if finished is None else EpochNumber(finished),
    )


def refusal(call, *facts):
    with pytest.raises(Refused) as caught:
        call()
    for fact in facts:
        assert fact in caught.value.message, caught.value.message
    assert caught.value.hint
    return caught.value


def test_a_start_that_could_not_claim_before_its_query_takes_only_a_log_without_a_record(
    done, start
):
    late = replace(start, only_new=True)
    refusal(lambda: admit_start(done, late), "could not be claimed where the query was started")
    assert newborn(late, OTHER).expected == 0


@pytest.mark.parametrize("position", [at(0, None), at(0, 0), at(1, 0)])
def test_a_start_on_its_own_checkpoint_is_admitted(done, start, position):
    admit_start(done, replace(start, position=position))


def test_another_pipeline_on_this_checkpoint_is_refused(make, start):
    refused = refusal(
        lambda: admit_start(make.fresh(), replace(start, pipeline="b")), "'shop'", "'b'"
    )
    assert "epochal rename" in refused.hint


def test_a_copied_checkpoint_is_refused(make, start):
    refused = refusal(
        lambda: admit_start(make.fresh(), replace(start, location="/copy")), "/copy", "/chk"
    )
    assert "epochal adopt" in refused.hint
    assert "epochal fork" in refused.hint


def test_a_bucket_has_one_place_under_the_schemes_of_spark_and_of_others(make, start):
    state = replace(make.fresh(), location="s3://lake/chk")
    admit_start(state, replace(start, location="s3a://lake/chk"))
    for elsewhere in ("s3a://lake/copy", "s3a://other/chk", "gs://lake/chk"):
        refusal(lambda: admit_start(state, replace(start, location=elsewhere)), "copied or moved")  # noqa: B023  called at once


def test_containers_of_two_accounts_are_two_places(make, start):
    state = replace(make.fresh(), location="abfss://lake@one.dfs.core.windows.net/chk")
    admit_start(state, replace(start, location="abfs://lake@one.dfs.core.windows.net/chk"))
    moved = replace(start, location="abfss://lake@two.dfs.core.windows.net/chk")
    refusal(lambda: admit_start(state, moved), "copied or moved")


def test_another_run_on_this_checkpoint_is_refused(done, start):
    refusal(lambda: admit_start(done, replace(start, run="again", position=at(0, 0))), "'again'")


@pytest.mark.parametrize("query", ["other", None])
def test_a_reset_checkpoint_is_refused(done, start, query):
    refused = refusal(
        lambda: admit_start(done, replace(start, query_id=query, position=at(0, 0))),
        "query",
        "up to epoch 0",
        "reset or replaced",
    )
    assert 'run="…"' in refused.hint


def test_a_checkpoint_older_than_the_log_is_refused(done, start):
    ahead = replace(done, last=replace(done.last, epoch=EpochNumber(9)))
    refusal(
        lambda: admit_start(ahead, replace(start, position=at(4, 3))),
        "goes on at epoch 4",
        "decided up to 9",
        "older than the log",
    )


def test_a_checkpoint_that_other_code_ran_on_is_refused(done, start):
    refused = refusal(
        lambda: admit_start(done, replace(start, position=at(5, 5))), "epoch 6", "other code"
    )
    assert "epochal adopt" in refused.hint


def test_a_sink_with_something_pending_can_not_be_removed(make, start):
    fewer = {make.orders: start.sinks[make.orders]}
    refusal(
        lambda: admit_start(make.unsettled(), replace(start, sinks=fewer, position=at(0, None))),
        "epoch 0 is decided",
        "audit",
    )


def test_a_settled_sink_can_be_removed_and_another_added(make, done, start):
    other = {make.orders: start.sinks[make.orders], "new": {"target": "new"}}
    admit_start(done, replace(start, sinks=other, position=at(0, 0)))


def test_a_retargeted_sink_is_asked_about(make, done, start):
    moved = {**start.sinks, make.orders: {"kind": "memory", "target": "elsewhere"}}
    asked = replace(start, sinks=moved, position=at(0, 0))
    refused = refusal(lambda: admit_start(done, asked), "'orders'", "elsewhere")
    assert "retarget=['orders']" in refused.hint
    admit_start(done, replace(asked, retarget=[make.orders]))
    with pytest.raises(Misconfigured, match="'order' is to be retargeted") as misspelt:
        replace(asked, retarget=["order"])
    assert "'orders'" in misspelt.value.hint


def test_a_sink_is_not_retargeted_away_from_what_a_crash_left_there(make, done, start):
    crashed = replace(done, is_stopped=False, is_clear=False)
    moved = {**start.sinks, make.orders: {"kind": "memory", "target": "elsewhere"}}
    asked = replace(start, sinks=moved, retarget=[make.orders], position=at(0, 0))
    refused = refusal(lambda: admit_start(crashed, asked), "elsewhere", "may not be cleared")
    assert "epochal adopt /chk" in refused.hint
    let_go = adopted(crashed, location="/chk", query_id="query", expected=None)
    admit_start(let_go, asked)


def test_a_pending_sink_can_not_be_retargeted_even_on_purpose(make, start):
    moved = {**start.sinks, make.orders: {"kind": "memory", "target": "elsewhere"}}
    asked = replace(start, sinks=moved, retarget=[make.orders], position=at(0, None))
    refused = refusal(
        lambda: admit_start(make.unsettled(), asked), "elsewhere", "epoch 0 is decided"
    )
    # To name retarget= alone would send a person in circles.
    assert "resolve give-up PIPELINE --sink orders --epoch 0" in refused.hint


def test_with_fencing_off_a_driver_that_did_not_stop_is_left_alone(make, start):
    running = make.fresh(is_stopped=False, driver="host-1")
    refusal(lambda: admit_start(running, replace(start, fence=False)), "host-1", "generation 1")
    admit_start(running, start)


def test_a_batch_that_other_code_left_unfinished_is_asked_about(make, start):
    taken = replace(start, position=at(4, 3))
    refused = refusal(lambda: newborn(taken, make.uid), "batch 4", "not finished")
    assert "skip" in refused.hint
    assert "redo" in refused.hint
    assert newborn(replace(taken, unfinished=Unfinished.REDO), make.uid).expected == 4
    assert newborn(replace(taken, unfinished=Unfinished.SKIP), make.uid).expected == 5
    assert newborn(replace(start, position=at(4, 4)), make.uid).expected == 5


def marks(make, *, orders=0, audit=0, uid=None):
    return {
        name: None if epoch is None else [Mark(uid=uid or make.uid, epoch=EpochNumber(epoch))]
        for name, epoch in ((make.orders, orders), (make.audit, audit))
    }


def test_targets_that_prove_what_the_log_says_are_admitted(make, done):
    admit_marks(done, marks(make), None)


def test_a_log_older_than_its_target_is_refused(make, done):
    refusal(
        lambda: admit_marks(done, marks(make, audit=3), None),
        "'audit' proves epoch 3",
        "nothing after 0",
    )


def ends(*epochs):
    return tuple(
        EpochEnd(epoch=EpochNumber(epoch), sources=(f'{{"t":{{"0":{epoch}00}}}}',))
        for epoch in epochs
    )


def test_a_target_that_went_back_is_refused_with_what_is_missing_and_the_ways_out(make, done):
    committed = {make.orders: EpochNumber(9), make.audit: EpochNumber(9)}
    ahead = replace(
        done,
        last=replace(done.last, epoch=EpochNumber(9)),
        newest_committed=committed,
        ends=ends(6, 7, 8, 9),
    )
    refused = refusal(
        lambda: admit_marks(ahead, marks(make, orders=9, audit=6), None),
        "'audit' proves epochs up to 6",
        "epoch 9 was committed there",
        "epochs 7 to 9",
        'from {"t":{"0":600}} up to {"t":{"0":900}}',
    )
    assert isinstance(refused, WentBack)
    assert refused.sink == make.audit
    assert "epochal resolve accept PIPELINE --sink audit" in refused.hint


def test_what_is_missing_is_reported_also_where_the_log_keeps_no_offsets_that_old(make, done):
    ahead = replace(
        done,
        last=replace(done.last, epoch=EpochNumber(9)),
        newest_committed={make.orders: EpochNumber(9)},
        ends=ends(8, 9),
    )
    refusal(
        lambda: admit_marks(ahead, {make.orders: marks(make, orders=2)[make.orders]}, None),
        "epochs 3 to 9, in the source up to",
    )


def test_a_sink_that_is_new_retargeted_or_forked_need_not_prove_what_others_committed(make, done):
    new = replace(done, newest_committed={make.orders: EpochNumber(0)})
    admit_marks(
        new, {make.orders: [Mark(uid=make.uid, epoch=EpochNumber(0))], make.audit: []}, None
    )


def test_an_emptied_target_is_refused(make, done):
    refusal(lambda: admit_marks(done, {make.orders: []}, None), "'orders' proves no epoch")


def test_a_pending_sink_need_not_prove_the_last_epoch_yet(make):
    admit_marks(make.unsettled(), {make.orders: [], make.audit: []}, None)


def test_a_sink_noted_as_done_must_prove_it(make):
    noted = sinks_done(make.unsettled(), frozenset({make.orders}))
    refusal(lambda: admit_marks(noted, {make.orders: [], make.audit: []}, None), "'orders'")


def test_a_sink_that_a_person_gave_up_need_not_prove_it(make, done):
    word = GivenUp(epoch=EpochNumber(1), sink=make.audit, kept_at="/x", by="ann", because="gone")
    second = decided(done, make.decision(1))
    given_up = settled(gave_up(sinks_done(second, frozenset({make.orders})), word))
    admit_marks(given_up, marks(make, orders=1, audit=0), None)
    # Its commit may have been carried out all the same.
    admit_marks(given_up, marks(make, orders=1, audit=1), None)
    refusal(lambda: admit_marks(given_up, {make.audit: []}, None), "'audit' proves no epoch")


def test_a_target_that_keeps_no_proof_is_not_held_against_the_log(make, done):
    admit_marks(done, marks(make, orders=None, audit=None), None)


def test_another_life_of_the_same_pipeline_at_the_target_is_refused(make):
    refused = refusal(
        lambda: admit_marks(make.fresh(), marks(make, uid=OTHER, orders=41), None), "41", OTHER
    )
    assert 'run="…"' in refused.hint


def test_a_deliberate_run_and_a_fork_pass_by_the_other_life(make):
    admit_marks(make.fresh(run="new"), marks(make, uid=OTHER), "new")
    admit_marks(make.fresh(forked_from=OTHER), marks(make, uid=OTHER), None)


def test_only_the_next_epoch_or_the_last_one_again_is_admitted(make, done):
    offsets = Offsets(digest="digest-0")
    assert admit_epoch(done, EpochNumber(1), query_id="query", offsets=offsets) is Admission.FRESH
    assert admit_epoch(done, EpochNumber(0), query_id="query", offsets=offsets) is Admission.REPLAY
    refusal(lambda: admit_epoch(done, EpochNumber(2), query_id="query", offsets=offsets), "epoch 2")


def test_the_last_epoch_again_with_other_offsets_is_refused(make, done):
    refused = refusal(
        lambda: admit_epoch(
            done,
            EpochNumber(0),
            query_id="query",
            offsets=Offsets(digest="other", text="from 5 to 9"),
        ),
        "offsets of 0",
        "from 5 to 9",
    )
    assert "restored or edited" in refused.hint


def test_an_epoch_of_another_query_is_refused(done):
    refusal(
        lambda: admit_epoch(done, EpochNumber(1), query_id="other", offsets=Offsets(digest="")),
        "other",
        "query",
    )
