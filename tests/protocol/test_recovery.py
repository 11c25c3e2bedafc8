"""What becomes of what is found in doubt, and of rows that a target lost."""

import time
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from epochal.errors import Fenced, InvariantBroken, Unsettled
from epochal.protocol.invariants import RULES, require_own_receipts, require_unnamed
from epochal.protocol.recovery import Verdict, judge, plan_rewrite
from epochal.protocol.state import CLAIMS_KEPT
from epochal.terms import (
    Claim,
    EpochNumber,
    Fingerprint,
    Generation,
    InDoubt,
    Receipt,
    SinkName,
    Uid,
    claims_of,
    total,
)

ORDERS = SinkName("orders")
COPY = Claim("x9x9x9x9")
"""Of a driver that works with a copy of the log: the log itself has another for that generation."""


def found(handle, name=None):
    return InDoubt(name=name or str(handle), handle=handle)


def test_what_the_unsettled_decision_names_is_committed(make):
    assert judge(found(make.handle("orders")), make.unsettled()).verdict is Verdict.COMMIT


def test_what_no_decision_names_is_aborted(make):
    assert judge(found(make.handle("orders", attempt=2)), make.unsettled()).verdict is Verdict.ABORT


def test_judging_thousands_against_thousands_of_receipts_takes_seconds(make):
    decision = replace(
        make.decision(),
        receipts={ORDERS: tuple(make.receipt("orders", partition=at) for at in range(20_000))},
    )
    state = make.unsettled(unsettled=decision)
    listed = [found(make.handle("orders", partition=at, attempt=2)) for at in range(5_000)]
    began_s = time.process_time()
    assert {judge(one, state).verdict for one in listed} == {Verdict.ABORT}
    assert time.process_time() - began_s < 10


def test_what_can_not_be_read_is_left_for_a_person(make):
    assert judge(found(None, "epochal-strange"), make.fresh()).verdict is Verdict.LEAVE


def test_what_belongs_to_another_pipeline_is_left(make):
    other = make.handle("orders", uid=Uid("zzzzzzzzzzzz"))
    assert judge(found(other), make.fresh()).verdict is Verdict.LEAVE


def test_what_a_driver_with_a_copy_of_the_log_prepared_is_left_to_it(make):
    judged = judge(found(make.handle("orders", claim=COPY)), make.unsettled())
    assert judged.verdict is Verdict.LEAVE
    assert "one with a copy of the log did" in judged.because


def test_of_what_was_prepared_too_many_starts_ago_nobody_is_blamed(make):
    state = make.unsettled(generation=Generation(1 + CLAIMS_KEPT), claims=("b" * 8,) * CLAIMS_KEPT)
    judged = judge(found(make.handle("orders", attempt=2)), state)
    assert judged.verdict is Verdict.LEAVE
    assert "can't be told any more" in judged.because


def test_what_a_living_driver_of_the_original_prepares_is_left_to_it(make):
    ahead = make.handle("orders", epoch=make.unsettled().expected + 1)
    assert judge(found(ahead), make.unsettled()).verdict is Verdict.LEAVE


def test_what_an_earlier_driver_of_the_same_log_prepared_is_aborted(make):
    state = replace(make.fresh(), generation=Generation(2), claims=(COPY, make.handle().claim))
    assert judge(found(make.handle("orders")), state).verdict is Verdict.ABORT


def test_a_trace_of_a_later_generation_means_that_we_are_the_zombie(make):
    with pytest.raises(Fenced, match="generation 2 is at work"):
        judge(found(make.handle("orders", generation=2)), make.fresh())


def test_a_named_handle_is_never_about_to_be_aborted(make):
    handle = make.handle("orders")
    with pytest.raises(InvariantBroken, match="I5"):
        require_unnamed(handle, Generation(1), {handle})


def own(make, receipts, sinks=("orders",)):
    require_own_receipts(
        receipts,
        uid=make.uid,
        generation=Generation(1),
        claim=make.handle().claim,
        epoch=EpochNumber(0),
        sinks=[SinkName(sink) for sink in sinks],
    )


def test_two_receipts_for_one_partition_break_i6(make):
    twice = [make.receipt("orders", attempt=1), make.receipt("orders", attempt=2)]
    with pytest.raises(InvariantBroken, match="I6: sink orders: two receipts"):
        own(make, {ORDERS: twice})


@pytest.mark.parametrize(
    "change",
    [{"generation": 2}, {"claim": COPY}, {"epoch": 1}, {"uid": Uid("zzzzzzzzzzzz")}],
    ids=lambda change: next(iter(change)),
)
def test_a_receipt_of_somebody_else_breaks_i6(make, change):
    with pytest.raises(InvariantBroken, match="is not ours"):
        own(make, {ORDERS: [make.receipt("orders", **change)]})


