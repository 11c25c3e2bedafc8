"""Slots: staging tables of small epochs that are used again, and what a DBA sees of them."""

from __future__ import annotations

import os
import random
import subprocess
import threading
import time
from contextlib import closing, suppress

import pytest
from kit.sql.fence import Storm, Wrong, pauses

from epochal.errors import EpochalError, PreparedLost, TryAgain
from epochal.kit.sql.names import staging_name
from epochal.kit.sql.writer import TableWriter
from epochal.sinks.mysql import slots
from epochal.sinks.mysql.client import MySQLConnection
from epochal.sinks.mysql.pool import MySQLSession
from epochal.sinks.mysql.slots import Pool, Slots
from epochal.terms import Proof

pytestmark = pytest.mark.products("mariadb", "mysql")
UPSERT = {"mode": "upsert", "keys": "id"}


remove_idle = Slots.remove_idle


def tables(place) -> list[str]:
    """All slots there are, used or not, and tables of an attempt's own."""
    return [
        name
        for (name,) in place.sql(
            "SELECT table_name FROM information_schema.tables"
            f" WHERE table_schema = '{place.staging}' AND table_name <> 'slots' ORDER BY 1"
        )
    ]


# Used again


def test_small_epochs_use_the_same_tables_again(orders, some):
    life = orders.life()
    life.write(0, some(1), some(2))
    made = tables(orders)
    for epoch in range(1, 6):
        life.write(epoch, some(epoch), some(epoch))
    orders.keep(life.fresh(uid="zyxwvuts2342", run="another run")).write(0, some(9))
    assert tables(orders) == made
    assert len(made) == 2
    assert len(orders.rows()) == 13
    assert orders.leftovers() == []


def test_a_large_attempt_has_a_table_of_its_own_beside_slots_and_both_are_in_doubt(
    orders, some, monkeypatch
):
    monkeypatch.setattr("epochal.sinks.mysql.writer.ROWS_MAX", 3)
    life = orders.life()
    life.start(some(1))
    receipts = [life.prepare(some(1, 2), 0, 0), life.prepare(some(3, 4, 5, 6), 0, 1)]
    own = staging_name(receipts[1].handle)
    assert [name for name in tables(orders) if not name.startswith("slot_")] == [own]
    assert {one.handle for one in life.committer.in_doubt()} == {one.handle for one in receipts}
    late = [life.prepare(some(7), 1, 0), life.prepare(some(6, 7, 8, 9), 1, 1)]
    life.rehearse(0, receipts)
    life.commit(0, receipts)
    assert orders.rows(columns="id") == [(number,) for number in range(1, 7)]
    assert {one.handle for one in life.committer.in_doubt()} == {one.handle for one in late}
    life.committer.abort(1, late)
    assert orders.leftovers() == []
    assert life.committer.in_doubt() == []


def test_a_task_whose_rows_come_in_several_blocks_has_a_table_of_its_own(orders, some):
    life = orders.life(buffer_bytes=64)
    life.start(some(1))
    receipt = life.prepare(some(*range(3000)), 0)
    assert tables(orders) == [staging_name(receipt.handle)]


def test_a_slot_whose_table_somebody_dropped_is_forgotten(orders, some):
    life = orders.life()
    life.write(0, some(1))
    (slot,) = tables(orders)
    orders.sql(f"DROP TABLE {orders.staging}.{slot}")
    life.write(1, some(2))
    assert len(tables(orders)) == 1
    assert orders.sql(f"SELECT COUNT(*) FROM {orders.staging}.slots") == [(1,)]
    lost, kept = life.prepare(some(3), 2, 0), life.prepare(some(4), 2, 1)
    orders.sql(f"DROP TABLE {orders.staging}.{orders.slot(lost.handle)}")
    orders.keep(life.fresh(generation=2)).write(3, some(5))
    used = f"SELECT handle FROM {orders.staging}.slots WHERE handle IS NOT NULL"
    assert orders.sql(used) == [(str(kept.handle),)]
    assert orders.rows(columns="id") == [(1,), (2,), (5,)]


