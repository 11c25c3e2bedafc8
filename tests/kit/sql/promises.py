"""What both strategies promise on every database: append, repeat, abort, prove, forget.

A module of tests for each database imports these, beside its own fixtures `orders` (a table of id
and name without a key) and `some`.
"""

from __future__ import annotations

import time

import pytest

from epochal.contract import Begin
from epochal.errors import PreparedLost, Refused, WentBack
from epochal.terms import NO_ROWS, EpochNumber, Proof, Receipt, Uid

BOTH = pytest.mark.parametrize("strategy", ["staged", "prepared"])


@BOTH
def test_rows_are_invisible_until_they_are_committed_and_then_there_once(orders, some, strategy):
    life = orders.life(strategy=strategy)
    life.start(some(1))
    receipts = [life.prepare(some(1, 2), 0, 0), life.prepare(some(3), 0, 1)]
    assert orders.rows() == []
    life.rehearse(0, receipts)
    assert orders.rows() == []
    assert {one.handle for one in life.fresh().committer.in_doubt()} == {r.handle for r in receipts}
    life.commit(0, receipts)
    assert orders.rows(columns="id") == [(1,), (2,), (3,)]
    assert orders.leftovers() == []


@BOTH
def test_a_commit_may_be_repeated_by_anybody(orders, some, strategy):
    life = orders.life(strategy=strategy)
    receipts = life.write(0, some(1, 2), some(3))
    life.commit(0, receipts)
    for generation in (1, 2):
        again = orders.keep(life.fresh(generation=generation))
        again.commit(0, receipts)
    assert len(orders.rows()) == 3


@BOTH
def test_a_commit_needs_no_rehearsal(orders, some, strategy):
    life = orders.life(strategy=strategy)
    life.start(some(1))
    receipts = [life.prepare(some(1), 0)]
    orders.keep(life.fresh(generation=2)).commit(0, receipts)
    assert len(orders.rows()) == 1
    assert orders.leftovers() == []


@BOTH
def test_a_decision_is_not_carried_out_at_a_start_where_the_epoch_before_it_is_lost(
    orders, some, strategy
):
    """The target went back after the start had compared it with the log."""
    life = orders.life(strategy=strategy)
    life.write(0, some(1))
    receipts = [life.prepare(some(2), 2)]
    life.close()
    for committed, is_lost in [(1, True), (0, False)]:
        start = orders.keep(life.fresh(generation=2, committed=EpochNumber(committed)))
        if not is_lost:
            start.commit(2, receipts)
            continue
        with pytest.raises(WentBack):
            start.commit(2, receipts)
        assert orders.rows(columns="id") == [(1,)]
        assert [one.handle for one in start.committer.in_doubt()] == [receipts[0].handle]
    assert orders.rows(columns="id") == [(1,), (2,)]


@BOTH
def test_an_aborted_attempt_is_gone_and_proven_so(orders, some, strategy):
    life = orders.life(strategy=strategy)
    life.start(some(1))
    receipt = life.prepare(some(1), 0)
    assert life.committer.outcome(EpochNumber(0), receipt) is Proof.UNKNOWN
    for _ in range(2):
        life.committer.abort(EpochNumber(0), [receipt])
    assert orders.leftovers() == []
    assert life.committer.outcome(EpochNumber(0), receipt) is Proof.ABORTED
    with pytest.raises(PreparedLost) as lost:
        life.commit(0, [receipt])
    assert lost.value.handles == (str(receipt.handle),)
    assert orders.rows() == []


@BOTH
def test_an_abort_leaves_a_committed_handle_alone(orders, some, strategy):
    life = orders.life(strategy=strategy)
    receipts = life.write(0, some(1))
    life.committer.abort(EpochNumber(0), receipts)
    assert len(orders.rows()) == 1
    assert life.committer.outcome(EpochNumber(0), receipts[0]) is Proof.COMMITTED


