"""Rows that the table refuses are found and named, by halves, and may be set apart."""

from __future__ import annotations

import datetime as dt
import json
from decimal import Decimal
from functools import partial

import psycopg
import pyarrow as pa
import pytest
from kit.sql.rejects import *  # noqa: F403  every test there is one of this module, too
from sinks.postgres.conftest import make_place

from epochal.errors import Misconfigured, RowRejected, TryAgain
from epochal.kit.sql.rejects import REJECTED, SetApart
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
    held = life.committer.hold(session, 0, [receipt.handle])
    apply = life.committer.read_apply(session, held)
    search = RefusedRowSearch(session, apply, limit=10)
    found = search.run()
    session.roll_back()
    life.committer.pool.give_back(session)
    assert [one.row for one in found] == ['{"id":7778,"name":"x"}']
    assert search.attempts < 40


@pytest.mark.parametrize("key", [("uuid", "bad", "0" * 32), ("varchar(2) NOT NULL", "abc", "ab")])
def test_keys_that_can_not_be_read_are_set_apart_whichever_row_of_a_key_wins(place, key):
    column, bad, good = key
    place.sql(f"CREATE TABLE {place.schema}.orders (id {column} UNIQUE, n bigint)")
    options = {"mode": "upsert", "keys": "id", "order_by": "n"}
    life = place.life(**options, on_reject=Memory(name="bad orders"))
    rows = pa.table({"id": [bad, good, bad, good], "n": [1, 2, 3, 4]})
    life.start(rows)
    receipts = [life.prepare(rows, 0)]
    life.rehearse(0, receipts)
    set_apart = life.committer.rejected(0).to_pylist()
    assert sorted(json.loads(one["row"])["n"] for one in set_apart) == [1, 3]
    life.commit(0, receipts)
    assert place.rows(columns="n") == [(4,)]


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


def test_rows_that_a_rewrite_of_staging_has_moved_are_not_taken_for_refused_ones(
    uuids, monkeypatch
):
    """VACUUM FULL waits for the search, and gives rows other places before any is deleted."""
    life = uuids.life(on_reject=Memory(name="bad orders"))
    # Their remains lie before the rows of the next epoch.
    life.write(0, with_bad(10))
    receipt = life.prepare(with_bad(100, 5), 1)
    slot, add = uuids.slot(receipt.handle), SetApart.add

    def add_and_rewrite(apart, found):
        add(apart, found)
        uuids.sql(f"VACUUM FULL {slot}")

    with monkeypatch.context() as rewriting:
        rewriting.setattr(SetApart, "add", add_and_rewrite)
        with pytest.raises(TryAgain, match=r"was rewritten .* no decision was made"):
            life.rehearse(1, [receipt])
    assert uuids.sql(f"SELECT count(*) FROM {slot}") == [(100,)]
    life.committer.abort(1, [receipt])
    life.write(1, with_bad(100, 5))
    assert len(uuids.rows()) == 10 + 98


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


# Whatever refuses a row, it goes elsewhere; what no row caused never does

_TRIGGER = """
CREATE FUNCTION {schema}.judge() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN IF {when} THEN {raises}; END IF; RETURN NEW; END $$;
CREATE TRIGGER judge BEFORE INSERT ON {schema}.orders FOR EACH {each}
EXECUTE FUNCTION {schema}.judge()
"""
_TABLE = "CREATE TABLE {schema}.orders (id bigint, name text);"


def trigger(raises: str, when: str = "NEW.id = 2", each: str = "ROW") -> str:
    return _TABLE + _TRIGGER.replace("{raises}", raises).replace("{when}", when).replace(
        "{each}", each
    )


REFUSING = {
    "a trigger": (trigger("RAISE EXCEPTION 'no twos'"), "P0001"),
    "a trigger with a code of its own": (
        trigger("RAISE EXCEPTION 'no twos' USING ERRCODE = 'AB123'"),
        "AB123",
    ),
    "a trigger with the code of a privilege": (
        trigger("RAISE EXCEPTION 'no twos' USING ERRCODE = '42501'"),
        "42501",
    ),
    "an error in a trigger": (trigger("PERFORM 1 FROM nowhere"), "42P01"),
    "a view": (
        "CREATE TABLE {schema}.base (id bigint, name text);"
        "CREATE VIEW {schema}.orders AS SELECT * FROM {schema}.base WHERE id <> 2"
        " WITH CHECK OPTION",
        "44000",
    ),
    "an index": (_TABLE + "CREATE INDEX ON {schema}.orders (name)", "54000"),
    "a deferred trigger": (
        trigger("RAISE EXCEPTION 'no twos'").replace(
            "CREATE TRIGGER judge BEFORE INSERT ON {schema}.orders",
            "CREATE CONSTRAINT TRIGGER judge AFTER INSERT ON {schema}.orders"
            " DEFERRABLE INITIALLY DEFERRED",
        ),
        "P0001",
    ),
}


def incompressible(length: int) -> str:
    return "".join(chr(33 + (n * n * 31 + n * 7) % 15013 % 90) for n in range(length))


def three() -> pa.Table:
    names = ["a", incompressible(20_000), "c"]
    return pa.table({"id": pa.array([1, 2, 3], pa.int64()), "name": names})


