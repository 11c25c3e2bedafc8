"""Upsert, replace and delete, as everywhere; and what is MySQL's own about them."""

from __future__ import annotations

import pyarrow as pa
import pytest
from kit.sql.change_modes import *  # noqa: F403  the same
from kit.sql.keyed_modes import *  # noqa: F403  every test there is one of this module, too
from kit.sql.keyed_modes import KEYED, changes

from epochal.errors import Misconfigured, RowRejected
from epochal.sinks.memory import Memory

pytestmark = pytest.mark.products("mariadb", "mysql")


def test_an_upsert_that_another_unique_index_makes_ambiguous_is_refused(place, some):
    place.sql(f"CREATE TABLE {place.schema}.orders (id bigint PRIMARY KEY, name varchar(9) UNIQUE)")
    with pytest.raises(Misconfigured, match="rows that are equal by the unique index name"):
        place.life(mode="upsert", keys="id").start(some(1))


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
