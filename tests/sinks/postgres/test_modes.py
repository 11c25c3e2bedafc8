"""Upsert, replace and delete: which row wins, which columns are touched, what is refused."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal

import pyarrow as pa
import pytest
from kit.sql.change_modes import *  # noqa: F403  the same
from kit.sql.keyed_modes import *  # noqa: F403  every test there is one of this module, too

from epochal.errors import Misconfigured, RowRejected

MOMENT = dt.datetime.fromisoformat("2026-01-31T12:00:00")
MICRO, SECOND = dt.timedelta(microseconds=1), dt.timedelta(seconds=1)


def test_keys_are_compared_as_the_column_compares_them(place):
    place.sql(f"CREATE TABLE {place.schema}.orders (id uuid PRIMARY KEY, name text)")
    upper, lower = "ABCDEF00-0000-0000-0000-000000000001", "abcdef00-0000-0000-0000-000000000001"
    life = place.life(mode="upsert", keys="id", order_by="name")
    life.write(0, pa.table({"id": [upper, lower], "name": ["a", "b"]}))
    assert [(str(key), name) for key, name in place.rows()] == [(lower, "b")]


KEPT_ALIKE = [
    (
        "numeric(10,2)",
        pa.array([Decimal("1.0010"), Decimal("1.0040")], pa.decimal128(10, 4)),
        Decimal("1.00"),
    ),
    (
        "money_amount",
        pa.array([Decimal("1.0010"), Decimal("1.0040")], pa.decimal128(10, 4)),
        Decimal("1.00"),
    ),
    ("numeric(10,2)", pa.array([1.001, 1.004]), Decimal("1.00")),
    ("real", pa.array([0.1, 0.10000000001]), pytest.approx(0.1)),
    ("timestamp(0)", pa.array([MOMENT, MOMENT + MICRO]), MOMENT),
    ("timestamptz(3)", pa.array([MOMENT, MOMENT + MICRO]), MOMENT.replace(tzinfo=dt.UTC)),
    ("time(2)", pa.array([MOMENT.time(), (MOMENT + MICRO).time()]), MOMENT.time()),
    ("interval(0)", pa.array([SECOND, SECOND + MICRO]), SECOND),
    ("char(5)", pa.array(["ab", "ab  "]), "ab   "),
    ("varchar(2)", pa.array(["ab", "ab  "]), "ab"),
    ("short_code", pa.array(["ab", "ab  "]), "ab   "),
]


@pytest.mark.parametrize("mode", ["upsert", "replace"])
@pytest.mark.parametrize(
    "case", KEPT_ALIKE, ids=[f"{n}-{one[0]}" for n, one in enumerate(KEPT_ALIKE)]
)
def test_keys_that_the_column_keeps_as_one_are_one(place, mode, case):
    column, keys, kept = case
    place.sql(f"SET search_path = {place.schema}, public")
    place.sql("CREATE DOMAIN amount AS numeric(10,2)")
    place.sql("CREATE DOMAIN money_amount AS amount CHECK (value > 0)")
    place.sql("CREATE DOMAIN short_code AS char(5)")
    place.sql(f"CREATE TABLE orders (id {column} UNIQUE, name text)")
    options = {"mode": mode, "keys": "id", "columns": ["id", "name"]}
    life = place.life(**options, order_by="n", delete_when="gone")

    def rows(names, gone=(False, False)):
        return pa.table({"id": keys, "name": names, "n": [1, 2], "gone": list(gone)})

    life.write(0, rows(["loses", "wins"]))
    assert place.rows() == [(kept, "wins")]
    life.write(1, rows(["a", "b"]).slice(0, 1))
    assert [name for _, name in place.rows()] == ["a"]
    life.write(2, rows(["x", "y"], (True, True)).slice(0, 1))
    assert place.rows() == []
    with pytest.raises(RowRejected, match=r"several rows of one key"):
        place.life(**options, name="unordered").write(0, rows(["a", "b"]))


@pytest.mark.parametrize("column", ["varchar(2)", "char(2)", "bit(2)"])
def test_a_key_that_is_too_long_is_refused_and_never_cut(place, column):
    place.sql(f"CREATE TABLE {place.schema}.orders (id {column} PRIMARY KEY, name text)")
    place.sql(f"INSERT INTO {place.schema}.orders VALUES ('10', 'kept')")
    life = place.life(mode="upsert", keys="id", order_by="name", delete_when="name = 'gone'")
    with pytest.raises(RowRejected, match=r"too long|does not match"):
        life.write(0, pa.table({"id": ["101"], "name": ["gone"]}))
    assert place.rows() == [("10", "kept")]


@pytest.mark.parametrize(
    "index",
    [
        "CREATE UNIQUE INDEX ON {} (id) WHERE name IS NOT NULL",
        "ALTER TABLE {} ADD UNIQUE (id) DEFERRABLE",
        "CREATE UNIQUE INDEX ON {} (id, name)",
    ],
)
def test_a_constraint_that_identifies_no_row_is_refused(orders, some, index):
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


def test_a_row_that_changes_nothing_is_not_written_whatever_its_types(place):
    place.sql(
        f"CREATE TABLE {place.schema}.orders"
        " (id bigint PRIMARY KEY, note json, area box, name text)"
    )
    life = place.life(mode="upsert", keys="id", skip_unchanged=True)

    def write(epoch: int, *rows: tuple) -> dict[int, str]:
        ids, notes, areas, names = zip(*rows, strict=True)
        life.write(epoch, pa.table({"id": ids, "note": notes, "area": areas, "name": names}))
        return dict(place.sql(f"SELECT id, xmin::text FROM {place.schema}.orders ORDER BY id"))

    square, flat = "(1,1),(0,0)", "(2,0.5),(0,0)"
    first = write(0, (1, "{}", square, "a"), (2, "{}", square, None), (3, "{}", square, "c"))
    # Boxes of one area are equal to PostgreSQL, and two json are never compared.
    second = write(1, (1, "{}", square, "a"), (2, "{}", square, None), (3, "{}", flat, "c"))
    assert [first[key] == second[key] for key in (1, 2, 3)] == [True, True, False]
    third = write(2, (1, "{ }", square, "a"), (2, "{}", square, ""), (3, "{}", flat, "c"))
    assert [second[key] == third[key] for key in (1, 2, 3)] == [False, False, True]


def test_a_unique_index_of_a_partition_alone_is_no_key(place, some):
    place.sql(f"CREATE TABLE {place.schema}.orders (id bigint, name text) PARTITION BY LIST (name)")
    place.sql(f"CREATE TABLE {place.schema}.one PARTITION OF {place.schema}.orders DEFAULT")
    place.sql(f"CREATE UNIQUE INDEX ON {place.schema}.one (id)")
    with pytest.raises(Misconfigured, match="of a partition alone"):
        place.life(mode="upsert", keys="id").start(some(1))


@pytest.mark.parametrize(
    "key", ["bigint GENERATED ALWAYS AS IDENTITY", "bigint GENERATED ALWAYS AS (n * 10) STORED"]
)
def test_a_key_that_the_server_makes_may_be_updated_by(place, key):
    place.sql(f"CREATE TABLE {place.schema}.orders (id {key} PRIMARY KEY, n bigint, name text)")
    place.sql(f"INSERT INTO {place.schema}.orders (n) VALUES (1), (2)")
    (first,), _ = place.rows(columns="id")
    rows = pa.table({"id": pa.array([first], pa.int64()), "name": ["new"]})
    place.life(mode="update", keys="id").write(0, rows)
    assert place.rows(columns="n, name") == [(1, "new"), (2, None)]
    with pytest.raises(Misconfigured, match=r"generated by the server|GENERATED ALWAYS"):
        place.life(mode="upsert", keys="id", name="inserts").start(rows)


def test_a_table_may_be_emptied_by_truncate(orders, some):
    life = orders.life(mode="complete", truncate=True)
    life.write(0, some(1, 2))
    receipts = [life.prepare(some(3), 1)]
    life.rehearse(1, receipts)
    life.committer.abort(1, receipts)
    assert orders.rows(columns="id") == [(1,), (2,)]
    life.write(1, some(4))
    assert orders.rows(columns="id") == [(4,)]
    with pytest.raises(Misconfigured, match="truncate with mode='append'"):
        orders.sink(truncate=True)
    found = {one.name: one for one in life.committer.check(some(1).schema)}
    assert "TRUNCATE makes readers wait" in found["readers at any time"].because


def test_a_table_that_others_refer_to_is_not_emptied_by_truncate(keyed, some):
    keyed.sql(f"CREATE TABLE {keyed.schema}.items (id bigint REFERENCES {keyed.schema}.orders)")
    with pytest.raises(Misconfigured, match=r"foreign keys of .*items refer to"):
        keyed.life(mode="complete", truncate=True).start(some(1))


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
