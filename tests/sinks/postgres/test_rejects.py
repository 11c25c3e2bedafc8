"""Rows that the table refuses are found and named, by halves, and may be set apart."""

from __future__ import annotations

import pyarrow as pa
import pytest

from epochal.errors import RowRejected
from epochal.kit.sql.names import staging_name
from epochal.kit.sql.rejects import REJECTED
from epochal.sinks.memory import Memory
from epochal.sinks.postgres.applying import read_apply
from epochal.sinks.postgres.rejects import Search


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
    with life.committer.pool.connection() as connection:
        connection.execute("BEGIN")
        apply = read_apply(connection, life.sink, {staging_name(receipt.handle): 0})
        search = Search(connection, apply, limit=10, check_now=lambda: None)
        found = search.run()
        connection.execute("ROLLBACK")
    assert [one.row for one in found] == ['{"id":7778,"name":"x"}']
    assert search.subtransactions < 40


def test_bad_rows_are_set_apart_and_handed_over_with_their_reasons(uuids):
    life = uuids.life(on_reject=Memory(name="bad orders"))
    life.start(with_bad(1))
    receipts = [life.prepare(with_bad(40, 7, 30), 0, 0), life.prepare(with_bad(5), 0, 1)]
    life.rehearse(0, receipts)
    rows = life.committer.rejected(0)
    assert rows.schema == REJECTED == life.committer.rejected_schema
    told = rows.to_pylist()
    assert [row["row"] for row in told] == [
        '{"id":7,"name":"bad7"}',
        '{"id":13,"name":"00000000000000000000000000000000"}',
        '{"id":30,"name":"bad30"}',
    ]
    assert [row["sqlstate"] for row in told] == ["22P02", "23514", "22P02"]
    assert told[0]["epoch"] == 0
    assert told[0]["sink"] == life.sink.name
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
