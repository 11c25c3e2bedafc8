"""What both strategies keep on every database: many drivers, pipelines and sinks at a time.

A module of tests for each database imports these, beside its own fixtures `orders` (a table of id
and name without a key) and `some`.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pyarrow as pa
import pymysql
import pytest

from epochal.contract import Begin, Task
from epochal.errors import CorruptRecord, EpochalError, PreparedLost, Refused, TryAgain
from epochal.kit.sql.ledger import Ledger
from epochal.kit.sql.names import staging_name
from epochal.terms import EpochNumber, Limits, Proof, Uid

VICTIM = Path(__file__).with_name("memory_victim.py")
BOTH = pytest.mark.parametrize("strategy", ["staged", "prepared"])


@BOTH
def test_drivers_that_commit_one_decision_at_a_time_agree(orders, some, strategy):
    life = orders.life(strategy=strategy)
    life.start(some(1))
    lives = [orders.keep(life.fresh(generation=number)) for number in (1, 2, 3)]
    for epoch in range(3):
        receipts = [life.prepare(some(epoch * 10 + n), epoch, n) for n in range(3)]
        barrier = threading.Barrier(len(lives))

        def commit(one, epoch=epoch, receipts=receipts, barrier=barrier):
            barrier.wait()
            for _ in range(20):
                try:
                    return one.commit(epoch, receipts)
                except TryAgain:
                    continue
            raise AssertionError("never committed")

        with ThreadPoolExecutor(len(lives)) as pool:
            list(pool.map(commit, lives))
    assert len(orders.rows()) == 9
    assert orders.leftovers() == []


@BOTH
def test_two_pipelines_share_a_table_and_a_ledger(orders, some, strategy):
    first = orders.life(strategy=strategy)
    second = orders.keep(first.fresh(uid=Uid("zyxwvuts2345")))
    first.start(some(1))
    second.start(some(1))
    mine, yours = first.prepare(some(1), 0), second.prepare(some(2), 0)
    assert [one.handle for one in first.committer.in_doubt()] == [mine.handle]
    second.commit(0, [yours])
    first.commit(0, [mine])
    assert orders.rows(columns="id") == [(1,), (2,)]


@BOTH
def test_ten_sinks_write_to_one_table_at_a_time(orders, some, strategy):
    def run(number: int) -> None:
        life = orders.life(strategy=strategy, name=f"sink {number}", pool_max=2)
        for epoch in range(2):
            life.write(epoch, some(number * 100 + epoch))
        life.close()

    with ThreadPoolExecutor(10) as pool:
        list(pool.map(run, range(10)))
    assert len(orders.rows()) == 20
    assert orders.leftovers() == []


def test_a_session_that_was_chosen_to_end_a_deadlock_asks_again(orders, some, monkeypatch):
    """As a start may, beside others that create their tables."""
    life = orders.life()
    (code,) = life.committer.dialect.deadlocks
    error = (
        psycopg.errors.lookup(code)("deadlock detected")
        if isinstance(code, str)
        else pymysql.err.OperationalError(code, "Deadlock found")
    )
    really, left = Ledger.format, [3]

    def read(ledger, session):
        left[0] -= 1
        if left[0] >= 0:
            raise error
        return really(ledger, session)

    monkeypatch.setattr(Ledger, "format", read)
    life.start(some(1))
    assert left[0] < 0, "the ledger was not read"
    left[0] = 1_000
    with pytest.raises(TryAgain):
        life.committer.check(some(1).schema)
    assert left[0] > 990


@BOTH
def test_attempts_whose_names_begin_alike_are_distinguished(orders, some, strategy):
    life = orders.life(strategy=strategy)
    life.attempts = iter([1, 36])
    life.start(some(1))
    won, lost = life.prepare(some(1), 0), life.prepare(some(2), 0)
    assert staging_name(lost.handle).startswith(staging_name(won.handle))
    life.commit(0, [won])
    assert life.committer.outcome(EpochNumber(0), won) is Proof.COMMITTED
    life.commit(0, [won])
    assert [one.handle for one in life.committer.in_doubt()] == [lost.handle]
    life.committer.abort(EpochNumber(0), [lost])
    assert orders.rows() == [(1, "n1")]
    assert orders.leftovers() == []


@BOTH
def test_a_writer_holds_little_however_many_rows_it_takes(orders, strategy):
    schema = pa.schema([("id", pa.int64()), ("name", pa.string())])
    life = orders.life(strategy=strategy, buffer_bytes=2_000_000)
    life.committer.check(schema)
    writer, before, peak, total = life.writer(schema, 0), pa.total_allocated_bytes(), 0, 0
    for number in range(60):
        ids = pa.array(range(number * 2000, (number + 1) * 2000), pa.int64())
        batch = pa.record_batch([ids, pa.array(["x" * 100] * 2000)], schema=schema)
        total += batch.nbytes
        writer.write(batch)
        peak = max(peak, pa.total_allocated_bytes() - before)
    receipt = writer.prepare()
    assert receipt.rows == 120_000
    assert receipt.token["efficiency"] > 0.8
    assert total > 12_000_000
    assert peak < 12_000_000


def grown_mb(life, folder: Path, limits: Limits) -> int:
    """By how much a task's memory grows at the most, in a process of its own."""
    rows, schema = 1_500_000, pa.schema([("id", pa.int64()), ("name", pa.string())])
    life.committer.check(schema)
    task = Task(
        handle=life.identity.handle(EpochNumber(0), partition=0, attempt=1),
        schema=schema,
        handout=life.committer.begin(Begin(epoch=EpochNumber(0))),
        limits=limits,
    )
    carried = folder / "carried"
    carried.write_bytes(pickle.dumps((life.sink, task)))
    done = subprocess.run(
        [sys.executable, str(VICTIM), str(carried), str(rows)], capture_output=True, check=True
    )
    written, grown = map(int, done.stdout.split())
    assert written == rows
    return grown


