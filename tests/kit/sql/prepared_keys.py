"""`strategy="prepared"` on tables with keys, tried on every database that stages late attempts.

First attempts prepare, others stage their rows.

The orders in which attempts of one task can end are tried one by one, then many at random. A module
of tests for each database imports these, and has a fixture `varied`: a place whose table `orders`
has the fields of `VARIED` as columns of that database.
"""

from __future__ import annotations

import random
import threading
import time
from contextlib import suppress
from dataclasses import replace

import pyarrow as pa
import pytest
from kit.sql.crashes import settings_at

from epochal.contract import Begin, Task
from epochal.errors import EpochalError, PreparedLost, RowRejected, TryAgain
from epochal.terms import NO_ROWS, Claim, EpochNumber, Proof, Receipt
from epochal.testing.crash import crash_at_every_call

LOCK_TIMEOUT = "(?i)lock (wait )?timeout"
PRIMARY_KEY = "orders_pkey|PRIMARY"
VARIED = pa.table(
    {
        "id": pa.array([1, 2], pa.int32()),
        "name": ["a", None],
        "real_": pa.array([1.5, 2.5], pa.float32()),
        "mood": ["glad", "sad"],
        "at": pa.array([0, 1000], pa.timestamp("us", "UTC")),
        "day": pa.array([0, 1], pa.date32()),
        "price": pa.array([None, "1.25"]).cast(pa.decimal128(9, 2)),
    }
)


def written(life, epoch: int, partition: int, rows: pa.Table, *, is_first: bool, **changes):
    """A writer that was given its rows; `changes` are of its handle."""
    handout = life.committer.begin(Begin(epoch=EpochNumber(epoch)))
    handle = replace(life.next_handle(epoch, partition), **changes)
    task = Task(
        handle=handle, schema=rows.schema, handout=handout, is_first=is_first, limits=life.limits
    )
    writer = life.sink.writer(task)
    for batch in rows.to_batches():
        writer.write(batch)
    return writer


def attempt(life, epoch: int, partition: int, rows: pa.Table, *, is_first: bool = False) -> Receipt:
    return written(life, epoch, partition, rows, is_first=is_first).prepare()


def left_open(life, epoch: int, partition: int, rows: pa.Table):
    """A first attempt that has sent its rows, and not prepared them."""
    writer = written(life, epoch, partition, rows, is_first=True)
    writer._buffer.drain()
    return writer


@pytest.fixture
def life(keyed, some):
    made = keyed.life(strategy="prepared", lock_timeout_s=2, columns=["id", "name"])
    made.start(some(1))
    return made


def slots(place) -> int:
    ((count,),) = place.sql(f"SELECT count(*) FROM {place.meta}_staging.slots")
    return count


def held(life) -> set:
    """The handles of what is prepared or staged."""
    return {one.handle for one in life.committer.in_doubt()}


def ids(place) -> list[int]:
    return [key for (key,) in place.rows(columns="id")]


def test_first_attempts_prepare_and_nothing_is_staged(keyed, life, some):
    receipts = [attempt(life, 0, part, some(part, part + 10), is_first=True) for part in range(2)]
    assert held(life) == {one.handle for one in receipts}
    life.rehearse(0, receipts)
    life.commit(0, receipts)
    assert (ids(keyed), slots(keyed), keyed.leftovers()) == ([0, 1, 10, 11], 0, [])


def test_an_orphan_that_prepared_is_rolled_back_before_its_retry_is_applied(keyed, life, some):
    orphan = attempt(life, 0, 0, some(1, 2), is_first=True)
    other = attempt(life, 0, 1, some(3), is_first=True)
    retry = attempt(life, 0, 0, some(1, 2))
    assert len(keyed.leftovers()) == 3
    life.rehearse(0, [retry, other])
    assert orphan.handle not in held(life)
    life.committer.confirm(EpochNumber(0), [retry, other])
    life.commit(0, [retry, other])
    assert (ids(keyed), keyed.leftovers()) == ([1, 2, 3], [])
    for receipt in (retry, other):
        assert life.committer.outcome(EpochNumber(0), receipt) is Proof.COMMITTED
    life.commit(0, [retry, other])
    assert ids(keyed) == [1, 2, 3]


def test_a_first_attempt_that_is_still_open_loses_its_session(keyed, life, some):
    zombie = left_open(life, 0, 0, some(1, 2))
    retry = attempt(life, 0, 0, some(1, 2))
    life.rehearse(0, [retry])
    with pytest.raises(EpochalError):
        zombie.prepare()
    life.commit(0, [retry])
    assert (ids(keyed), keyed.leftovers()) == ([1, 2], [])


