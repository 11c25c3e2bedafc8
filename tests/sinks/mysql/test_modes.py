"""Upsert, replace and delete, as everywhere; and what is MySQL's own about them."""

from __future__ import annotations

import pyarrow as pa
import pytest
from kit.sql.change_modes import *  # noqa: F403  the same
from kit.sql.keyed_modes import *  # noqa: F403  every test there is one of this module, too
from kit.sql.keyed_modes import CHANGES, KEYED, changes

from epochal.errors import Misconfigured, RowRejected
from epochal.sinks.memory import Memory

pytestmark = pytest.mark.products("mariadb", "mysql")


def test_an_upsert_that_another_unique_index_makes_ambiguous_is_refused(place, some):
    place.sql(f"CREATE TABLE {place.schema}.orders (id bigint PRIMARY KEY, name varchar(9) UNIQUE)")
    with pytest.raises(Misconfigured, match="rows that are equal by the unique index name"):
        place.life(mode="upsert", keys="id").start(some(1))


@pytest.mark.parametrize("kept", ["STORED", "VIRTUAL"])
def test_an_upsert_that_a_unique_index_on_a_generated_column_makes_ambiguous_is_refused(
    place, some, kept
):
    """The server computes it from what is written, so it may meet the row of another key."""
    place.sql(
        f"CREATE TABLE {place.schema}.orders (id bigint PRIMARY KEY, name varchar(9),"
        f" folded varchar(9) AS (lower(name)) {kept} UNIQUE)"
    )
    with pytest.raises(Misconfigured, match="rows that are equal by the unique index folded"):
        place.life(mode="upsert", keys="id").start(some(1))


def test_a_null_key_of_a_change_stream_gets_no_number(place):
    place.sql(
        f"CREATE TABLE {place.schema}.orders (id bigint AUTO_INCREMENT PRIMARY KEY, name text)"
    )
    life = place.life(mode="upsert", **CHANGES)
    with pytest.raises(RowRejected, match=r"1 row whose key \(id\) is null"):
        life.write(0, changes((1, "a", 1, "u"), (None, "b", 1, "u")))
    assert place.rows() == []


@pytest.mark.parametrize(
    "column", ["timestamp NOT NULL", "bigint NOT NULL AUTO_INCREMENT, KEY (v)"]
)
def test_a_null_of_a_change_stream_becomes_no_time_and_no_number(place, column):
    """Of a delete it is left out; another row with it is refused."""
    ((before,),) = place.sql("SELECT @@global.explicit_defaults_for_timestamp")
    place.sql("SET GLOBAL explicit_defaults_for_timestamp = 0")
    try:
        place.sql(f"CREATE TABLE {place.schema}.orders (id bigint PRIMARY KEY, v {column})")
        life = place.life(mode="upsert", keys="id", delete_when="op = 'd'")
        kind = pa.timestamp("us") if "timestamp" in column else pa.int64()

        def rows(*ops: str) -> pa.Table:
            nulls = pa.nulls(len(ops), kind)
            return pa.table({"id": range(len(ops)), "v": nulls, "op": ops})

        life.write(0, rows("d"))
        with pytest.raises(RowRejected, match="1 row whose v is null"):
            life.write(1, rows("d", "u"))
    finally:
        place.sql(f"SET GLOBAL explicit_defaults_for_timestamp = {before}")
    assert place.rows() == []


def test_a_generated_key_may_be_updated_by(place):
    place.sql(
        f"CREATE TABLE {place.schema}.orders (a int, b int, name varchar(9),"
        " id bigint AS (a * 10 + b) STORED UNIQUE)"
    )
    place.sql(f"INSERT INTO {place.schema}.orders (a, b) VALUES (1, 1), (1, 2)")
    rows = pa.table({"id": pa.array([12], pa.int64()), "name": ["new"]})
    place.life(mode="update", keys="id").write(0, rows)
    assert place.rows(columns="id, name") == [(11, None), (12, "new")]


def test_an_index_on_the_first_characters_of_a_key_identifies_no_row(place, some):
    """By it `n17` and `n18` are one, and the second would change the row of the first."""
    place.sql(f"CREATE TABLE {place.schema}.orders (id bigint, name text, UNIQUE part (name(2)))")
    with pytest.raises(Misconfigured, match="no primary key or unique index on exactly these"):
        place.life(mode="upsert", keys="name").start(some(17, 18))


def test_a_replace_refuses_a_row_that_hits_another_unique_index_by_name(place, some):
    place.sql(f"CREATE TABLE {place.schema}.orders (id bigint PRIMARY KEY, name varchar(9) UNIQUE)")
    place.sql(f"INSERT INTO {place.schema}.orders VALUES (1, 'n7')")
    with pytest.raises(RowRejected, match=r'"name": "n7".*Duplicate entry'):
        place.life(mode="replace", keys="id").write(0, some(5, 6, 7, 8))
    assert place.rows() == [(1, "n7")]


