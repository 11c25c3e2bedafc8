"""Rows that the table refuses, when they are loaded or when they are applied, are set apart."""

from __future__ import annotations

import json
from functools import partial

import pyarrow as pa
import pytest
from kit.sql.rejects import *  # noqa: F403  every test there is one of this module, too
from kit.sql.rejects import rejected_by

from epochal.errors import Misconfigured, RowRejected, TryAgain
from epochal.kit.sql.rejects import REJECTED
from epochal.sinks.memory import Memory

pytestmark = pytest.mark.products("mariadb", "mysql")

LONG = "too long for its column"


def with_bad(count: int, *bad: int) -> pa.Table:
    names = ["ok" if n not in bad else LONG for n in range(count)]
    return pa.table({"id": pa.array(range(count), pa.int64()), "name": names})


@pytest.fixture
def narrow(place):
    place.sql(f"CREATE TABLE {place.schema}.orders (id bigint CHECK (id <> 13), name varchar(3)) ")
    return place


def test_bad_rows_are_set_apart_and_handed_over_with_their_reasons(narrow):
    life = narrow.life(on_reject=Memory(name="bad orders"))
    life.start(with_bad(1))
    receipts = [life.prepare(with_bad(40, 7, 30), 0, 0), life.prepare(with_bad(5), 0, 1)]
    assert [receipt.rows for receipt in receipts] == [40, 5]
    life.rehearse(0, receipts)
    assert life.committer.rejected(0).schema == REJECTED == life.committer.rejected_schema
    rejected = rejected_by(life)
    assert [json.loads(row["row"]) for row in rejected] == [
        {"id": 7, "name": LONG},
        {"id": 30, "name": LONG},
        {"id": 13, "name": "ok"},
    ]
    of_check = "23000" if narrow.is_mariadb else "HY000"
    assert [row["sqlstate"] for row in rejected] == ["22000", "22000", of_check]
    assert "Data truncated for column" in rejected[0]["reason"]
    assert "CONSTRAINT" in rejected[2]["reason"].upper()
    assert {(row["sink"], row["epoch"], row["partition"]) for row in rejected} == {
        (life.sink.name, 0, 0)
    }
    assert narrow.rows() == []
    # Another process applies exactly the same rows.
    life.close()
    narrow.keep(life.fresh(generation=2)).commit(0, receipts)
    assert [key for (key, _) in narrow.rows()] == sorted(
        [n for n in range(40) if n not in {7, 13, 30}] + list(range(5))
    )
    assert narrow.leftovers() == []


def test_rows_of_many_blocks_are_numbered_through(narrow):
    life = narrow.life(on_reject=Memory(name="bad orders"), buffer_bytes=20_000)
    life.start(with_bad(1))
    rows = pa.concat_tables([with_bad(13), with_bad(9000, 500, 4000, 8999).slice(14)])
    receipt = life.prepare(rows, 0)
    assert receipt.token["blocks"] > 3
    life.rehearse(0, [receipt])
    assert [json.loads(row["row"])["id"] for row in rejected_by(life)] == [500, 4000, 8999]
    life.commit(0, [receipt])
    assert len(narrow.rows()) == 9000 - 1 - 3


def test_an_epoch_may_consist_of_bad_rows(narrow):
    life = narrow.life(on_reject=Memory(name="bad orders"))
    life.start(with_bad(1))
    receipt = life.prepare(with_bad(2, 0, 1), 0)
    life.rehearse(0, [receipt])
    life.commit(0, [receipt])
    assert len(rejected_by(life)) == 2
    assert narrow.rows() == []
    assert narrow.leftovers() == []
    assert [mark.epoch for mark in life.committer.newest()] == [0]


UNFIT = [
    ("int", pa.array([1, 2**40], pa.int64()), "Out of range"),
    ("int", pa.array(["1", "one"]), "Incorrect integer"),
    ("int NOT NULL", pa.array([1, None], pa.int32()), "NOT NULL"),
    ("double", pa.array([1.0, float("nan")]), "no NaN"),
    ("decimal(4,1)", pa.array(["1.5", "1.55"]), "truncated"),
    (
        "datetime",
        pa.array([0, 5], pa.timestamp("us")),
        "would truncate the second",
    ),
    ("varchar(9) CHARACTER SET latin1", pa.array(["a", "世"]), "Incorrect string"),
    ("varbinary(2)", pa.array([b"ab", b"abc"]), "truncated"),
]


@pytest.mark.parametrize(("column", "values", "reason"), UNFIT, ids=str)
def test_a_value_that_no_column_holds_goes_elsewhere_and_the_rest_arrives(
    place, column, values, reason
):
    place.sql(f"CREATE TABLE {place.schema}.orders (id int, v {column})")
    life = place.life(on_reject=Memory(name="bad orders"))
    rows = pa.table({"id": pa.array([1, 2], pa.int32()), "v": values})
    life.start(rows)
    receipt = life.prepare(rows, 0)
    life.rehearse(0, [receipt])
    life.commit(0, [receipt])
    assert place.rows(columns="id") == [(1,)]
    (rejected,) = rejected_by(life)
    assert json.loads(rejected["row"])["id"] == 2
    assert reason in rejected["reason"]


