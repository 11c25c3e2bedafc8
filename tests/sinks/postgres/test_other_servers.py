"""A real transaction pooler, an older server, its extensions."""

from __future__ import annotations

import pyarrow as pa
import pytest

from epochal.errors import Misconfigured


def test_staged_epochs_pass_through_a_transaction_pooler(orders, some, pooled):
    life = orders.life(url=orders.server.url(port=pooled))
    abilities = life.committer.check(some(1).schema)
    assert [one.granted for one in abilities if one.name == "direct connection"] == [False]
    for epoch in range(4):
        life.write(epoch, some(epoch * 10 + 1, epoch * 10 + 2), some(epoch * 10 + 3))
    receipts = [life.prepare(some(100), 4)]
    life.rehearse(4, receipts)
    life.committer.abort(4, receipts)
    receipts = [life.prepare(some(100), 4)]
    orders.keep(life.fresh(generation=2)).commit(4, receipts)
    assert len(orders.rows()) == 4 * 3 + 1
    assert orders.leftovers() == []


def test_prepared_is_refused_through_a_real_pooler(orders, some, pooled):
    life = orders.life(strategy="prepared", url=orders.server.url(port=pooled))
    with pytest.raises(Misconfigured, match="pooler is in between"):
        life.start(some(1))


@pytest.mark.parametrize("strategy", ["staged", "prepared"])
def test_an_older_server_takes_epochs_too(older, some, strategy):
    table = f"plain_{strategy}"
    older.sql(f"CREATE TABLE {older.schema}.{table} (id bigint, name text)")
    life = older.life(table, strategy=strategy)
    life.write(0, some(1, 2), some(3))
    life.write(1, some())
    assert older.rows(table, "id") == [(1,), (2,), (3,)]
    assert older.leftovers() == []


def test_a_citext_key_is_one_key_in_any_case(older):
    older.sql(f"CREATE TABLE {older.schema}.people (mail citext PRIMARY KEY, age int)")
    rows = pa.table({"mail": ["Ann@x", "bob@x", "ANN@x"], "age": pa.array([1, 2, 3], pa.int32())})
    life = older.life("people", mode="upsert", keys=["mail"], order_by="age")
    life.write(0, rows)
    life.write(1, rows.slice(1, 1).set_column(0, "mail", [["BOB@X"]]))
    assert [(mail.lower(), age) for mail, age in older.rows("people")] == [
        ("ann@x", 3),
        ("bob@x", 2),
    ]
    replaced = older.life("people", mode="replace", keys=["mail"], name="another")
    replaced.write(0, pa.table({"mail": ["ann@X"], "age": pa.array([9], pa.int32())}))
    assert ("ann@X", 9) in older.rows("people")
    assert len(older.rows("people")) == 2


def test_a_key_whose_type_is_not_on_the_search_path_is_refused(older):
    """`=` would be that of text, and a row in other letters not be found."""
    older.sql("CREATE SCHEMA apart; ALTER EXTENSION citext SET SCHEMA apart")
    try:
        older.sql(f"CREATE TABLE {older.schema}.apart (id apart.citext PRIMARY KEY, name text)")
        options = {"mode": "replace", "keys": "id"}
        with pytest.raises(Misconfigured, match=r'key "id": apart.citext is not on the search_pa'):
            older.life("apart", **options).start(pa.table({"id": ["ab"], "name": ["x"]}))
        path = ["SET search_path = public, apart"]
        life = older.life("apart", **options, name="seen", session_sql=path)
        for epoch, key in enumerate(("ab", "AB")):
            life.write(epoch, pa.table({"id": [key], "name": [key]}))
        assert older.rows("apart") == [("AB", "AB")]
        life.close()
    finally:
        older.sql("ALTER EXTENSION citext SET SCHEMA public")


@pytest.mark.parametrize("mode", ["upsert", "replace"])
@pytest.mark.parametrize("column", ["text", "varchar(5)", "char(5)"])
def test_keys_that_are_one_to_the_collation_of_their_column_are_one(older, mode, column):
    older.sql(
        f"CREATE COLLATION IF NOT EXISTS {older.schema}.folded (provider = icu,"
        " locale = 'und-u-ks-level2', deterministic = false)"
    )
    table = f"{mode}_{column[:4]}"
    older.sql(
        f"CREATE TABLE {older.schema}.{table}"
        f" (id {column} COLLATE {older.schema}.folded PRIMARY KEY, n int)"
    )
    life = older.life(table, mode=mode, keys="id", order_by="n", delete_when="n = 9")
    life.write(0, pa.table({"id": ["ab", "AB"], "n": pa.array([1, 2], pa.int32())}))
    assert older.rows(table, "n") == [(2,)]
    life.write(1, pa.table({"id": ["aB"], "n": pa.array([9], pa.int32())}))
    assert older.rows(table) == []
