"""Rows that the table refuses are found and named, by halves, and may be set apart."""

from __future__ import annotations

import datetime as dt
import json
from decimal import Decimal

import pyarrow as pa
import pytest

from epochal.errors import RowRejected
from epochal.kit.sql.names import staging_name
from epochal.kit.sql.rejects import REJECTED
from epochal.kit.sql.staged_table import RefusedRowSearch
from epochal.sinks.memory import Memory


def with_bad(count: int, *bad: int) -> pa.Table:
    names = ["0" * 32 if n not in bad else f"bad{n}" for n in range(count)]
    return pa.table({"id": pa.array(range(count), pa.int64()), "name": names})


@pytest.fixture
def uuids(place):
    place.sql(f"CREATE TABLE {place.schema}.orders (id bigint CHECK (id <> 13), name uuid)")
    return place


def test_the_row_and_the_reason_are_named(uuids):
    life = uuids.life()
    with pytest.raises(
        RowRejected, match=r'partition 1, row \{"id":4321,"name":"bad4321"\}: invalid'
    ):
        life.write(0, with_bad(10), with_bad(5000, 4321).slice(14))
    assert uuids.rows() == []
    with pytest.raises(RowRejected, match=r'"id":13.*violates check constraint'):
        life.write(0, with_bad(20))


def test_a_bad_row_costs_few_subtransactions(uuids):
    life = uuids.life()
    rows = pa.concat_tables([with_bad(13), with_bad(20_000).slice(14)])
    life.start(rows)
    receipt = life.prepare(
        rows.set_column(1, "name", [["x" if n == 7777 else "0" * 32 for n in range(19_999)]]), 0
    )
    session = life.committer.pool.take()
    session.begin()
    apply = life.committer.read_apply(session, {staging_name(receipt.handle): 0})
    search = RefusedRowSearch(session, apply, limit=10)
    found = search.run()
    session.roll_back()
    life.committer.pool.give_back(session)
    assert [one.row for one in found] == ['{"id":7778,"name":"x"}']
    assert search.attempts < 40


def test_bad_rows_are_set_apart_and_handed_over_with_their_reasons(uuids):
    life = uuids.life(on_reject=Memory(name="bad orders"))
    life.start(with_bad(1))
    receipts = [life.prepare(with_bad(40, 7, 30), 0, 0), life.prepare(with_bad(5), 0, 1)]
    life.rehearse(0, receipts)
    rows = life.committer.rejected(0)
    assert rows.schema == REJECTED == life.committer.rejected_schema
    rejected = rows.to_pylist()
    assert [row["row"] for row in rejected] == [
        '{"id":7,"name":"bad7"}',
        '{"id":13,"name":"00000000000000000000000000000000"}',
        '{"id":30,"name":"bad30"}',
    ]
    assert [row["sqlstate"] for row in rejected] == ["22P02", "23514", "22P02"]
    assert rejected[0]["epoch"] == 0
    assert rejected[0]["sink"] == life.sink.name
    assert uuids.rows() == []
    # Another process applies exactly the same rows.
    life.close()
    uuids.keep(life.fresh(generation=2)).commit(0, receipts)
    assert len(uuids.rows()) == 45 - 3
    assert uuids.leftovers() == []


def test_too_many_rejected_rows_fail_the_epoch(uuids):
    life = uuids.life(on_reject=Memory(name="bad orders"), rejects_max=2)
    life.start(with_bad(1))
    with pytest.raises(RowRejected, match="more than 2 rows"):
        life.rehearse(0, [life.prepare(with_bad(10, 3, 5, 7), 0)])


def test_text_that_the_server_can_not_store_is_set_apart_by_its_row(place):
    place.sql(f"CREATE TABLE {place.schema}.orders (id bigint, name text, due date, paid numeric)")
    day = dt.date(2024, 2, 29)
    rows = pa.table(
        {
            "id": pa.array(range(6), pa.int64()),
            "name": ["a", "b\0c", None, "\0", "e", "f"],
            "due": [day] * 6,
            "paid": pa.array([Decimal("-12.30")] * 6, pa.decimal128(10, 2)),
        }
    )
    life = place.life(on_reject=Memory(name="bad orders"))
    life.start(rows)
    receipts = [life.prepare(rows, 0, 0), life.prepare(rows.slice(4), 0, 1)]
    assert [receipt.token["unfit"] for receipt in receipts] == [2, 0]
    life.rehearse(0, receipts)
    rejected = life.committer.rejected(0).to_pylist()
    assert sorted(json.loads(row["row"])["name"] for row in rejected) == ["\0", "b\0c"]
    assert {json.loads(row["row"])["due"] for row in rejected} == {"2024-02-29"}
    assert {json.loads(row["row"])["paid"] for row in rejected} == {"-12.30"}
    assert all("character NUL" in row["reason"] for row in rejected)
    life.close()
    place.keep(life.fresh(generation=2)).commit(0, receipts)
    assert place.rows(columns="id") == [(0,), (2,), (4,), (4,), (5,), (5,)]
    assert place.leftovers() == []