def test_a_task_takes_less_than_100_mb_whatever_the_size_of_its_epoch(orders, tmp_path):
    assert 0 < grown_mb(orders.life(), tmp_path, Limits()) < 100


def test_an_epoch_that_the_table_proves_already_is_refused_before_its_decision(orders, some):
    life = orders.life()
    life.write(3, some(1))
    for epoch in (3, 2):
        with pytest.raises(Refused, match="a copy of this epoch log is at work"):
            life.rehearse(epoch, [life.prepare(some(1), epoch)])
    assert len(orders.rows()) == 1


def test_staging_that_somebody_dropped_fails_the_rehearsal_and_is_lost_after_the_decision(
    orders, some
):
    life = orders.life()
    life.start(some(1))
    receipt = life.prepare(some(1), 0)
    orders.drop_staged(receipt.handle)
    with pytest.raises(TryAgain, match="no decision was made"):
        life.rehearse(0, [receipt])
    with pytest.raises(PreparedLost) as raised:
        life.commit(0, [receipt])
    assert raised.value.handles == (str(receipt.handle),)


def test_a_driver_that_sleeps_in_a_rehearsal_is_pushed_aside_by_the_next_one(orders, some):
    zombie = orders.life()
    zombie.start(some(1))
    receipt = zombie.prepare(some(1), 0)
    zombie.rehearse(0, [receipt])
    newer = orders.keep(zombie.fresh(generation=2))
    newer.write(0, some(1))
    newer.committer.abort(EpochNumber(0), [receipt])
    assert len(orders.rows()) == 1
    with pytest.raises(Refused, match="a copy of this epoch log is at work"):
        zombie.rehearse(0, [zombie.prepare(some(1), 0)])


def test_a_driver_that_is_frozen_while_it_records_an_epoch_without_rows_is_pushed_aside(
    orders, some
):
    frozen = orders.life(strategy="prepared")
    frozen.start(some(1))
    receipt = frozen.prepare(some(), 0)
    is_inside, is_thawed = threading.Event(), threading.Event()

    class FrozenLedger(Ledger):
        def claim_epoch(self, session, epoch, rows, *, after):
            claimed = Ledger.claim_epoch(self, session, epoch, rows, after=after)
            is_inside.set()
            assert is_thawed.wait(60)
            return claimed

    ledger = frozen.committer._ledger
    frozen.committer._ledger = FrozenLedger(
        schema=ledger.schema, identity=ledger.identity, dialect=ledger.dialect
    )
    with ThreadPoolExecutor(1) as thread:
        committing = thread.submit(frozen.commit, 0, [receipt])
        assert is_inside.wait(60)
        newer = orders.keep(frozen.fresh(generation=2))
        with pytest.raises(TryAgain):
            newer.commit(0, [receipt])
        newer.commit(0, [receipt])
        is_thawed.set()
        with pytest.raises(EpochalError):
            committing.result(60)
    assert newer.committer.outcome(EpochNumber(0), receipt) is Proof.COMMITTED


def test_a_sleeping_rehearsal_keeps_no_staging_table_from_being_dropped(orders, some):
    zombie = orders.life(lock_timeout_s=1)
    zombie.start(some(1))
    receipt = zombie.prepare(some(1), 0)
    zombie.rehearse(0, [receipt])
    orders.keep(zombie.fresh(generation=2)).committer.abort(EpochNumber(0), [receipt])
    assert orders.leftovers() == []
    assert orders.rows() == []


def test_a_ledger_of_a_newer_release_is_refused_with_its_number(orders, some):
    life = orders.life()
    life.write(0, some(1))
    columns = "uid, sink, epoch, part, generation, attempt, claim, owner, pipeline, sink_name"
    row = "'format', 'format', 7, -1, 0, 0, '-', '-', '-', '-', 0"
    orders.sql(f"INSERT INTO {orders.meta}.ledger ({columns}, row_count) VALUES ({row})")
    after = orders.keep(life.fresh(generation=2))
    with pytest.raises(CorruptRecord, match="format 7, this release reads up to 1"):
        after.committer.check(some(1).schema)
    assert orders.leftovers() == []