@pytest.mark.parametrize("rows_max", [9, 1], ids=["slot", "own table"])
@pytest.mark.parametrize("options", [{}, UPSERT], ids=["append", "upsert"])
def test_staging_whose_rows_somebody_deleted_is_not_applied(
    keyed, some, monkeypatch, options, rows_max
):
    """One row that is changed counts as two to the server, as many as were staged."""
    monkeypatch.setattr("epochal.sinks.mysql.writer.ROWS_MAX", rows_max)
    life = keyed.life(**options)
    life.write(0, some(1, 2))
    ids = (1, 2) if options else (3, 4)
    receipt = life.prepare(some(*ids, name="new"), 1)
    keyed.sql(f"DELETE FROM {keyed.staging}.{keyed.slot(receipt.handle)} WHERE id = {ids[0]}")
    with pytest.raises(TryAgain, match="no decision was made"):
        life.rehearse(1, [receipt])
    with pytest.raises(PreparedLost, match="1 of 1 attempts") as lost:
        life.commit(1, [receipt])
    assert "somebody changed their rows" in lost.value.hint
    assert keyed.rows(columns="id, name") == [(1, "n1"), (2, "n2")]


def test_free_slots_go_after_days_and_with_the_last_pipeline(orders, some):
    life = orders.life()
    life.write(0, some(1), some(2))
    life.start(some(1))
    kept = life.prepare(some(3), 1)
    orders.sql(f"UPDATE {orders.staging}.slots SET since = NOW() - INTERVAL 8 DAY")
    orders.keep(life.fresh(generation=2)).write(2, some(4))
    assert orders.slot(kept.handle) in tables(orders)
    life.committer.abort(1, [kept])
    dropped = life.committer.drop(is_dry_run=False)
    assert f"2 unused tables of {orders.staging}" in dropped.removed
    assert tables(orders) == []
    assert orders.sql(f"SELECT COUNT(*) FROM {orders.staging}.slots") == [(0,)]


# The fence


@pytest.fixture
def storm(orders, monkeypatch):
    orders.sql(f"ALTER TABLE {orders.schema}.orders ADD CHECK (id >= 0)")
    chance = random.Random(7)
    pauses(
        monkeypatch,
        chance,
        (MySQLSession, ["execute", "query"]),
        (TableWriter, ["_run", "_ask"]),
        (MySQLConnection, ["load"]),
    )
    # Some attempts are large, and another pipeline's starts remove what is free.
    monkeypatch.setattr(slots, "_IDLE_DAYS", 0)
    monkeypatch.setattr(Slots, "remove_idle", lambda *_: None)
    starts, over = orders.keep(orders.life().fresh(uid="zyxwvuts2342")), threading.Event()

    def remove() -> None:
        while not over.wait(chance.random()):
            with suppress(EpochalError):
                starts.committer._ask("remove", lambda one: remove_idle(Slots(starts.sink), one))

    thread = threading.Thread(target=remove)
    monkeypatch.setattr("epochal.sinks.mysql.writer.ROWS_MAX", 4)
    other = orders.other_connection()
    with closing(other.admin):
        thread.start()
        yield Storm(orders, chance, other)
        over.set()
        thread.join()


def test_attempts_drivers_and_removals_in_any_order_leave_each_row_once(storm, some, monkeypatch):
    storm.run(6)
    # Tables of tasks that were killed before they had a row in the registry.
    monkeypatch.setattr(slots, "_ORPHAN_DAYS", 0)
    monkeypatch.setattr(Slots, "remove_idle", remove_idle)
    time.sleep(1.1)
    place = storm.place
    place.keep(storm.life.fresh(generation=999)).write(999, some(1))
    listed = place.sql(f"SELECT slot FROM {place.staging}.slots ORDER BY 1")
    assert tables(place) == [slot for (slot,) in listed]