def test_a_receipt_of_another_sink_breaks_i6(make):
    with pytest.raises(InvariantBroken, match="is not ours"):
        own(make, {ORDERS: [make.receipt("audit")]})


def test_a_decision_that_leaves_out_a_sink_breaks_i3(make):
    with pytest.raises(InvariantBroken, match="I3"):
        own(make, {ORDERS: []}, sinks=("orders", "audit"))


def test_every_rule_has_a_text():
    assert list(RULES) == [f"I{number}" for number in range(1, 11)]


class Parts:
    """Receipts of partitions, by their row hashes."""

    def __init__(self, make):
        self.make = make

    def of(self, *partitions, generation=1):
        return tuple(
            Receipt(
                handle=self.make.handle("orders", partition=at, generation=generation),
                fingerprint=total(Fingerprint(1, row) for row in rows),
            )
            for at, rows in enumerate(partitions)
        )


@pytest.fixture
def parts(make):
    return Parts(make)


def names(receipts):
    return [str(receipt.handle) for receipt in receipts]


def test_all_lost_and_equal_rows_in_another_cut_are_written_again(parts):
    decided, again = parts.of([1, 2], [3]), parts.of([3, 1], [], [2], generation=2)
    plan = plan_rewrite(ORDERS, decided, names(decided), again)
    assert names(plan.receipts) == names(again)
    assert claims_of(plan.receipts) == claims_of((*decided, *again))
    assert plan.surplus == ()


def test_all_lost_and_other_rows_stop_with_the_evidence(parts):
    decided, again = parts.of([1, 2]), parts.of([1, 4], generation=2)
    with pytest.raises(Unsettled, match=r"all rows was 2 rows, sum 0+3 .* and is 2 rows, sum 0+5"):
        plan_rewrite(ORDERS, decided, names(decided), again)


def test_some_lost_and_equal_partitions_are_written_again_and_the_rest_is_surplus(parts):
    decided, again = parts.of([1], [2], [3]), parts.of([1], [2], [3], generation=2)
    plan = plan_rewrite(ORDERS, decided, names(decided[1:2]), again)
    taken = replace(again[1], replaces=(decided[1].handle.claim,))
    assert set(plan.receipts) == {decided[0], taken, decided[2]}
    assert set(plan.surplus) == {again[0], again[2]}


def test_some_lost_and_another_cut_stop_with_the_evidence(parts):
    decided, again = parts.of([1, 2], [3]), parts.of([1], [2, 3], generation=2)
    with pytest.raises(Unsettled, match="partition 0") as caught:
        plan_rewrite(ORDERS, decided, names(decided[:1]), again)
    assert "the same rows in other partitions" in caught.value.hint


def test_without_hashes_nothing_is_written_again(make):
    decided = (make.receipt("orders", hash_sum=None),)
    again = (make.receipt("orders", hash_sum=None, generation=2),)
    with pytest.raises(Unsettled, match="not hashed"):
        plan_rewrite(ORDERS, decided, names(decided), again)


def test_equal_sums_of_another_algorithm_prove_nothing(parts):
    decided, again = parts.of([1, 2]), parts.of([1, 2], generation=2)
    by_another = [
        replace(receipt, fingerprint=replace(receipt.fingerprint, algorithm=99))
        for receipt in decided
    ]
    with pytest.raises(Unsettled, match=r"row hash 99 when it was decided .* row hash 1 now"):
        plan_rewrite(ORDERS, by_another, names(decided), again)


rows = st.lists(st.integers(1, 2**64 - 1), max_size=4)


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), decided_rows=st.lists(rows, min_size=1, max_size=4))
def test_whatever_stands_after_a_rewrite_sums_to_what_was_decided(parts, data, decided_rows):
    decided = parts.of(*decided_rows)
    again = parts.of(*data.draw(st.permutations(decided_rows)), generation=2)
    lost = data.draw(st.sets(st.sampled_from(names(decided)), min_size=1))
    try:
        plan = plan_rewrite(ORDERS, decided, lost, again)
    except Unsettled:
        return
    assert total(r.fingerprint for r in plan.receipts) == total(r.fingerprint for r in decided)
    assert not set(names(plan.receipts)) & lost
    assert {*names(plan.receipts), *names(plan.surplus)} >= set(names(again))
    partitions = [receipt.handle.partition for receipt in plan.receipts]
    assert len(partitions) == len(set(partitions))
