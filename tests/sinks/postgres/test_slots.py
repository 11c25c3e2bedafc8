"""Slots: tables of staging that are used again, and what a DBA sees of them."""

from __future__ import annotations

import os
import random
import subprocess
import time
from contextlib import closing

import psycopg
import psycopg_pool.base
import pyarrow as pa
import pytest
from kit.sql.fence import Storm, Wrong, pauses

from epochal.contract import Room
from epochal.errors import PreparedLost, TryAgain
from epochal.session import Session
from epochal.sinks.postgres import client, slots
from epochal.sinks.postgres.slots import Pool

LOCK_WAIT_MAX_MS = 200
"""How long a dump may wait for a lock of ours: milliseconds, on a machine that is busy."""


def tables(place) -> list[str]:
    """All slots there are, used or not."""
    return [
        name
        for (name,) in place.sql(
            "SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
            f" WHERE n.nspname = '{place.meta}_staging' AND c.relkind = 'r'"
            " AND c.relname <> 'slots' ORDER BY 1"
        )
    ]


def catalog_bytes(place) -> int:
    ((size,),) = place.sql(
        "SELECT sum(pg_total_relation_size(oid)) FROM pg_class"
        " WHERE relnamespace = 'pg_catalog'::regnamespace AND relkind = 'r'"
    )
    return int(size)


# Used again


def test_epochs_use_the_same_tables_again_and_the_catalog_does_not_grow(orders, some):
    life = orders.life()
    life.write(0, some(1), some(2))
    made = tables(orders)
    before = catalog_bytes(orders)
    # The tests' server vacuums once an hour.
    for epoch in range(1, 31):
        life.write(epoch, some(epoch), some(epoch))
    assert catalog_bytes(orders) - before < 64 * 1024
    assert tables(orders) == made
    assert len(made) == 2
    assert len(orders.rows()) == 62
    assert orders.leftovers() == []


@pytest.mark.proof
def test_two_thousand_epochs_with_vacuum_held_back_leave_the_catalog_as_it_was(orders, some):
    life = orders.life()
    life.write(0, some(0), some(0))
    before, made = catalog_bytes(orders), tables(orders)
    with psycopg.connect(orders.url()) as holding:
        # Nothing that is deleted from now on can be vacuumed.
        holding.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        holding.execute("SELECT count(*) FROM pg_class")
        for epoch in range(1, 2001):
            life.write(epoch, some(epoch), some(epoch))
        assert catalog_bytes(orders) - before < 128 * 1024
    assert tables(orders) == made
    assert len(orders.rows()) == 4002


def test_pipelines_and_runs_on_one_table_share_its_slots(orders, some):
    life = orders.life()
    life.write(0, some(1))
    for number in range(3):
        orders.keep(life.fresh(uid=f"zyxwvuts234{number + 2}", run=f"run {number}")).write(
            0, some(2)
        )
    assert len(tables(orders)) == 1


@pytest.mark.parametrize("place", ["columns", "bytes"], indirect=True)
def test_rows_of_one_key_are_taken_in_the_order_of_arrival_from_a_table_that_is_used_again(keyed):
    life = keyed.life(mode="upsert", keys="id", order_by="rank", columns=["id", "name"])

    def epoch_of(number: int, count: int) -> pa.Table:
        names = [f"{number}-{at:05}" for at in range(count)]
        ids = pa.array([at % 3 for at in range(count)], pa.int64())
        return pa.table({"id": ids, "name": names, "rank": pa.array([0] * count, pa.int32())})

    for number, count in enumerate([3000, 300, 2000, 30, 900, 3]):
        life.write(number, epoch_of(number, count))
        assert sorted(name for _, name, _ in keyed.rows()) == [
            f"{number}-{at:05}" for at in range(count - 3, count)
        ]


def test_a_slot_whose_rows_were_changed_by_somebody_is_not_applied(orders, some):
    life = orders.life()
    life.start(some(1))
    receipt = life.prepare(some(1, 2, 3), 0)
    orders.sql(f"DELETE FROM {orders.slot(receipt.handle)} WHERE id = 2")
    with pytest.raises(TryAgain, match="no decision was made"):
        life.rehearse(0, [receipt])
    with pytest.raises(PreparedLost, match="1 of 1 attempts") as lost:
        life.commit(0, [receipt])
    assert "somebody changed their rows" in lost.value.hint
    assert orders.rows() == []