@pytest.mark.proof
def test_many_epochs_in_any_order_leave_each_row_once(storm):
    storm.run(6 * int(os.environ.get("EPOCHAL_KILLS", "13")))


@pytest.mark.proof
def test_the_judge_objects_to_claims_that_lock_nothing(storm, monkeypatch):
    claim = Pool.claim
    monkeypatch.setattr(
        Pool, "claim", lambda self: claim(self).replace("FOR UPDATE SKIP LOCKED", "")
    )
    with pytest.raises(Wrong):
        storm.run(500)


@pytest.mark.proof
def test_the_judge_objects_to_removals_that_do_not_look_at_the_handle(storm, monkeypatch):
    def remove(self, session, condition, *, is_dry_run):
        rows = session.query(f"SELECT slot FROM {self._registry} WHERE handle IS NULL")
        for (slot,) in rows:
            session.execute(f"DELETE FROM {self._registry} WHERE slot = '{slot}'")
            session.execute(f"DROP TABLE IF EXISTS {self.schema}.{slot}")
        return len(rows)

    monkeypatch.setattr(Slots, "_remove", remove)
    with pytest.raises(Wrong):
        storm.run(500)


# What a DBA sees


def dump(place) -> None:
    """Of everything: the user's database, the ledger and staging. MariaDB's client dumps MySQL."""
    done = subprocess.run(
        [
            *("mariadb-dump", "--no-defaults", "--host=127.0.0.1", f"--port={place.server.port}"),
            *("--user=root", "--single-transaction", "--skip-lock-tables", "--databases"),
            *(place.schema, place.meta, place.staging),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def dumps_beside(place, some, dumps: int) -> None:
    life = place.life()
    life.write(0, some(1), some(2))
    with life.writing_beside(1, some(1), some(*range(200))):
        for _ in range(dumps):
            dump(place)


def test_a_dump_beside_a_pipeline_ends_well(orders, some):
    dumps_beside(orders, some, 3)


@pytest.mark.proof
def test_no_dump_of_many_beside_a_pipeline_dies(orders, some):
    dumps_beside(orders, some, 25)


def test_a_reader_of_a_large_attempt_s_table_stops_no_epoch(orders, some, monkeypatch):
    """It can't be dropped now: what the transaction of a dump has read, it keeps until its end."""
    monkeypatch.setattr("epochal.sinks.mysql.writer.ROWS_MAX", 1)
    life = orders.life()
    life.start(some(1))
    receipt = life.prepare(some(1, 2), 0)
    reader = orders.other_connection()
    with closing(reader.admin):
        reader.sql("START TRANSACTION WITH CONSISTENT SNAPSHOT")
        reader.sql(f"SELECT * FROM {orders.staging}.{orders.slot(receipt.handle)}")
        life.rehearse(0, [receipt])
        life.commit(0, [receipt])
        assert [one.handle for one in life.committer.in_doubt()] == [receipt.handle]
    assert life.committer.outcome(0, receipt) is Proof.COMMITTED
    life.committer.abort(0, [receipt])
    assert orders.leftovers() == []
    assert orders.rows(columns="id") == [(1,), (2,)]


def test_a_reader_of_staging_stops_neither_epochs_nor_a_start(orders, some):
    """As a dump does that reads one table for long."""
    life = orders.life(lock_timeout_s=60)
    life.write(0, some(1))
    (slot,) = tables(orders)
    reader = orders.other_connection()
    with closing(reader.admin):
        reader.sql("START TRANSACTION WITH CONSISTENT SNAPSHOT")
        reader.sql(f"SELECT * FROM {orders.staging}.{slot}")
        life.write(1, some(2))
        orders.keep(life.fresh(generation=2)).write(2, some(3))
    assert tables(orders) == [slot]
