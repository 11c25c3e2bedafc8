"""Each record's state follows from the one before; a decision is never taken back."""

import pytest

from epochal.errors import InvariantBroken, Refused
from epochal.protocol.state import (
    CLAIMS_KEPT,
    GivenUp,
    Total,
    adopted,
    bound,
    claimed,
    decided,
    forked,
    gave_up,
    renamed,
    rewritten,
    settled,
    sinks_done,
    stopped,
)
from epochal.terms import NO_ROWS, Claim, EpochNumber, Fingerprint, Uid

OTHER_CLAIM = Claim("x9x9x9x9")


def word(sink, epoch=0):
    return GivenUp(epoch=EpochNumber(epoch), sink=sink, kept_at="/kept", by="ann", because="gone")


def test_a_claim_raises_the_generation_and_keeps_what_is_unsettled(make):
    after = claimed(
        make.unsettled(), claim=OTHER_CLAIM, driver="host", sinks={}, query_id=None, run=None
    )
    assert after.generation == 2
    assert after.claims == (OTHER_CLAIM, *make.unsettled().claims)
    assert after.unsettled == make.decision()
    assert not after.is_stopped
    assert after.query_id == "query"


def test_the_claims_of_earlier_drivers_are_bounded(make):
    state = make.unsettled()
    for _ in range(2 * CLAIMS_KEPT):
        state = claimed(
            state, claim=OTHER_CLAIM, driver="", sinks=state.sinks, query_id=None, run=None
        )
    assert state.claims == (OTHER_CLAIM,) * CLAIMS_KEPT


def test_a_second_decision_before_the_first_is_settled_breaks_i2(make):
    with pytest.raises(InvariantBroken, match="I2: epoch 1 decided before 0 settled"):
        decided(make.unsettled(), make.decision(1))


@pytest.mark.parametrize("epoch", [1, 2])
def test_a_decision_out_of_line_breaks_i2(make, epoch):
    with pytest.raises(InvariantBroken, match=f"I2: epoch {epoch} decided where 0 is next"):
        decided(make.fresh(), make.decision(epoch))


def test_the_same_epoch_can_not_be_decided_twice(make):
    once = settled(sinks_done(make.unsettled(), frozenset({make.orders, make.audit})))
    with pytest.raises(InvariantBroken, match="I2"):
        decided(once, make.decision(0))


def test_a_decision_is_remembered_with_its_offsets_and_rows(make):
    last = make.unsettled().last
    assert (last.epoch, last.offsets.digest) == (0, "digest-0")
    assert last.rows == {make.orders: 1, make.audit: 1}


def test_settling_with_a_sink_not_carried_out_breaks_i4(make):
    partly = sinks_done(make.unsettled(), frozenset({make.orders}))
    assert set(partly.pending) == {make.audit}
    with pytest.raises(InvariantBroken, match="I4: settled with audit not carried out"):
        settled(partly)


def test_a_rewrite_changes_handles_and_nothing_else(make):
    again = make.receipt("orders", generation=2, attempt=5)
    after = rewritten(make.unsettled(), make.orders, [again])
    assert after.unsettled.receipts[make.orders] == (again,)
    assert after.unsettled.receipts[make.audit] == make.decision().receipts[make.audit]
    assert after.last == make.unsettled().last


def test_giving_up_is_a_record_and_lets_the_rest_settle(make):
    after = gave_up(sinks_done(make.unsettled(), frozenset({make.audit})), word(make.orders))
    assert after.given_up == (word(make.orders),)
    assert settled(after).unsettled is None


@pytest.mark.parametrize(("sink", "epoch"), [("orders", 1), ("stranger", 0)])
def test_only_what_is_pending_can_be_given_up(make, sink, epoch):
    with pytest.raises(InvariantBroken, match="nothing left to give up"):
        gave_up(make.unsettled(), word(sink, epoch))


@pytest.mark.parametrize(
    "change",
    [
        lambda state: sinks_done(state, frozenset()),
        lambda state: rewritten(state, "orders", []),
        lambda state: gave_up(state, word("orders")),
    ],
)
def test_without_a_decision_there_is_nothing_to_carry_out(make, change):
    with pytest.raises(InvariantBroken, match="no decision is waiting"):
        change(make.fresh())


def test_an_unsettled_epoch_can_not_be_stepped_over_by_adopting(make):
    with pytest.raises(Refused, match="can't be stepped over"):
        adopted(make.unsettled(), location="/new", query_id="q", expected=EpochNumber(5))


