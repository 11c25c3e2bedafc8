"""The core alone: states, epochs, timeouts, expiry, markers over several ticks."""

from __future__ import annotations

import random

import pytest
from table import Table

from epochal.broker.core.batch_check import BatchHeader
from epochal.broker.core.partitions import Partition
from epochal.broker.core.settings import Settings
from epochal.broker.core.transaction_states import (
    COMPLETED,
    END_NEWER,
    END_OLDER,
    MAY_FOLLOW,
    NAMES,
    State,
    move,
)
from epochal.broker.core.transactions import EPOCH_MAX, Transactions
from epochal.errors import IllegalMove
from epochal.kafka.batch_format import Marker
from epochal.kafka.codes import Code
from epochal.kafka.messages.create_topics import CreatableTopic, CreateTopicsRequest
from epochal.kafka.messages.delete_groups import DeleteGroupsRequest
from epochal.kafka.messages.delete_topics import DeleteTopicsRequest, DeleteTopicState
from epochal.kafka.messages.offset_delete import (
    OffsetDeleteRequest,
    OffsetDeleteRequestPartition,
    OffsetDeleteRequestTopic,
)

NOW = 1_000_000
ONE_PARTITION = CreateTopicsRequest(
    topics=[CreatableTopic(name="t", num_partitions=1, replication_factor=1)]
)


def coordinator(**settings: int) -> Transactions:
    ids = iter(range(100))
    return Transactions(Settings(**settings), lambda _: None, lambda: next(ids))


def finish(transactions: Transactions) -> None:
    for txn in list(transactions.unfinished.values()):
        transactions.completed(txn, NOW)


def test_only_steps_of_the_table_are_taken() -> None:
    for at in State:
        for to in State:
            if at in MAY_FOLLOW[to]:
                assert move(at, to) is to
            else:
                with pytest.raises(IllegalMove, match=NAMES[to]):
                    move(at, to)
    for table in (END_OLDER, END_NEWER):
        for (at, *_), then in table.items():
            if isinstance(then, State):
                assert at in MAY_FOLLOW[then]
                assert COMPLETED[then] in State


def test_a_transaction_that_is_open_for_too_long_is_aborted_and_its_producer_fenced() -> None:
    transactions = coordinator()
    given = transactions.init("a", 1_000, None, NOW)
    who = ("a", given.producer_id, given.producer_epoch)
    assert transactions.add(who, [1], [], NOW) is Code.NONE
    transactions.expire(NOW + 999)
    assert not transactions.unfinished
    transactions.expire(NOW + 1_000)
    assert transactions.ids["a"].state is State.PREPARE_ABORT
    assert transactions.add(who, [2], [], NOW) is Code.PRODUCER_FENCED
    finish(transactions)
    assert transactions.end(who, is_commit=True, is_v2=False, now_ms=NOW)[0] is Code.PRODUCER_FENCED
    newer = transactions.end(who, is_commit=True, is_v2=True, now_ms=NOW)
    assert newer[0] is Code.INVALID_TXN_STATE


def test_a_transaction_that_ended_in_time_is_left_alone_by_its_timeout() -> None:
    transactions = coordinator()
    for number in range(50):
        given = transactions.init("a", 1_000, None, NOW + number)
        who = ("a", given.producer_id, given.producer_epoch)
        transactions.add(who, [1], [], NOW + number)
        transactions.end(who, is_commit=True, is_v2=False, now_ms=NOW + number)
        finish(transactions)
    assert len(transactions._deadlines) == 1
    transactions.expire(NOW + 5_000)
    assert transactions.ids["a"].state is State.COMPLETE_COMMIT


@pytest.mark.parametrize("is_v2", [False, True])
def test_epochs_that_run_out_go_on_under_a_new_producer_id(is_v2: bool) -> None:
    transactions = coordinator()
    first = transactions.init("a", 1_000, None, NOW)
    txn = transactions.ids["a"]
    txn.producer_epoch = EPOCH_MAX - 1
    who = ("a", first.producer_id, EPOCH_MAX - 1)
    transactions.add(who, [1], [], NOW)
    answer = transactions.end(who, is_commit=True, is_v2=is_v2, now_ms=NOW)
    assert answer.code is Code.NONE
    if is_v2:
        assert txn.producer_epoch == EPOCH_MAX
        assert answer.producer_id != first.producer_id
        assert answer.producer_epoch == 0
    finish(transactions)
    if is_v2:
        again = transactions.end(who, is_commit=True, is_v2=True, now_ms=NOW)
        assert again == answer
        return
    given = transactions.init("a", 1_000, None, NOW)
    assert given.producer_id != first.producer_id
    assert given.producer_epoch == 0