def test_a_first_attempt_that_comes_late_meets_the_keys_of_its_retry(keyed, life, some):
    retry = attempt(life, 0, 0, some(1, 2))
    handout = life.committer.begin(Begin(epoch=EpochNumber(0)))
    late = [
        life.sink.writer(
            Task(
                handle=life.next_handle(0, 0),
                schema=some(1).schema,
                handout=handout,
                is_first=True,
                limits=life.limits,
            )
        )
        for _ in range(2)
    ]
    life.rehearse(0, [retry])
    late[0].write(some(1, 2).to_batches()[0])
    with pytest.raises(TryAgain, match=LOCK_TIMEOUT):
        late[0].prepare()
    life.commit(0, [retry])
    late[1].write(some(1, 2).to_batches()[0])
    with pytest.raises(RowRejected, match=PRIMARY_KEY):
        late[1].prepare()
    assert (ids(keyed), keyed.leftovers()) == ([1, 2], [])


def test_a_first_attempt_that_comes_late_with_other_keys_is_listed_and_swept(keyed, life, some):
    retry = attempt(life, 0, 0, some(1))
    life.rehearse(0, [retry])
    life.commit(0, [retry])
    late = attempt(life, 0, 0, some(7), is_first=True)
    assert [one.handle for one in life.committer.in_doubt()] == [late.handle]
    life.committer.abort(EpochNumber(0), [late])
    assert (ids(keyed), keyed.leftovers()) == ([1], [])


def test_a_decision_is_carried_out_again_though_an_attempt_that_lost_holds_its_keys(
    keyed, life, some
):
    retry = attempt(life, 0, 0, some(1, 2))
    other = attempt(life, 0, 1, some(3), is_first=True)
    life.rehearse(0, [retry, other])
    life.close()
    attempt(life, 0, 0, some(2, 9), is_first=True)
    copied = replace(life.next_handle(0, 0), claim=Claim("k7q2m4xz"))
    written(life, 0, 0, some(50), is_first=True, claim=copied.claim).prepare()
    newer = keyed.keep(life.fresh(generation=2))
    assert len(newer.committer.in_doubt()) == 4
    newer.commit(0, [retry, other])
    assert ids(keyed) == [1, 2, 3]
    (left,) = newer.committer.in_doubt()
    assert left.handle.claim == copied.claim
    assert len(keyed.leftovers()) == 1


def test_a_rehearsal_that_was_lost_is_applied_again(keyed, life, some):
    receipts = [attempt(life, 0, 0, some(1)), attempt(life, 0, 1, some(2), is_first=True)]
    life.rehearse(0, receipts)
    for is_confirmed in (True, False):
        for session in keyed.open_transactions():
            keyed.end_session(session)
        if is_confirmed:
            life.committer.confirm(EpochNumber(0), receipts)
            assert len(keyed.open_transactions()) == 1
    with pytest.raises(EpochalError):
        life.commit(0, receipts)
    life.commit(0, receipts)
    assert (ids(keyed), keyed.leftovers()) == ([1, 2], [])


def test_what_is_gone_is_missed_before_the_decision_and_named_after_it(keyed, life, some):
    staged, other = attempt(life, 0, 0, some(1)), attempt(life, 0, 1, some(2), is_first=True)
    keyed.sql(f"UPDATE {keyed.meta}_staging.slots SET handle = NULL")
    with pytest.raises(TryAgain, match="no decision was made"):
        life.rehearse(0, [staged, other])
    with pytest.raises(PreparedLost) as lost:
        life.commit(0, [staged, other])
    assert lost.value.handles == (str(staged.handle),)
    assert ids(keyed) == [2]


def test_a_staged_row_that_the_table_refuses_fails_the_rehearsal(keyed, life, some):
    life.write(0, some(1))
    refused = attempt(life, 1, 0, some(2, 1))
    with pytest.raises(RowRejected, match=PRIMARY_KEY):
        life.rehearse(1, [refused])
    life.committer.abort(EpochNumber(1), [refused])
    assert (ids(keyed), keyed.leftovers()) == ([1], [])


def test_one_key_in_two_tasks_is_reported_with_what_to_do(keyed, life, some):
    receipts = [attempt(life, 0, 0, some(1), is_first=True), attempt(life, 0, 1, some(1))]
    with pytest.raises(TryAgain, match=LOCK_TIMEOUT) as raised:
        life.rehearse(0, receipts)
    assert "repartition by the key" in raised.value.hint