def test_a_table_that_writes_fewer_rows_than_it_is_given_takes_an_epoch(orders, some):
    orders.sql(
        f"CREATE FUNCTION {orders.schema}.f() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN IF NEW.id = 2 THEN RETURN NULL; END IF; RETURN NEW; END $$"
    )
    orders.sql(
        f"CREATE TRIGGER t BEFORE INSERT ON {orders.schema}.orders"
        f" FOR EACH ROW EXECUTE FUNCTION {orders.schema}.f()"
    )
    orders.life().write(0, some(1, 2), some(3))
    assert orders.rows(columns="id") == [(1,), (3,)]


# The fence


@pytest.fixture
def storm(orders, monkeypatch):
    orders.sql(f"ALTER TABLE {orders.schema}.orders ADD CHECK (id >= 0)")
    chance = random.Random(7)
    pauses(
        monkeypatch,
        chance,
        (client.PostgresSession, ["run_all"]),
        (client.BytesConnection, ["ask", "execute", "copy"]),
        (client.ArrowConnection, ["ask", "execute", "ingest"]),
    )
    monkeypatch.setattr(slots, "CLEAR_BYTES", 0)
    monkeypatch.setattr(slots, "_ASK_AGAIN_S", 0.0)
    # Between the moment a free slot is seen and the moment its table is locked.
    each_free = Pool.each_free

    def slow_each_free(self, *given):
        seen = each_free(self, *given)
        return seen.replace("LOOP BEGIN", "LOOP BEGIN PERFORM pg_sleep(random() * 0.03);")

    monkeypatch.setattr(Pool, "each_free", slow_each_free)
    # A pool waits a second before it opens a connection again.
    monkeypatch.setattr(psycopg_pool.base.AttemptWithBackoff, "INITIAL_DELAY", 0.02)
    other = orders.other_connection()
    with closing(other.admin):
        yield Storm(orders, chance, other)


def test_attempts_drivers_and_clearings_in_any_order_leave_each_row_once(storm):
    storm.run(6)


@pytest.mark.proof
def test_many_epochs_in_any_order_leave_each_row_once(storm):
    storm.run(6 * int(os.environ.get("EPOCHAL_KILLS", "13")))


@pytest.mark.proof
@pytest.mark.parametrize("control", ["claim", "each_free"])
def test_the_judge_objects_where_the_registry_is_not_locked(storm, monkeypatch, control):
    locked = getattr(Pool, control)

    def unlocked(self, *given):
        return locked(self, *given).replace("FOR UPDATE SKIP LOCKED", "")

    monkeypatch.setattr(Pool, control, unlocked)
    with pytest.raises(Wrong):
        storm.run(500)


# What a DBA sees


