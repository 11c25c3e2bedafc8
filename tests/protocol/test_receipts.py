"""Receipts of large decisions: lists beside the log, named by digest and read when needed."""

import hashlib
import itertools
import zlib

import pytest

from epochal.errors import CorruptRecord
from epochal.protocol.receipts import ListedReceipts, lay_beside, lists_of, sum_of
from epochal.protocol.records import decode, encode
from epochal.protocol.state import Record, RecordKind, State, claimed, decided
from epochal.terms import UNCLAIMED, Decision, EpochNumber, Generation, Offsets, SinkName

MEGABYTE = 1_000_000


def decision_of(make, tasks, sinks=("orders",), token=None):
    return Decision(
        epoch=EpochNumber(0),
        generation=Generation(1),
        offsets=Offsets(digest="d"),
        receipts={
            SinkName(sink): tuple(
                make.receipt(sink, partition=at, hash_sum=at, token=token) for at in range(tasks)
            )
            for sink in sinks
        },
        decided_at=0.0,
    )


def laid(decision, inline_bytes_max=65_536):
    nonces = (f"nonce-{at}" for at in itertools.count())
    return lay_beside(decision, inline_bytes_max=inline_bytes_max, nonce=lambda: next(nonces))


def record_of(make, decision, sinks):
    state = claimed(
        State(uid=make.uid, pipeline="p", location="/chk"),
        claim=UNCLAIMED,
        driver="",
        sinks={SinkName(sink): {} for sink in sinks},
        query_id=None,
        run=None,
    )
    return Record(kind=RecordKind.COMMIT, nonce="n", written_at=0.0, state=decided(state, decision))


@pytest.mark.parametrize(("tasks", "sinks"), [(10_000, 5), (10, 100)])
def test_the_record_of_a_large_decision_stays_small(make, tasks, sinks):
    names = [f"sink-{at}" for at in range(sinks)]
    decision, lists = laid(decision_of(make, tasks, names))
    data = encode(record_of(make, decision, names))
    assert len(data) < MEGABYTE / 4
    read = decode(data, "x", lists.__getitem__).state.unsettled
    assert read.receipts == decision_of(make, tasks, names).receipts
    assert read.handles == decision.handles


def test_receipts_of_a_thousand_files_each_lie_in_several_lists(make):
    token = {"files": [f"/data/day={at % 30}/part-{at:05d}.parquet" for at in range(1000)]}
    decision, lists = laid(decision_of(make, 300, token=token))
    assert len(lists) > 1
    assert sorted(lists) == sorted(lists_of(decision))
    data = encode(record_of(make, decision, ["orders"]))
    assert len(data) < 10_000
    read = decode(data, "x", lists.__getitem__).state.unsettled
    assert tuple(read.receipts["orders"]) == decision_of(make, 300, token=token).receipts["orders"]


def test_small_decisions_stay_whole_in_their_record(make):
    decision = decision_of(make, 100, ["orders", "audit"])
    assert laid(decision) == (decision, {})


def test_only_the_largest_sinks_are_moved_out(make):
    decision = decision_of(make, 5, ["orders"])
    receipts = {**decision.receipts, **decision_of(make, 5000, ["audit"]).receipts}
    from dataclasses import replace

    moved, lists = laid(replace(decision, receipts=receipts))
    assert isinstance(moved.receipts["audit"], ListedReceipts)
    assert moved.receipts["orders"] == decision.receipts["orders"]
    assert laid(moved) == (moved, {}), "what lies beside the log already is not written again"
    assert len(lists) == 1


def test_an_empty_sink_is_never_moved_out(make):
    decision, lists = laid(decision_of(make, 0), inline_bytes_max=0)
    assert (decision.receipts["orders"], lists) == ((), {})


def test_sums_are_known_without_reading_a_list(make):
    whole = decision_of(make, 5000)
    decision, _ = laid(whole)
    data = encode(record_of(make, decision, ["orders"]))

    def unread(name):
        raise AssertionError(name)

    state = decode(data, "x", unread).state
    assert sum_of(state.unsettled.receipts["orders"]) == sum_of(whole.receipts["orders"])
    assert len(state.unsettled.receipts["orders"]) == 5000
    assert state.last.rows == {"orders": 5000}
    assert encode(record_of(make, state.unsettled, ["orders"])) == data


def test_the_same_receipts_are_never_written_into_the_same_list_twice(make):
    nonces = (f"nonce-{at}" for at in itertools.count())
    first, second = (
        lay_beside(decision_of(make, 10), inline_bytes_max=0, nonce=lambda: next(nonces))[1]
        for _ in range(2)
    )
    assert not first.keys() & second.keys()


def changed(content):
    return content[:-1] + bytes([content[-1] ^ 1])


def test_a_list_that_was_changed_is_refused_by_name(make):
    decision, lists = laid(decision_of(make, 10), inline_bytes_max=0)
    data = encode(record_of(make, decision, ["orders"]))
    (name,) = lists
    read = decode(data, "x", lambda name: changed(lists[name])).state.unsettled
    with pytest.raises(CorruptRecord, match=f"{name}.*digest"):
        list(read.receipts["orders"])


def named(content):
    return hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize(
    ("content", "fact"),
    [
        (
            b"epochal-list 2 n\nsomething new",
            "beside the epoch log: format 2, this release reads up to 1",
        ),
        (b"something else", "does not begin like one"),
        (b"epochal-list 1 n\nnot packed", "its content is not"),
        (b"epochal-list 1 n\n" + zlib.compress(b'["no handle",1,1,1,1,{}]'), "not a handle"),
    ],
)
def test_a_list_that_can_not_be_believed_is_refused_with_the_reason(make, content, fact):
    kept = ListedReceipts(
        [named(content)], sum_of(decision_of(make, 1).receipts["orders"]), read=lambda _: content
    )
    with pytest.raises(CorruptRecord, match=fact):
        list(kept)


def test_a_list_of_other_sums_than_its_record_has_is_refused(make):
    _, lists = laid(decision_of(make, 10), inline_bytes_max=0)
    (name,) = lists
    kept = ListedReceipts(
        [name], sum_of(decision_of(make, 11).receipts["orders"]), read=lists.__getitem__
    )
    with pytest.raises(CorruptRecord, match="other sums"):
        kept[0]


def test_receipts_beside_the_log_compare_like_those_inside(make):
    whole = decision_of(make, 10).receipts["orders"]
    decision, lists = laid(decision_of(make, 10), inline_bytes_max=0)
    beside = decision.receipts["orders"]
    assert whole == beside == whole
    assert beside[2:4] == whole[2:4]
    assert beside[-1] == whole[-1]
    assert hash(beside) == hash(ListedReceipts(list(lists), beside.sum))
