"""The SQL that is sent is read by H2 in Oracle mode, and does what every database's does."""

from __future__ import annotations

import time

import pyarrow as pa
import pytest
from kit.sql import change_modes
from kit.sql.keyed_modes import *  # noqa: F403  every test there is one of this module, too
from sinks.life import Life

from epochal.errors import Misconfigured, RowRejected
from epochal.sinks.memory import Memory
from epochal.sinks.oracle.types import Column, Table, plan, sent_fields
from epochal.terms import EpochNumber, Proof

OFFERED = [
    name
    for name, options in change_modes.MODES.items()
    if "tombstones" not in options and "skip_unchanged" not in options
]
BOTH = pytest.mark.parametrize("strategy", ["staged", "prepared"])


@BOTH
def test_rows_are_invisible_until_they_are_committed_and_then_there_once(orders, some, strategy):
    life = orders.life(strategy=strategy)
    life.start(some(1))
    receipts = [life.prepare(some(1, 2), 0, 0), life.prepare(some(3), 0, 1)]
    life.rehearse(0, receipts)
    assert orders.rows() == []
    assert {one.handle for one in life.fresh().committer.in_doubt()} == {r.handle for r in receipts}
    for _ in range(2):
        life.commit(0, receipts)
    assert orders.rows(columns="id") == [(1,), (2,), (3,)]
    assert orders.leftovers() == []
    assert {life.committer.outcome(EpochNumber(0), one) for one in receipts} == {Proof.COMMITTED}
    assert [mark.epoch for mark in life.committer.newest()] == [0]


@pytest.mark.parametrize("name", OFFERED)
def test_a_change_stream_leaves_what_row_by_row_sql_leaves(place, name):
    change_modes.judge_stream(place, name)


def test_complete_replaces_all_rows_also_by_none(orders, some):
    life = orders.life(mode="complete")
    for epoch, ids in enumerate([(1, 2), (3,), ()]):
        life.write(epoch, some(*ids))
        assert orders.rows(columns="id") == [(one,) for one in ids]


def test_a_row_that_the_table_refuses_is_named(place, some):
    place.sql("CREATE TABLE ETL.orders (id NUMBER(19) CHECK (id <> 21), name VARCHAR2(9))")
    life = place.life()
    with pytest.raises(RowRejected, match=r'partition 1, row \{"ID": 21, "NAME": "n21"\}'):
        life.write(0, some(1, 2), some(*range(10, 40)))
    assert place.rows() == []


def test_a_value_that_does_not_fit_is_named_by_its_row(place, some):
    place.sql("CREATE TABLE ETL.orders (id NUMBER(19), name VARCHAR2(3))")
    with pytest.raises(RowRejected, match=r'row 2 \{"id": 3333, "name": "n3333"\}: ORA-12899'):
        place.life().write(0, some(1, 2, 3333))
    assert place.rows() == []


def test_a_table_is_made_and_grows_where_that_is_asked(place, some):
    life = place.life(mode="upsert", keys="name", create_table="if_missing", evolve="add_columns")
    life.write(0, some(1, 2))
    wider = some(2, 3).append_column("paid", pa.array([True, None]))
    life.start(wider)
    life.commit(1, [life.prepare(wider, 1)])
    assert place.rows(columns="id, name, paid") == [(1, "n1", None), (2, "n2", 1), (3, "n3", None)]


def test_what_is_wrong_is_reported_before_the_first_row(place):
    place.sql("CREATE TABLE ETL.orders (id NUMBER(19), due DATE, must NUMBER NOT NULL)")
    schema = pa.schema([("id", pa.float64()), ("due", pa.int64()), ("more", pa.string())])
    with pytest.raises(Misconfigured) as raised:
        place.life().committer.check(schema)
    for fact in ("whole number", "can't become DATE", 'no column "MORE"', '"MUST" is NOT NULL'):
        assert fact in raised.value.message
    with pytest.raises(Misconfigured, match="there is no table nowhere"):
        place.life("nowhere").committer.check(schema)