@pytest.mark.ways("columns", "bytes")
def test_a_retry_stages_values_as_the_columns_keep_them(varied):
    life = varied.life(strategy="prepared")
    life.start(VARIED)
    seen = []
    for epoch, is_first in enumerate([True, False]):
        receipt = attempt(life, epoch, 0, VARIED, is_first=is_first)
        life.rehearse(epoch, [receipt])
        life.commit(epoch, [receipt])
        seen.append(varied.rows())
        varied.sql(f"DELETE FROM {varied.schema}.orders")
    assert seen[0] == seen[1]
    assert len(seen[0]) == 2


def said_of_strategy(place, some, **options):
    """What the check says of rows that are written once."""
    found = place.life(name=str(options), **options).committer.check(some(1).schema)
    (said,) = [one for one in found if one.name == "rows written once"]
    return said


def test_the_check_says_which_strategy_fits(keyed, some):
    fitting = said_of_strategy(keyed, some)
    assert "strategy='prepared' would fit this table and server" in fitting.because
    chosen = said_of_strategy(keyed, some, strategy="prepared")
    assert chosen.granted
    assert "from staging" in chosen.because
    upsert = said_of_strategy(keyed, some, mode="upsert", keys="id")
    assert "has no mode='upsert'" in upsert.because


def test_a_crash_at_any_call_leaves_every_row_visible_once(place):
    settings = settings_at(place, key="PRIMARY KEY", strategy="prepared", lock_timeout_s=1)
    report = crash_at_every_call(settings, second=False, effects_only=True)
    assert report.runs > 15


# Many orders at random


def storm(place, some, chance: random.Random, epochs: int) -> None:
    """Each epoch: attempts that end anywhere, sessions that are killed, drivers that die."""
    generation, wanted = 1, []
    life = place.life(strategy="prepared", lock_timeout_s=2, generation=generation)
    is_over = threading.Event()

    def kill() -> None:
        admin = place.other_connection()
        while not is_over.wait(chance.random() * 0.4):
            admin.kill_any_session()
        admin.admin.close()

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        for epoch in range(epochs):
            rows = [some(*(epoch * 100 + part * 10 + n for n in range(4))) for part in range(2)]
            wanted += [key for part in rows for key in part.column("id").to_pylist()]
            receipts, zombies = None, []
            while receipts is None:
                with suppress(EpochalError):
                    found = [
                        _last_of(life, (epoch, part), one, chance, zombies)
                        for part, one in enumerate(rows)
                    ]
                    life.rehearse(epoch, found)
                    life.committer.confirm(EpochNumber(epoch), found)
                    receipts = found
                if receipts is None:
                    with suppress(EpochalError):
                        life.committer.abort(EpochNumber(epoch), _listed(life))
            deadline_s = time.monotonic() + 60
            while True:
                if chance.random() < 0.3:
                    life.close()
                    generation += 1
                    life = place.keep(life.fresh(generation=generation))
                for zombie in zombies:
                    with suppress(EpochalError):
                        zombie.prepare()
                zombies = []
                with suppress(EpochalError):
                    life.commit(epoch, receipts)
                    break
                assert time.monotonic() < deadline_s, "a decided epoch can't be carried out"
    finally:
        is_over.set()
        killer.join()
    while place.leftovers():
        with suppress(EpochalError):
            life.committer.abort(EpochNumber(epochs), _listed(life))
    assert ids(place) == sorted(wanted)


def _last_of(life, at, rows, chance, zombies) -> Receipt:
    """The receipt of a task whose first attempt may have ended anywhere."""
    end = chance.choice(["won", "won", "prepared", "open", "never"])
    if end in {"won", "prepared"}:
        receipt = attempt(life, *at, rows, is_first=True)
        if end == "won":
            return receipt
    elif end == "open":
        zombies.append(left_open(life, *at, rows))
    return attempt(life, *at, rows)


def _listed(life) -> list[Receipt]:
    listed = life.committer.in_doubt()
    return [Receipt(handle=one.handle, fingerprint=NO_ROWS) for one in listed]


def test_attempts_in_any_order_leave_each_row_once(keyed, some):
    storm(keyed, some, random.Random(3), 8)


@pytest.mark.proof
@pytest.mark.parametrize("seed", range(4))
def test_many_attempts_in_any_order_leave_each_row_once(keyed, some, seed):
    storm(keyed, some, random.Random(seed), 60)