def dump(place) -> None:
    """Dump the database; a lock that is waited for longer than the limit ends it."""
    done = subprocess.run(
        [
            place.server.psql.with_name("pg_dump"),
            f"--lock-wait-timeout={LOCK_WAIT_MAX_MS}",
            "--file=/dev/null",
            place.url(),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def dumps_beside(place, some, dumps: int) -> None:
    life = place.life()
    life.start(some(1))
    with life.writing_beside(0, some(1), some(*range(5000))):
        for _ in range(dumps):
            dump(place)


def test_a_dump_beside_a_pipeline_ends_well(orders, some):
    dumps_beside(orders, some, 3)


@pytest.mark.proof
def test_no_dump_of_many_beside_a_pipeline_dies_or_waits(orders, some):
    dumps_beside(orders, some, 25)


def test_a_dump_that_waits_for_a_lock_is_found(orders):
    with psycopg.connect(orders.url()) as holding:
        holding.execute(f"LOCK TABLE {orders.schema}.orders IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(AssertionError, match="LOCK TABLE"):
            dump(orders)


def test_a_dump_that_reads_staging_stops_neither_epochs_nor_a_start(orders, some, monkeypatch):
    monkeypatch.setattr(slots, "CLEAR_BYTES", 0)
    life = orders.life(lock_timeout_s=60)
    life.write(0, some(1), some(2))
    listed = ", ".join(f"{orders.meta}_staging.{name}" for name in [*tables(orders), "slots"])
    with psycopg.connect(orders.url()) as dumping:
        dumping.execute(f"LOCK TABLE {listed} IN ACCESS SHARE MODE")
        started = time.monotonic()
        life.write(1, some(3), some(4))
        late = life.prepare(some(5), 2)
        newer = orders.keep(life.fresh(generation=2))
        newer.start(some(1))
        newer.committer.abort(2, [late])
        newer.write(2, some(6), some(7))
        assert time.monotonic() - started < 60, "somebody waited for the lock"
    assert orders.rows(columns="id") == [(1,), (2,), (3,), (4,), (6,), (7,)]
    assert len(tables(orders)) == 2


def test_a_slot_that_has_grown_is_cleared_once_nobody_reads_it(orders, monkeypatch):
    monkeypatch.setattr(slots, "_ASK_AGAIN_S", 0.0)
    life = orders.life()
    rows = pa.table({"id": pa.array(range(20_000), pa.int64()), "name": ["x" * 20] * 20_000})
    life.write(0, rows)
    (name,) = tables(orders)
    size = f"SELECT pg_relation_size('{orders.meta}_staging.{name}')"
    assert orders.sql(size) == [(0,)]
    with psycopg.connect(orders.url()) as reader:
        reader.execute(f"LOCK TABLE {orders.meta}_staging.{name} IN ACCESS SHARE MODE")
        life.write(1, rows)
        ((left,),) = orders.sql(size)
        assert left > slots.CLEAR_BYTES
    life.write(2, rows.slice(0, 1))
    assert orders.sql(size) == [(0,)]
    assert len(orders.rows()) == 40_001


def test_a_publication_for_all_tables_keeps_no_epoch_away_and_is_named_by_the_check(orders, some):
    life = orders.life()
    orders.sql("CREATE PUBLICATION everything FOR ALL TABLES")
    try:
        found = {one.name: one for one in life.committer.check(some(1).schema)}
        for epoch in range(3):
            life.write(epoch, some(epoch))
    finally:
        orders.sql("DROP PUBLICATION everything")
    assert len(orders.rows()) == 3
    published = found["unpublished staging"]
    assert not published.granted
    assert "everything" in published.because
    assert "FOR TABLES IN SCHEMA" in published.because
    found = {one.name: one for one in life.committer.check(some(1).schema)}
    assert found["unpublished staging"].granted


def test_staging_that_is_full_is_reported_with_what_fills_it(orders, some):
    life = orders.life(staging_bytes_max=1)
    life.start(some(1))
    life.prepare(some(1), 0)
    with psycopg.connect(orders.url(), application_name="a dump") as reader:
        reader.execute(f"SELECT count(*) FROM {orders.meta}_staging.{tables(orders)[0]}")
        with pytest.raises(TryAgain, match=r"1 hold attempts.*in use by a dump \(pid \d+\)"):
            life.prepare(some(2), 0)


def test_a_sweep_measures_staging_for_the_metrics(orders, some, tmp_path):
    sink = orders.sink(staging_bytes_max=1 << 30)
    with Session("o", sinks=[sink], log=tmp_path, schema=some(1).schema) as session:
        tracker = session._coordinator.tracker
        assert tracker.rooms()[sink.name] == Room(used_bytes=0, limit_bytes=1 << 30)
        session.begin(session.next_epoch)
        session.write(some(1))
        session.commit()
        session._coordinator._cleanup.sweep()
        (table,) = tables(orders)
        ((size,),) = orders.sql(f"SELECT pg_total_relation_size('{orders.meta}_staging.{table}')")
        assert tracker.rooms()[sink.name].used_bytes == size > 0


def test_free_slots_of_other_columns_go_after_a_day_and_all_with_the_pipeline(orders, some):
    life = orders.life()
    life.write(0, some(1), some(2))
    registry = f"{orders.meta}_staging.slots"
    orders.keep(life.fresh(generation=2)).write(1, some(3))
    assert len(tables(orders)) == 2
    orders.sql(
        f"UPDATE {registry} SET since = since - interval '2 days', shape = 'other' WHERE slot = 1"
    )
    in_doubt = orders.keep(life.fresh(generation=3)).prepare(some(4), 2)
    orders.keep(life.fresh(generation=4)).write(2, some(4))
    assert len(tables(orders)) == 2
    assert orders.slot(in_doubt.handle)
    life.committer.abort(2, [in_doubt])
    dropped = life.committer.drop(is_dry_run=False)
    assert "2 unused tables" in " ".join(dropped.removed)
    assert tables(orders) == []
    assert orders.sql(f"SELECT count(*) FROM {registry}") == [(0,)]


def test_a_free_slot_that_somebody_dropped_is_not_missed(orders, some):
    life = orders.life()
    life.write(0, some(1))
    orders.sql(f"DROP TABLE {orders.meta}_staging.{tables(orders)[0]}")
    life.write(1, some(2))
    orders.keep(life.fresh(generation=2)).write(2, some(3))
    assert len(orders.rows()) == 3
    assert orders.sql(f"SELECT count(*) FROM {orders.meta}_staging.slots") == [(1,)]