def test_adopting_after_other_code_ran_goes_on_where_that_code_stopped(make):
    after = adopted(make.fresh(), location="/new", query_id="q", expected=EpochNumber(5))
    assert (after.location, after.query_id, after.expected, after.last) == ("/new", "q", 5, None)


def test_adopting_a_moved_checkpoint_keeps_what_is_unsettled(make):
    after = adopted(make.unsettled(), location="/new", query_id="query", expected=EpochNumber(1))
    assert after.unsettled == make.decision()


def test_a_fork_leaves_the_unsettled_epoch_to_the_original(make):
    after = forked(make.unsettled(), uid=Uid("22222222222a"), location="/copy")
    assert (after.uid, after.forked_from) == ("22222222222a", make.uid)
    assert after.unsettled is None
    assert after.expected == 1


def test_a_fork_remembers_the_offsets_that_a_replay_must_match(make):
    after = forked(make.unsettled(), uid=Uid("22222222222a"), location="/copy")
    assert after.last.offsets == make.decision().offsets
    assert not after.last.rows


def test_handles_of_the_unsettled_decision_are_named_until_it_is_settled(make):
    state = make.unsettled()
    assert state.named == {make.handle("orders"), make.handle("audit")}
    assert not settled(sinks_done(state, frozenset(state.pending))).named


def test_the_handles_of_a_decision_are_gathered_once_for_all_that_is_judged(make):
    state = make.unsettled()
    assert state.named is state.named
    assert sinks_done(state, frozenset({make.orders})).named is state.named


def test_small_changes_change_one_thing(make):
    assert bound(make.fresh(query_id=None), "q").query_id == "q"
    for is_clear in (True, False):
        after = stopped(make.fresh(is_stopped=False, is_clear=False), is_clear=is_clear)
        assert (after.is_stopped, after.is_clear) == (True, is_clear)
    assert renamed(make.fresh(), "new").pipeline == "new"


def test_totals_count_what_was_decided_and_not_given_up(make):
    state = settled(sinks_done(make.unsettled(), frozenset({"orders", "audit"})))
    state = decided(state, make.decision(epoch=1))
    assert state.totals["orders"] == Total(
        since=EpochNumber(0), epochs=2, fingerprint=Fingerprint(2, 14), bytes=20
    )
    given = gave_up(state, word("orders", 1))
    assert given.totals["orders"].fingerprint == Fingerprint(1, 7)
    assert given.totals["audit"].fingerprint == Fingerprint(2, 14)


def test_a_sink_that_moves_to_another_target_is_counted_anew(make):
    state = settled(sinks_done(make.unsettled(), frozenset({"orders", "audit"})))
    sinks = {**state.sinks, "orders": {"kind": "memory", "target": "elsewhere"}}
    after = claimed(state, claim=OTHER_CLAIM, driver="", sinks=sinks, query_id=None, run=None)
    assert set(after.totals) == {"audit"}
    assert after.newest_committed == {"audit": 0}


def test_a_fork_has_brought_nothing_to_any_target_yet(make):
    state = sinks_done(make.unsettled(), frozenset({"orders"}))
    copy = forked(state, uid=Uid("22222222222a"), location="/copy")
    assert copy.totals == copy.newest_committed == {}


def test_the_newest_epoch_at_a_sink_is_the_last_one_that_was_carried_out_there(make):
    state = settled(sinks_done(make.unsettled(), frozenset({"orders", "audit"})))
    state = sinks_done(decided(state, make.decision(epoch=1)), frozenset({"orders"}))
    assert state.newest_committed == {"orders": 1, "audit": 0}
    assert settled(gave_up(state, word("audit", 1))).newest_committed == {"orders": 1, "audit": 0}
    assert renamed(state, "new").newest_committed == {}


def test_a_sum_that_is_taken_away_again_leaves_what_was_there():
    assert Fingerprint(3, 5) + Fingerprint(1, 2**64 - 1) - Fingerprint(1, 2**64 - 1) == Fingerprint(
        3, 5
    )
    assert Fingerprint(3, 5) - Fingerprint(1) == Fingerprint(2)


def test_sums_of_two_algorithms_add_up_to_a_number_of_rows_alone():
    old, new = Fingerprint(3, 5, 7), Fingerprint(2, 4, 8)
    assert old + new == new + old == Fingerprint(5)
    assert old - Fingerprint(1, 4, 8) == Fingerprint(2)
    for nothing in (NO_ROWS, Fingerprint(0), Fingerprint(0, 0, 8)):
        assert old + nothing == nothing + old == old - nothing == old