@BOTH
def test_only_the_winner_of_two_attempts_becomes_visible(orders, some, strategy):
    life = orders.life(strategy=strategy)
    life.start(some(1))
    loser, winner = life.prepare(some(1), 0), life.prepare(some(1), 0)
    life.rehearse(0, [winner])
    life.commit(0, [winner])
    listed = life.committer.in_doubt()
    assert [one.handle for one in listed] == [loser.handle]
    bare = Receipt(handle=listed[0].handle, fingerprint=NO_ROWS)
    life.committer.abort(EpochNumber(0), [bare])
    assert len(orders.rows()) == 1
    assert orders.leftovers() == []
    assert life.committer.outcome(EpochNumber(0), loser) is Proof.ABORTED


@BOTH
def test_an_empty_epoch_is_committed_and_proven(orders, some, strategy):
    life = orders.life(strategy=strategy)
    life.write(0, some(1))
    life.write(1, some(), some())
    life.commit(2, [])
    life.commit(2, [])
    assert [mark.epoch for mark in life.committer.newest()] == [2]
    assert orders.leftovers() == []


@BOTH
def test_a_task_without_rows_is_never_taken_for_lost(orders, some, strategy):
    life = orders.life(strategy=strategy)
    life.start(some(1))
    empty = life.prepare(some(), 0)
    assert life.committer.outcome(EpochNumber(0), empty) is Proof.UNKNOWN
    life.rehearse(0, [empty])
    life.commit(0, [empty])
    assert life.committer.outcome(EpochNumber(0), empty) is Proof.COMMITTED


@BOTH
def test_the_newest_epoch_is_reported_for_each_uid_of_this_name(orders, some, strategy):
    life = orders.life(strategy=strategy)
    for epoch in range(3):
        life.write(epoch, some(epoch))
    other = orders.keep(life.fresh(uid=Uid("zyxwvuts2345"), run="again"))
    other.write(0, some(7))
    marks = {mark.uid: (mark.epoch, mark.run) for mark in life.committer.newest()}
    assert marks == {life.uid: (2, None), other.uid: (0, "again")}
    stranger = orders.life("orders", strategy=strategy, name="another sink")
    assert list(stranger.committer.newest()) == []


@BOTH
def test_pruning_forgets_what_is_settled_and_keeps_the_newest(orders, some, strategy):
    life = orders.life(strategy=strategy)
    receipts = [life.write(epoch, some(epoch))[0] for epoch in range(4)]
    life.committer.prune(EpochNumber(2))
    life.committer.prune(EpochNumber(100))
    assert [mark.epoch for mark in life.committer.newest()] == [3]
    assert orders.sql(f"SELECT DISTINCT epoch FROM {orders.meta}.ledger") == [(3,)]
    assert life.committer.outcome(EpochNumber(0), receipts[0]) is Proof.UNKNOWN
    with pytest.raises(Refused):
        life.commit(0, [receipts[0]])
    assert len(orders.rows()) == 4


@BOTH
def test_what_others_prepared_keeps_nobody_from_forgetting(orders, some, strategy):
    life = orders.life(strategy=strategy, lock_timeout_s=1)
    life.start(some(1))
    # Their rows of the ledger are on either side.
    for uid in ("aaaaaaaa2345", "zzzzzzzz2345"):
        other = orders.keep(life.fresh(uid=Uid(uid)))
        other.start(some(1))
        other.prepare(some(7), 0)
    life.committer.begin(Begin(epoch=EpochNumber(0)))
    life.committer.prune(EpochNumber(5))
    for epoch in range(3):
        life.write(epoch, some(epoch))
    late = life.prepare(some(2), 2)
    life.committer.prune(EpochNumber(2))
    assert orders.sql(f"SELECT DISTINCT epoch FROM {orders.meta}.ledger") == [(2,)]
    life.committer.abort(EpochNumber(2), [late])
    life.committer.drop(is_dry_run=False)
    assert orders.sql(f"SELECT epoch FROM {orders.meta}.ledger") == []


def test_the_servers_clock_is_read(orders):
    assert abs(orders.life().committer.server_time() - time.time()) < 10