def test_fencing_at_the_last_epoch_still_fences() -> None:
    transactions = coordinator()
    first = transactions.init("a", 1_000, None, NOW)
    transactions.ids["a"].producer_epoch = EPOCH_MAX - 1
    who = ("a", first.producer_id, EPOCH_MAX - 1)
    transactions.add(who, [1], [], NOW)
    assert transactions.init("a", 1_000, None, NOW).code is Code.CONCURRENT_TRANSACTIONS
    assert transactions.ids["a"].producer_epoch == EPOCH_MAX
    finish(transactions)
    given = transactions.init("a", 1_000, None, NOW)
    assert (given.code, given.producer_epoch) == (Code.NONE, 0)
    assert given.producer_id != first.producer_id


def test_ids_that_nobody_uses_are_forgotten_and_open_ones_are_not() -> None:
    transactions = coordinator(transactional_id_expiry_ms=10_000)
    for name in ("idle", "busy"):
        given = transactions.init(name, 900_000, None, NOW)
        if name == "busy":
            transactions.add((name, given.producer_id, 0), [1], [], NOW)
    transactions.forget_idle(NOW + 10_000)
    assert set(transactions.ids) == {"idle", "busy"}
    transactions.forget_idle(NOW + 10_001)
    assert set(transactions.ids) == {"busy"}


def test_while_markers_are_written_every_client_must_retry() -> None:
    table = Table(settings=Settings(markers_per_tick_max=2))
    wanted = CreatableTopic(name="t", num_partitions=5, replication_factor=1)
    table.ask(CreateTopicsRequest(topics=[wanted]))
    state = table.broker.state
    given = state.transactions.init("a", 60_000, None, table.now_ms)
    who = ("a", given.producer_id, given.producer_epoch)
    numbers = list(state.topics.partitions)
    state.transactions.add(who, numbers, [], table.now_ms)
    table.tick()
    end = {"is_commit": True, "is_v2": False, "now_ms": table.now_ms}
    assert state.transactions.end(who, **end).code is Code.NONE
    for _ in range(2):
        table.tick()
        assert state.transactions.ids["a"].state is State.PREPARE_COMMIT
        assert state.transactions.end(who, **end).code is Code.CONCURRENT_TRANSACTIONS
        assert state.transactions.add(who, numbers, [], 0) is Code.CONCURRENT_TRANSACTIONS
        again = state.transactions.init("a", 60_000, None, table.now_ms)
        assert again.code is Code.CONCURRENT_TRANSACTIONS
    # A broker that dies now finds the decision and carries it out before it lets anybody in.
    recovered = Table(table.disk.restarted()).broker.state
    assert recovered.transactions.ids["a"].state is State.COMPLETE_COMMIT
    assert all(partition.end >= 1 for partition in recovered.topics.partitions.values())
    table.tick()
    assert state.transactions.ids["a"].state is State.COMPLETE_COMMIT


def head(producer: int, epoch: int, sequence: int, count: int, *, is_open: bool) -> BatchHeader:
    bits = 0x10 if is_open else 0
    return BatchHeader(0, 49, 0, 2, 0, bits, count - 1, 0, 0, producer, epoch, sequence, count)


@pytest.mark.parametrize("seed", range(8))
def test_the_last_stable_offset_and_aborted_lists_are_what_a_slow_reader_works_out(
    seed: int,
) -> None:
    """A partition against a model that keeps every batch and looks at all of them every time."""
    chance = random.Random(seed)
    partition = Partition(1, "t", 0)
    log: list[tuple[int, int, int, Marker | None]] = []
    sequences: dict[int, int] = {}
    is_open: dict[int, int] = {}
    for _ in range(300):
        producer = chance.randrange(5)
        if chance.random() < 0.3 and producer in is_open:
            marker = chance.choice(list(Marker))
            offset = partition.end_transaction(producer, 0, marker, 0, NOW)
            log.append((offset, offset, producer, marker))
            del is_open[producer]
        else:
            count = chance.randint(1, 3)
            batch = head(producer, 0, sequences.get(producer, 0), count, is_open=True)
            assert partition.judge(batch).code is Code.NONE
            offset = partition.append(batch)
            assert partition.judge(batch).duplicate_of == offset
            sequences[producer] = sequences.get(producer, 0) + count
            is_open.setdefault(producer, offset)
            log.append((offset, offset + count - 1, producer, None))
        assert partition.stable_end == min(is_open.values(), default=partition.end)
    end = partition.stable_end
    for start in range(0, end, 7):
        result = {(a.producer_id, a.first_offset) for a in partition.aborted_between(start, end)}
        assert visible(log, result, start, end) == truth(log, start, end)