@pytest.mark.parametrize("refusing", REFUSING)
def test_whatever_refuses_a_row_it_goes_elsewhere_and_the_rest_arrives(place, refusing):
    made, sqlstate = REFUSING[refusing]
    place.sql(made.replace("{schema}", place.schema))
    life = place.life(on_reject=Memory(name="bad orders"))
    life.write(0, three())
    (rejected,) = life.committer.rejected(0).to_pylist()
    assert (rejected["sqlstate"], json.loads(rejected["row"])["id"]) == (sqlstate, 2)
    assert place.rows(columns="id") == [(1,), (3,)]
    assert place.leftovers() == []


def test_a_row_that_a_policy_refuses_goes_elsewhere_even_if_it_is_alone(orders, some, least):
    orders.sql(f"ALTER TABLE {orders.schema}.orders ENABLE ROW LEVEL SECURITY")
    orders.sql(f"CREATE POLICY p ON {orders.schema}.orders FOR INSERT WITH CHECK (id <> 2)")
    life = orders.life(url=orders.url(user=least), on_reject=Memory(name="bad orders"))
    orders.grant(life.sink)
    life.write(0, some(2))
    assert [row["sqlstate"] for row in life.committer.rejected(0).to_pylist()] == ["42501"]
    life.write(1, some(1, 2, 3))
    assert len(life.committer.rejected(1)) == 1
    assert orders.rows(columns="id") == [(1,), (3,)]
    # The same code, and no row's fault.
    orders.sql(f"REVOKE INSERT ON {orders.schema}.orders FROM {least}")
    receipts = [life.prepare(some(4), 2)]
    with pytest.raises(Misconfigured, match="permission denied"):
        life.rehearse(2, receipts)
    assert life.committer.rejected(2) is None


NOBODYS_FAULT = {
    "a statement trigger": (
        trigger("RAISE EXCEPTION 'closed'", when="true", each="STATEMENT"),
        RowRejected,
        "closed",
    ),
    "a trigger that always fails": (
        trigger("PERFORM 1 FROM nowhere", when="true"),
        Misconfigured,
        "nowhere",
    ),
    "a deadline": (trigger("PERFORM pg_sleep(60)"), TryAgain, "statement timeout"),
    "a retry that a trigger asks for": (
        trigger("RAISE EXCEPTION 'later' USING ERRCODE = 'serialization_failure'"),
        TryAgain,
        "later",
    ),
}


@pytest.mark.parametrize("failing", NOBODYS_FAULT)
def test_what_is_no_row_s_fault_sets_no_row_apart(place, some, failing):
    made, error, text = NOBODYS_FAULT[failing]
    place.sql(made.replace("{schema}", place.schema))
    life = place.life(on_reject=Memory(name="bad orders"), statement_timeout_s=1)
    undo = partial(place.sql, f"DROP TRIGGER judge ON {place.schema}.orders")
    life.write_after(undo, some(1, 2, 3), error, text)
    assert place.rows(columns="id") == [(1,), (2,), (3,)]


def test_characters_that_the_server_s_encoding_lacks_go_elsewhere(place, server):
    database = f"latin_{place.schema}"
    place.sql(f"CREATE DATABASE {database} ENCODING latin1 TEMPLATE template0")
    url = server.url(database=database)
    try:
        with psycopg.connect(url, autocommit=True) as latin:
            latin.execute(f"CREATE SCHEMA {place.schema}")
            latin.execute(f"CREATE TABLE {place.schema}.orders (id bigint, name text)")
            life = place.life(url=url, on_reject=Memory(name="bad orders"))
            names = ["é", "世界", "b\0", "c", "界", "ñ"]
            life.write(0, pa.table({"id": pa.array(range(6), pa.int64()), "name": names}))
            rejected = [json.loads(row["row"]) for row in life.committer.rejected(0).to_pylist()]
            assert sorted(row["name"] for row in rejected) == ["b\0", "世界", "界"]
            found = latin.execute(f"SELECT name FROM {place.schema}.orders ORDER BY id").fetchall()
            assert found == [("é",), ("c",), ("ñ",)]
            life.close()
    finally:
        place.sql(f"DROP DATABASE {database} WITH (FORCE)")


def test_refused_rows_go_elsewhere_where_all_tables_are_published(uuids):
    uuids.sql(f"CREATE PUBLICATION every_{uuids.schema} FOR ALL TABLES")
    try:
        life = uuids.life(on_reject=Memory(name="bad orders"))
        life.write(0, with_bad(20, 4))
        assert len(life.committer.rejected(0)) == 2
        assert len(uuids.rows()) == 18
    finally:
        uuids.sql(f"DROP PUBLICATION every_{uuids.schema}")


def test_spark_s_first_moment_is_refused_and_not_retried(server):
    first = pa.array([0, -(2**63), 1], pa.timestamp("us"))
    rows = pa.table({"id": pa.array([1, 2, 3], pa.int64()), "at": first})
    with make_place(server, "columns") as place:
        place.sql(f"CREATE TABLE {place.schema}.orders (id bigint, at timestamp)")
        with pytest.raises(RowRejected, match="4713 BC"):
            place.life().write(0, rows)
        life = place.life(name="elsewhere", on_reject=Memory(name="bad orders"))
        life.write(0, rows)
        (rejected,) = life.committer.rejected(0).to_pylist()
        assert json.loads(rejected["row"])["id"] == 2
        assert place.rows(columns="id") == [(1,), (3,)]
