"""An epoch like the one before is applied in one round trip, and never by what is true no more.

In each test a first epoch was applied step by step, so that the driver knows table and staging.
"""

from __future__ import annotations

import time

import pyarrow as pa
import pytest
from sinks.postgres.packed import PackedPostgres

from epochal.errors import EpochalError, Refused, RowRejected, TryAgain
from epochal.kit.sql.staged import EpochTransaction
from epochal.logs import MemoryLog
from epochal.session import Session
from epochal.sinks.memory import Memory


class Turns:
    """How often a client spoke after its server had."""

    def __init__(self, proxy) -> None:
        self.count = 0
        self._is_client = False
        proxy.cut_when = self._see

    def _see(self, piece: bytes, to_server: bool) -> None:
        self.count += to_server and not self._is_client
        self._is_client = to_server

    def of(self, work, *given):
        before = self.count
        found = work(*given)
        return self.count - before, found


@pytest.fixture
def steps(monkeypatch):
    """The epochs that were applied step by step."""
    seen = []
    apply = EpochTransaction._apply

    def noted(self, epoch, parts):
        seen.append(epoch)
        return apply(self, epoch, parts)

    monkeypatch.setattr(EpochTransaction, "_apply", noted)
    return seen


def test_a_task_takes_four_round_trips_a_rehearsal_and_a_commit_one_each(keyed, some, proxy):
    keyed.kind = PackedPostgres
    url, turns = keyed.server.url(port=proxy.port), Turns(proxy)
    for options in ({}, {"mode": "upsert", "keys": "id", "order_by": "name"}):
        keyed.sql(f"TRUNCATE {keyed.schema}.orders")
        life = keyed.life(url=url, name=str(options), **options)
        for epoch in range(2):
            life.write(epoch, some(epoch), some(epoch + 10))
        writers = [life.writer(some(1).schema, 2, part) for part in range(2)]
        receipts = []
        for number, writer in enumerate(writers):
            rows = some(20 + number).to_batches()[0]
            count, receipt = turns.of(lambda w=writer, r=rows: (w.write(r), w.prepare())[1])
            assert count == 4
            receipts.append(receipt)
        assert turns.of(life.rehearse, 2, receipts)[0] == 1
        assert turns.of(life.commit, 2, receipts)[0] == 1
        assert len(keyed.rows()) == 6


ALTERED = {
    "a narrower column": ("ALTER COLUMN name TYPE varchar(3)", "x" * 9),
    "another type": ("ALTER COLUMN name TYPE bytea USING ''", "x"),
    "one that pads": ("ALTER COLUMN name TYPE char(5)", "x"),
    "a column more": ("ADD COLUMN more int DEFAULT 7", "x"),
    "no key any more": ("DROP CONSTRAINT orders_pkey", "x"),
    "a check": ("ADD CHECK (name <> 'bad')", "bad"),
}


@pytest.mark.parametrize("mode", ["append", "upsert"])
@pytest.mark.parametrize("change", ALTERED)
def test_a_table_that_was_altered_takes_an_epoch_as_from_a_new_driver(place, change, mode):
    alter, name = ALTERED[change]
    found = []
    for is_new in (False, True):
        place.sql(f"DROP TABLE IF EXISTS {place.schema}.orders")
        place.sql(
            f"CREATE TABLE {place.schema}.orders (id bigint CONSTRAINT orders_pkey PRIMARY KEY,"
            " name text)"
        )
        options = {"mode": "upsert", "keys": "id"} if mode == "upsert" else {}
        life = place.life(name=str(is_new), **options)
        rows = pa.table({"id": pa.array([1], pa.int64()), "name": ["a"]})
        life.write(0, rows)
        receipt = life.prepare(pa.table({"id": pa.array([2], pa.int64()), "name": [name]}), 1)
        place.sql(f"ALTER TABLE {place.schema}.orders {alter}")
        driver = place.keep(life.fresh(generation=2)) if is_new else life
        try:
            driver.rehearse(1, [receipt])
            driver.commit(1, [receipt])
        except EpochalError as error:
            found.append((type(error), place.rows()))
        else:
            found.append((None, place.rows()))
    assert found[0] == found[1]


def test_a_key_that_may_be_null_by_now_is_asked_after(place):
    place.sql(f"CREATE TABLE {place.schema}.orders (id bigint NOT NULL UNIQUE, name text)")
    life = place.life(mode="upsert", keys="id")
    life.write(0, pa.table({"id": pa.array([1], pa.int64()), "name": ["a"]}))
    place.sql(f"ALTER TABLE {place.schema}.orders ALTER COLUMN id DROP NOT NULL")
    with pytest.raises(RowRejected, match="null matches no row"):
        life.write(1, pa.table({"id": pa.array([None], pa.int64()), "name": ["b"]}))
    assert place.rows() == [(1, "a")]


def test_a_refused_row_goes_to_its_sink_and_the_next_epoch_is_one_message_again(place, steps):
    place.sql(f"CREATE TABLE {place.schema}.orders (id bigint PRIMARY KEY, name text)")
    refused = Memory(name="refused")
    sink = place.sink(on_reject=refused, table="orders")
    schema = pa.schema([("id", pa.int64()), ("name", pa.string())])
    with Session("p", sinks=[sink], schema=schema, log=MemoryLog()) as session:
        for ids in ([1], [2, 1, 3], [4], [5]):
            session.begin(session.next_epoch)
            session.write([{"id": number, "name": "n"} for number in ids])
            session.commit()
    assert place.rows(columns="id") == [(1,), (2,), (3,), (4,), (5,)]
    assert refused.rows().num_rows == 1
    assert set(steps) == {0, 1}


def test_an_attempt_whose_slot_is_another_ones_by_now_is_not_applied(orders, some):
    life = orders.life()
    life.write(0, some(1))
    lost = life.prepare(some(2), 1)
    life.committer.abort(1, [lost])
    other = life.prepare(some(3), 1)
    assert lost.token["slot"] == other.token["slot"]
    with pytest.raises(TryAgain, match="no decision was made"):
        life.rehearse(1, [lost])
    life.rehearse(1, [other])
    life.commit(1, [other])
    assert orders.rows(columns="id") == [(1,), (3,)]
    assert orders.leftovers() == []


def test_rows_that_somebody_deleted_from_a_slot_are_missed(orders, some):
    life = orders.life()
    life.write(0, some(1))
    receipt = life.prepare(some(2, 3, 4), 1)
    orders.sql(f"DELETE FROM {orders.slot(receipt.handle)} WHERE id = 3")
    with pytest.raises(TryAgain, match="no decision was made"):
        life.rehearse(1, [receipt])


def test_an_epoch_that_another_log_committed_is_refused(orders, some):
    life = orders.life()
    life.write(0, some(1))
    orders.keep(life.fresh(generation=2)).write(1, some(2))
    with pytest.raises(Refused, match="a copy of this epoch log is at work"):
        life.rehearse(1, [life.prepare(some(3), 1)])
    assert orders.rows(columns="id") == [(1,), (2,)]


def test_a_rehearsal_in_one_message_is_ended_by_the_server_once_its_driver_is_silent(
    orders, some, monkeypatch
):
    monkeypatch.setattr(EpochTransaction, "_held_max_s", 0.3)
    life = orders.life()
    life.write(0, some(1))
    life.rehearse(1, [life.prepare(some(2), 1)])
    assert len(orders.open_transactions()) == 1
    deadline_s = time.monotonic() + 30
    while orders.open_transactions():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