def test_text_that_is_no_json_is_found_among_many_rows(place):
    """MySQL loads none of the rows then."""
    place.sql(f"CREATE TABLE {place.schema}.orders (id int, v json)")
    texts = ["{" if number in (3, 1500) else "{}" for number in range(2000)]
    rows = pa.table({"id": pa.array(range(2000), pa.int32()), "v": texts})
    life = place.life(on_reject=Memory(name="bad orders"), rejects_max=2)
    life.start(rows)
    receipt = life.prepare(rows, 0)
    life.rehearse(0, [receipt])
    life.commit(0, [receipt])
    assert [json.loads(row["row"])["id"] for row in rejected_by(life)] == [3, 1500]
    assert len(place.rows(columns="id")) == 1998
    worse = pa.table({"id": rows["id"], "v": ["{"] * 2000})
    with pytest.raises(RowRejected, match="rejects_max= is the limit"):
        life.rehearse(1, [life.prepare(worse, 1)])


def test_bad_rows_of_an_upsert_go_elsewhere(keyed, some):
    keyed.sql(f"ALTER TABLE {keyed.schema}.orders MODIFY name varchar(3)")
    life = keyed.life(mode="upsert", keys="id", on_reject=Memory(name="bad orders"))
    life.start(some(1))
    receipts = [life.prepare(some(1, 2), 0, 0), life.prepare(some(3, 1234), 0, 1)]
    life.rehearse(0, receipts)
    life.commit(0, receipts)
    assert [row["row"] for row in rejected_by(life)] == ['{"id": 1234, "name": "n1234"}']
    assert keyed.rows(columns="id, name") == [(1, "n1"), (2, "n2"), (3, "n3")]


@pytest.mark.parametrize(("bad", "limit"), [((3, 5, 7), 2), ((3, 5), 2)])
def test_too_many_rejected_rows_fail_the_epoch(narrow, bad, limit):
    life = narrow.life(on_reject=Memory(name="bad orders"), rejects_max=limit)
    life.start(with_bad(1))
    with pytest.raises(RowRejected, match="more than 2 rows"):
        life.rehearse(0, [life.prepare(with_bad(20, *bad), 0)])
    assert narrow.rows() == []


def test_refused_rows_need_staging_and_names_of_ours_stay_ours(place):
    with pytest.raises(Misconfigured, match="looks at no row again"):
        place.sink(on_reject=Memory(name="bad"), strategy="prepared")
    with pytest.raises(Misconfigured, match="on_reject='perhaps'"):
        place.sink(on_reject="perhaps")
    place.sql(f"CREATE TABLE {place.schema}.orders (epochal_why text)")
    with pytest.raises(Misconfigured, match="a name that is taken"):
        place.life().start(pa.table({"epochal_why": ["x"]}))


# Whatever refuses a row, it goes elsewhere; what no row caused never does

_TABLE = "CREATE TABLE {schema}.orders (id bigint, name longtext)"
_TRIGGER = (
    "CREATE TRIGGER {schema}.judge BEFORE INSERT ON {schema}.orders FOR EACH ROW"
    " BEGIN IF NEW.id = 2 THEN {raises}; END IF; END"
)


def trigger(raises: str) -> list[str]:
    return [_TABLE, _TRIGGER.replace("{raises}", raises)]


REFUSING = {
    "a trigger": (trigger("SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'no twos'"), "45000"),
    "a trigger with a number of its own": (
        trigger("SIGNAL SQLSTATE '45001' SET MYSQL_ERRNO = 31000"),
        "45001",
    ),
    "a trigger that finds nothing": (trigger("SIGNAL SQLSTATE '02000'"), "02000"),
    "an error in a trigger": (trigger("INSERT INTO nowhere VALUES (1)"), "42S02"),
    "a view": (
        [
            "CREATE TABLE {schema}.base (id bigint, name longtext)",
            "CREATE VIEW {schema}.orders AS SELECT * FROM {schema}.base WHERE id <> 2"
            " WITH CHECK OPTION",
        ],
        "44000 HY000",
    ),
    # MariaDB's code and MySQL's.
    "a constraint": ([_TABLE[:-1] + ", CONSTRAINT no_twos CHECK (id <> 2))"], "23000 HY000"),
}


@pytest.mark.parametrize("refusing", REFUSING)
def test_whatever_refuses_a_row_it_goes_elsewhere_and_the_rest_arrives(place, some, refusing):
    made, sqlstates = REFUSING[refusing]
    for statement in made:
        place.sql(statement.replace("{schema}", place.schema))
    life = place.life(on_reject=Memory(name="bad orders"))
    life.write(0, some(1, 2, 3))
    (rejected,) = rejected_by(life)
    assert rejected["sqlstate"] in sqlstates.split()
    assert json.loads(rejected["row"])["id"] == 2
    assert place.rows(columns="id") == [(1,), (3,)]
    assert place.leftovers() == []


NOBODYS_FAULT = {
    "a trigger that always fails": (
        trigger("INSERT INTO nowhere VALUES (1)"),
        Misconfigured,
        "nowhere",
    ),
    "a retry that a trigger asks for": (
        trigger("SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1205"),
        TryAgain,
        "1205",
    ),
}


@pytest.mark.parametrize("failing", NOBODYS_FAULT)
def test_what_is_no_row_s_fault_sets_no_row_apart(place, some, failing):
    made, error, text = NOBODYS_FAULT[failing]
    for statement in made:
        place.sql(statement.replace("{schema}", place.schema))
    life = place.life(on_reject=Memory(name="bad orders"))
    undo = partial(place.sql, f"DROP TRIGGER {place.schema}.judge")
    life.write_after(undo, some(2, 2, 2), error, text)
    assert place.rows(columns="id") == [(2,), (2,), (2,)]