def test_a_number_that_the_server_counts_stands_in_no_ones_way(place):
    place.sql(
        f"CREATE TABLE {place.schema}.orders"
        " (n bigint AUTO_INCREMENT PRIMARY KEY, sku varchar(9) UNIQUE, name text)"
    )
    life = place.life(mode="upsert", keys="sku")
    life.write(0, pa.table({"sku": ["a", "b"], "name": ["x", "y"]}))
    life.write(1, pa.table({"sku": ["b", "c"], "name": ["z", "w"]}))
    assert sorted(place.rows(columns="sku, name")) == [("a", "x"), ("b", "z"), ("c", "w")]


def test_keys_are_compared_as_the_column_compares_them(place):
    place.sql(
        f"CREATE TABLE {place.schema}.orders (id varchar(9) COLLATE utf8mb4_general_ci"
        " PRIMARY KEY, name text)"
    )
    life = place.life(mode="upsert", keys="id", order_by="name")
    life.write(0, pa.table({"id": ["KEY", "key"], "name": ["a", "b"]}))
    assert [(key.lower(), name) for key, name in place.rows()] == [("key", "b")]


def test_columns_of_any_name_are_changed_by_newer_rows(place):
    place.sql(f"CREATE TABLE {place.schema}.orders (id int PRIMARY KEY, v int, `a = b` varchar(9))")
    life = place.life(mode="upsert", keys="id", newer="v")
    for epoch, (version, text) in enumerate([(2, "two"), (1, "one"), (3, "three")]):
        life.write(epoch, pa.table({"id": [1], "v": [version], "a = b": [text]}))
    assert place.rows() == [(1, 3, "three")]


def test_a_row_that_changes_nothing_is_not_written(place):
    place.sql(
        f"CREATE TABLE {place.schema}.orders (id bigint PRIMARY KEY, name varchar(9),"
        " at timestamp(6) DEFAULT CURRENT_TIMESTAMP(6) ON UPDATE CURRENT_TIMESTAMP(6))"
    )
    life = place.life(mode="upsert", keys="id", skip_unchanged=True)

    def write(epoch: int, *names: str | None) -> list:
        life.write(epoch, pa.table({"id": range(len(names)), "name": names}))
        return [at for (at,) in place.sql(f"SELECT at FROM {place.schema}.orders ORDER BY id")]

    first, second = write(0, "a", None, "c"), write(1, "a", None, "C")
    assert [old == new for old, new in zip(first, second, strict=True)] == [True, True, False]


def test_triggers_see_every_row_once(keyed, some):
    schema = keyed.schema
    keyed.sql(f"CREATE TABLE {schema}.seen (id bigint)")
    keyed.sql(
        f"CREATE TRIGGER {schema}.t AFTER INSERT ON {schema}.orders FOR EACH ROW"
        f" INSERT INTO {schema}.seen VALUES (NEW.id)"
    )
    life = keyed.life(mode="upsert", keys="id")
    receipts = life.write(0, some(1, 2))
    life.commit(0, receipts)
    assert keyed.rows("seen") == [(1,), (2,)]


def test_partitioned_tables_take_upserts(place, some):
    place.sql(
        f"CREATE TABLE {place.schema}.orders (id bigint PRIMARY KEY, name text)"
        " PARTITION BY RANGE (id) (PARTITION a VALUES LESS THAN (10),"
        " PARTITION b VALUES LESS THAN (20))"
    )
    life = place.life(mode="upsert", keys="id")
    life.write(0, some(1, 11))
    life.write(1, some(1, 12, name="again"))
    assert place.rows() == [(1, "again1"), (11, "n11"), (12, "again12")]
    with pytest.raises(RowRejected, match="no partition for value 99"):
        life.write(2, some(5, 99))


@KEYED
def test_order_is_that_of_the_fields_whatever_column_keeps_them(keyed, mode):
    """9 is less than 10, though not as the text that the column keeps."""
    columns = {"id": "id", "name": "name", "version": "note"}
    options = {"mode": mode, "keys": "id", "order_by": "version", "columns": columns}
    keyed.life(**options).write(0, changes((1, "old", 9, "u")), changes((1, "new", 10, "u")))
    assert keyed.rows() == [(1, "new", "10")]
    life = keyed.life(**options, name="keeping", on_reject=Memory(name="bad orders"))
    rows = changes((1, "old", 99, "u"), (2**40, "x", 1, "u"), (1, "new", 100, "u"))
    keyed.sql(f"ALTER TABLE {keyed.schema}.orders MODIFY COLUMN id int")
    life.write(0, rows)
    assert keyed.rows() == [(1, "new", "100")]