def test_an_empty_string_for_a_column_that_must_be_filled_is_refused(place):
    place.sql("CREATE TABLE ETL.orders (id NUMBER(19), name VARCHAR2(9) NOT NULL)")
    with pytest.raises(RowRejected, match=r'row 1: field "name" is : .*takes it for null'):
        place.life().write(0, pa.table({"id": [1, 2], "name": ["a", ""]}))


def test_a_field_of_order_by_is_staged_as_it_arrives_where_its_column_would_round_it(place):
    version = Column(name="VERSION", data_type="BINARY_FLOAT", ddl="BINARY_FLOAT")
    key = Column(name="ID", data_type="NUMBER", ddl="NUMBER(19)", scale=0)
    table = Table(schema="ETL", name="ORDERS", columns={"ID": key, "VERSION": version})
    sink = place.sink(mode="upsert", keys="id", order_by="version")
    arriving = sent_fields(pa.schema([("id", pa.int64()), ("version", pa.int64())]), sink)
    planned = plan(arriving, table, sink)
    assert [(one.field, one.arrives_as, one.staging_ddl, one.rounding) for one in planned[1:]] == [
        ("VERSION", "version", "BINARY_FLOAT", "BINARY_FLOAT keeps fewer digits"),
        ("epochal_order_0", "version", "NUMBER(20)", ""),
    ]


def test_a_moment_after_the_year_9999_is_refused_with_its_row(place):
    place.sql("CREATE TABLE ETL.orders (id NUMBER(19), due TIMESTAMP(6), sent DATE)")
    for field, kind in (("due", pa.timestamp("us")), ("sent", pa.date32())):
        bad = {pa.date32(): 2**23}.get(kind, 2**58)
        rows = pa.table({"id": [1, 2], field: pa.array([0, bad], kind)})
        with pytest.raises(RowRejected, match=rf'row 1: field "{field}" is \d{{5,}}-.*1 to 9999'):
            place.life(name=field).write(0, rows)


def test_refused_rows_are_set_apart_whether_a_column_or_a_constraint_refuses_them(place, some):
    place.sql("CREATE TABLE ETL.orders (id NUMBER(19) CHECK (id <> 21), name VARCHAR2(3))")
    life = place.life(on_reject=Memory(name="bad orders"))
    life.start(some(1))
    receipts = [life.prepare(some(1, 2222, 21, 4), 0, 0), life.prepare(some(5), 0, 1)]
    assert [receipt.token["unfit"] for receipt in receipts] == [1, 0]
    life.rehearse(0, receipts)
    rejected = life.committer.rejected(EpochNumber(0)).to_pylist()
    assert [row["row"] for row in rejected] == [
        '{"id": 2222, "name": "n2222"}',
        '{"ID": 21, "NAME": "n21"}',
    ]
    life.close()
    life.fresh(generation=2).commit(0, receipts)
    assert place.rows(columns="id") == [(1,), (4,), (5,)]
    assert place.leftovers() == []


def test_sinks_of_one_user_share_a_transaction(place, some):
    place.sql("CREATE TABLE ETL.parents (id NUMBER(19) PRIMARY KEY)")
    place.sql("CREATE TABLE ETL.orders (id NUMBER(19) REFERENCES ETL.parents, name VARCHAR2(9))")
    sinks = [place.sink("parents", columns=["id"]), place.sink("orders")]
    assert len({sink.transaction_key for sink in sinks}) == 1
    lives = [place.keep(Life(sink=sink)) for sink in sinks]
    for life in lives:
        life.start(some(1))
    receipts = {life.sink.name: [life.prepare(some(1, 2), 0)] for life in lives}
    shared = lives[0].committer.share([life.committer for life in lives])
    shared.rehearse(EpochNumber(0), receipts)
    assert (place.rows("parents"), place.rows()) == ([], [])
    shared.commit(EpochNumber(0), receipts)
    assert (len(place.rows("parents")), len(place.rows())) == (2, 2)
    assert place.leftovers() == []


def test_the_servers_clock_is_read(orders):
    assert abs(orders.life().committer.server_time() - time.time()) < 10
