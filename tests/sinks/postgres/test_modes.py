"""Upsert, replace and delete: which row wins, which columns are touched, what is refused."""

from __future__ import annotations

import pyarrow as pa
import pytest
from kit.sql.keyed_modes import *  # noqa: F403  every test there is one of this module, too

from epochal.errors import Misconfigured, RowRejected


def test_keys_are_compared_as_the_column_compares_them(place):
    place.sql(f"CREATE TABLE {place.schema}.orders (id uuid PRIMARY KEY, name text)")
    upper, lower = "ABCDEF00-0000-0000-0000-000000000001", "abcdef00-0000-0000-0000-000000000001"
    life = place.life(mode="upsert", keys="id", order_by="name")
    life.write(0, pa.table({"id": [upper, lower], "name": ["a", "b"]}))
    assert [(str(key), name) for key, name in place.rows()] == [(lower, "b")]


@pytest.mark.parametrize(
    "index",
    [
        "CREATE UNIQUE INDEX ON {} (id) WHERE name IS NOT NULL",
        "ALTER TABLE {} ADD UNIQUE (id) DEFERRABLE",
        "CREATE UNIQUE INDEX ON {} (id, name)",
    ],
)
def test_a_constraint_that_tells_no_row_for_sure_is_refused(orders, some, index):
    orders.sql(index.format(f"{orders.schema}.orders"))
    with pytest.raises(Misconfigured, match="can't tell which row is meant"):
        orders.life(mode="upsert", keys="id").start(some(1))


def test_a_second_unique_key_that_is_hit_refuses_the_row_by_name(place, some):
    place.sql(f"CREATE TABLE {place.schema}.orders (id bigint PRIMARY KEY, name text UNIQUE)")
    place.sql(f"INSERT INTO {place.schema}.orders VALUES (1, 'n7')")
    with pytest.raises(RowRejected, match=r'"name":"n7".*\(name\)=\(n7\) already exists'):
        place.life(mode="upsert", keys="id").write(0, some(5, 6, 7, 8))
    assert place.rows() == [(1, "n7")]


def test_partitioned_tables_take_upserts(place, some):
    place.sql(
        f"CREATE TABLE {place.schema}.orders (id bigint, name text, PRIMARY KEY (id))"
        " PARTITION BY RANGE (id)"
    )
    for number in range(2):
        place.sql(
            f"CREATE TABLE {place.schema}.p{number} PARTITION OF {place.schema}.orders"
            f" FOR VALUES FROM ({number * 10}) TO ({number * 10 + 10})"
        )
    life = place.life(mode="upsert", keys="id")
    life.write(0, some(1, 11))
    life.write(1, some(1, 12, name="again"))
    assert place.rows() == [(1, "again1"), (11, "n11"), (12, "again12")]
    with pytest.raises(RowRejected, match="no partition of relation"):
        life.write(2, some(5, 99))


def test_triggers_see_every_row_once(keyed, some):
    schema = keyed.schema
    keyed.sql(f"CREATE TABLE {schema}.seen (id bigint)")
    keyed.sql(
        f"CREATE FUNCTION {schema}.note() RETURNS trigger LANGUAGE plpgsql AS"
        f" $$ BEGIN INSERT INTO {schema}.seen VALUES (NEW.id); RETURN NEW; END $$"
    )
    keyed.sql(
        f"CREATE TRIGGER t AFTER INSERT OR UPDATE ON {schema}.orders"
        f" FOR EACH ROW EXECUTE FUNCTION {schema}.note()"
    )
    life = keyed.life(mode="upsert", keys="id")
    receipts = life.write(0, some(1, 2))
    life.commit(0, receipts)
    assert keyed.rows("seen") == [(1,), (2,)]
