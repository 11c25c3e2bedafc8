"""Rows that come as bytes: what is laid out, and that PostgreSQL reads it as it was meant."""

from __future__ import annotations

import datetime as dt
import math
import random
from decimal import Decimal

import psycopg
import pyarrow as pa
import pytest
from sinks.life import Life
from sinks.postgres.packed import PackedPostgres

from epochal.contract import Begin
from epochal.errors import RowRejected
from epochal.sinks.postgres import Postgres

D = Decimal
BOTH = pytest.mark.parametrize("strategy", ["staged", "prepared"])
EARLY, LATE = dt.datetime(1, 1, 1), dt.datetime(9999, 12, 31, 23, 59, 59, 999999)  # noqa: DTZ001  of no zone
LAID_OUT = {
    "boolean": ("boolean", pa.bool_(), [True, False]),
    "byte": ("smallint", pa.int8(), [-128, 127]),
    "short": ("smallint", pa.int16(), [-(2**15), 2**15 - 1]),
    "wider": ("bigint", pa.int16(), [-(2**15), 2**15 - 1]),
    "integer": ("integer", pa.int32(), [-(2**31), 2**31 - 1]),
    "long": ("bigint", pa.int64(), [-(2**63), 2**63 - 1]),
    "float": ("real", pa.float32(), [math.inf, -1.5]),
    "double": ("double precision", pa.float64(), [-math.inf, 5e-324]),
    "money": ("numeric(18,2)", pa.decimal128(18, 2), [D("-9999999999999999.99"), D("0.01")]),
    "whole": ("numeric", pa.decimal128(18, 0), [D(999999999999999999), D(-1)]),
    "part": ("numeric", pa.decimal128(18, 18), [D("-0.999999999999999999"), D("1e-18")]),
    "tiny": ("numeric", pa.decimal128(1, 0), [D(9), D(0)]),
    "string": ("text", pa.string(), ["", "naïve 😀 \t\n\\ \" '{}' \u202e"]),
    "short_text": ("varchar(3)", pa.string(), ["äöü", "a"]),
    "binary": ("bytea", pa.binary(), [b"", bytes(range(256))]),
    "date": ("date", pa.date32(), [dt.date(1, 1, 1), dt.date(9999, 12, 31)]),
    "wall": ("timestamp", pa.timestamp("us"), [EARLY, LATE]),
    "instant": (
        "timestamptz",
        pa.timestamp("us", "UTC"),
        [one.replace(tzinfo=dt.UTC) for one in (EARLY, LATE)],
    ),
}


@pytest.fixture
def packed(place):
    place.kind = PackedPostgres
    return place


def is_laid_out(life, rows: pa.Table) -> bool:
    return life.sink.row_layout(rows.schema, life.committer.begin(Begin(epoch=0))) is not None


@BOTH
def test_every_type_that_is_laid_out_arrives_as_it_was(packed, strategy):
    # In another order than the fields: those of a copy are named.
    columns = ", ".join(f'"{name}" {kind}' for name, (kind, _, _) in reversed(LAID_OUT.items()))
    packed.sql(f"CREATE TABLE {packed.schema}.orders (id int, {columns})")
    sent = {name: pa.array([*some, None], kind) for name, (_, kind, some) in LAID_OUT.items()}
    rows = pa.table({"id": pa.array(range(3), pa.int32()), **sent})
    life = packed.life(strategy=strategy)
    life.start(rows)
    assert is_laid_out(life, rows)
    life.write(0, rows)
    names = ", ".join(f'"{name}"' for name in LAID_OUT)
    found = zip(*packed.rows(columns=f"id, {names}"), strict=True)
    for (name, (_, _, some)), stored in zip(LAID_OUT.items(), list(found)[1:], strict=True):
        assert list(stored) == [*some, None], name