def test_the_last_stable_offset_is_not_below_the_start_of_the_log() -> None:
    """Records of an open transaction may be deleted: readers would be sent to where nothing is."""
    partition = Partition(1, "t", 0)
    partition.append(head(9, 0, 0, 5, is_open=True))
    partition.move_start(3)
    assert partition.stable_end == 3
    partition.end_transaction(9, 0, Marker.ABORT, 0, NOW)
    assert partition.stable_end == 6
    assert [gone.first_offset for gone in partition.aborted_between(3, 6)] == [0]


@pytest.mark.parametrize("how", ["topic", "group", "offset"])
def test_offsets_that_are_forgotten_do_not_come_back_by_a_transaction(how: str) -> None:
    table = Table()
    table.ask(ONE_PARTITION)
    state = table.broker.state
    given = state.transactions.init("a", 60_000, None, table.now_ms)
    who = ("a", given.producer_id, given.producer_epoch)
    state.transactions.add(who, (), ("g", "kept"), table.now_ms)
    rows = [("t", 0, 100, -1, "", table.now_ms)]
    state.offsets.commit("g", rows)
    for group in ("g", "kept"):
        state.groups.ensure(group, table.now_ms)
        state.offsets.commit_later(group, given.producer_id, rows)
    match how:
        case "topic":
            table.ask(DeleteTopicsRequest(topics=[DeleteTopicState(name="t")]))
            table.ask(ONE_PARTITION)
        case "group":
            assert table.ask(DeleteGroupsRequest(groups_names=["g"])).results[0].error_code == 0
        case "offset":
            part = OffsetDeleteRequestPartition(partition_index=0)
            topic = OffsetDeleteRequestTopic(name="t", partitions=[part])
            assert table.ask(OffsetDeleteRequest(group_id="g", topics=[topic])).error_code == 0
    restarted = Table(table.disk.restarted()).broker.state
    for one in (state, restarted):
        one.transactions.end(who, is_commit=True, is_v2=True, now_ms=table.now_ms)
        one.finish(table.now_ms)
        assert "g" not in one.offsets.groups
        assert ("kept" in one.offsets.groups) == (how != "topic")


def test_offsets_that_wait_for_a_transaction_do_not_expire() -> None:
    table = Table()
    table.ask(ONE_PARTITION)
    state = table.broker.state
    given = state.transactions.init("a", 60_000, None, table.now_ms)
    state.transactions.add(("a", *given[1:]), (), ("g",), table.now_ms)
    state.groups.ensure("g", table.now_ms)
    state.offsets.commit("g", [("t", 0, 100, -1, "", table.now_ms)])
    state.offsets.commit_later("g", given.producer_id, [("t", 0, 200, -1, "", table.now_ms)])
    state.forget_idle(table.now_ms + 8 * 86_400_000)
    assert state.offsets.groups["g"]["t", 0].offset == 100
    state.offsets.decide("g", given.producer_id, is_commit=True)
    assert state.offsets.groups["g"]["t", 0].offset == 200


def visible(
    log: list[tuple[int, int, int, Marker | None]],
    result: set[tuple[int, int]],
    start: int,
    end: int,
) -> list[int]:
    """What a client makes of the answer."""
    coming = sorted(result, key=lambda row: row[1])
    gone: set[int] = set()
    seen = []
    for first, last, producer, marker in log:
        if last < start or first >= end:
            continue
        while coming and coming[0][1] <= last:
            gone.add(coming.pop(0)[0])
        if marker is not None:
            gone.discard(producer)
        elif producer not in gone:
            seen.append(first)
    return seen


def truth(log: list[tuple[int, int, int, Marker | None]], start: int, end: int) -> list[int]:
    seen = []
    for at, (first, last, producer, marker) in enumerate(log):
        if marker is None and last >= start and first < end:
            ends = (m for _, _, p, m in log[at:] if p == producer and m is not None)
            if next(ends) is Marker.COMMIT:
                seen.append(first)
    return seen