def test_random_decimals_arrive(packed):
    chance = random.Random(7)
    for precision in range(1, 19):
        scale = chance.randint(0, precision)
        values = [
            D(chance.randrange(-(10**digits) + 1, 10**digits)).scaleb(-scale)
            for digits in (chance.randint(1, precision) for _ in range(200))
        ]
        name, kind = f"p{precision}s{scale}", pa.decimal128(precision, scale)
        packed.sql(f"CREATE TABLE {packed.schema}.{name} (id int, v numeric)")
        rows = pa.table({"id": pa.array(range(200), pa.int32()), "v": pa.array(values, kind)})
        life = packed.life(name)
        life.start(rows)
        assert is_laid_out(life, rows)
        life.write(0, rows)
        stored = [value for _, value in packed.rows(name)]
        assert stored == values
        assert {value.as_tuple().exponent for value in stored} == {-scale}


def test_fields_go_to_the_columns_that_were_named_for_them(packed):
    packed.sql(f"CREATE TABLE {packed.schema}.orders (name text, id bigint, note text DEFAULT 'x')")
    rows = pa.table({"a": pa.array([1], pa.int64()), "b": ["one"], "unused": ["no"]})
    for epoch, strategy in enumerate(("staged", "prepared")):
        life = packed.life(strategy=strategy, columns={"a": "id", "b": "name"}, name=strategy)
        life.start(rows)
        assert is_laid_out(life, rows)
        life.write(epoch, rows)
    assert packed.rows() == [("one", 1, "x")] * 2


@pytest.mark.parametrize(
    ("column", "kind", "strategy"),
    [
        ("integer", pa.int64(), "prepared"),  # a value may not fit, and the row must be named
        ("numeric(38,0)", pa.decimal128(19, 0), "staged"),
        ("bigint[]", pa.list_(pa.int64()), "staged"),
        ("jsonb", pa.struct([("x", pa.int32())]), "staged"),
        ("interval", pa.duration("us"), "staged"),
    ],
)
def test_what_must_be_looked_at_first_comes_as_columns(packed, column, kind, strategy):
    packed.sql(f"CREATE TABLE {packed.schema}.orders (v {column})")
    rows = pa.table({"v": pa.array([None], kind)})
    life = packed.life(strategy=strategy)
    life.start(rows)
    assert not is_laid_out(life, rows)
    life.write(0, rows)
    assert packed.rows() == [(None,)]


@BOTH
def test_every_column_with_a_nul_is_named(packed, strategy):
    packed.sql(f"CREATE TABLE {packed.schema}.orders (id int, a text, raw bytea, b text)")
    rows = pa.table(
        {
            "id": pa.array([1, 2, 3], pa.int32()),
            "a": ["", None, "x\0"],
            "raw": [b"\0", b"\0", None],
            "b": ["", "\0", "\0"],
        }
    )
    life = packed.life(strategy=strategy)
    life.start(rows)
    with pytest.raises(RowRejected, match='column "b", row 1; column "a", row 2 holds') as raised:
        life.prepare(rows, 0)
    assert '"raw"' not in str(raised.value)
    assert packed.leftovers() == []


@pytest.mark.parametrize("kind", [Postgres, PackedPostgres])
@BOTH
def test_text_is_the_same_in_a_database_of_another_encoding(place, kind, strategy):
    place.sql(
        f"CREATE DATABASE {place.schema} ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C'"
        " TEMPLATE template0"
    )
    try:
        url = place.url().rpartition("/")[0] + f"/{place.schema}"
        with psycopg.connect(url, client_encoding="utf8") as there:
            there.execute("CREATE TABLE public.orders (name text)")
            there.commit()
            sink = kind(url, table="public.orders", strategy=strategy, pool_min=1)
            life = Life(sink=sink)
            life.write(0, pa.table({"name": ["naïve"]}))
            life.close()
            assert there.execute("SELECT name FROM public.orders").fetchall() == [("naïve",)]
    finally:
        place.sql(f"DROP DATABASE {place.schema} WITH (FORCE)")
