"""Types, both ways round: what Spark has, into what people's tables have."""

from __future__ import annotations

import datetime as dt
import decimal
import json
import math
import random
from dataclasses import replace

import pyarrow as pa
import pytest
from servers.postgres import running_server
from sinks.postgres.conftest import make_place

from epochal.errors import Misconfigured, RowRejected

D = decimal.Decimal
BOTH = pytest.mark.parametrize("strategy", ["staged", "prepared"])
UTC = dt.UTC
MOMENT = dt.datetime.fromisoformat("1969-12-31T23:59:59.999999")

EVERYTHING = {
    "boolean": ("boolean", pa.bool_(), [True, False]),
    "byte": ("smallint", pa.int8(), [-128, 127]),
    "short": ("smallint", pa.int16(), [-(2**15), 2**15 - 1]),
    "integer": ("integer", pa.int32(), [-(2**31), 2**31 - 1]),
    "long": ("bigint", pa.int64(), [-(2**63), 2**63 - 1]),
    "float": ("real", pa.float32(), [math.inf, -1.5]),
    "double": ("double precision", pa.float64(), [-math.inf, 5e-324]),
    "decimal": (
        "numeric(38,18)",
        pa.decimal128(38, 18),
        [D("-99999999999999999999.999999999999999999"), D("0.000000000000000001")],
    ),
    "string": ("text", pa.string(), ["", "naïve 😀 \t\n\\ \" '{}' \u202e"]),
    "binary": ("bytea", pa.binary(), [b"", bytes(range(256))]),
    "date": ("date", pa.date32(), [dt.date(1, 1, 1), dt.date(9999, 12, 31)]),
    "instant": ("timestamptz", pa.timestamp("us", "Europe/Berlin"), [MOMENT.replace(tzinfo=UTC)]),
    "wall": ("timestamp", pa.timestamp("us"), [MOMENT, dt.datetime.fromisoformat("9999-12-31")]),
    "time": ("time", pa.time64("us"), [dt.time(23, 59, 59, 999999)]),
    "duration": ("interval", pa.duration("us"), [dt.timedelta(days=-3, microseconds=7)]),
    "texts": ("text[]", pa.list_(pa.string()), [[], ["a,b", None, '"', "{}"]]),
    "longs": ("bigint[]", pa.list_(pa.int64()), [[1, None, 2**62]]),
    "decimals": ("numeric[]", pa.list_(pa.decimal128(38, 18)), [[D("1.5"), None]]),
    "instants": (
        "timestamptz[]",
        pa.list_(pa.timestamp("us", "UTC")),
        [[MOMENT.replace(tzinfo=UTC), None]],
    ),
    "map": ("jsonb", pa.map_(pa.string(), pa.int32()), [[("a", 1), ("b", None)], []]),
    "struct": (
        "jsonb",
        pa.struct([("x", pa.int32()), ("y", pa.list_(pa.string()))]),
        [{"x": 1, "y": ["é", None]}, {"x": None, "y": None}],
    ),
    "structs": ("json", pa.list_(pa.struct([("x", pa.int32())])), [[{"x": 1}, None]]),
    "nested": ("jsonb", pa.list_(pa.list_(pa.int32())), [[[1], [2, 3]]]),
}


def expected(name: str, value):
    return dict(value) if name == "map" and value is not None else value


@BOTH
def test_every_spark_type_arrives_as_it_was_sent(place, strategy):
    columns = ", ".join(f'"{name}" {column}' for name, (column, _, _) in EVERYTHING.items())
    place.sql(f"CREATE TABLE {place.schema}.orders (id int, {columns})")
    count = 1 + max(len(values) for _, _, values in EVERYTHING.values())
    sent = {
        name: pa.array([*values, *[None] * (count - len(values))], arrow)
        for name, (_, arrow, values) in EVERYTHING.items()
    }
    rows = pa.table({"id": pa.array(range(count), pa.int32()), **sent})
    place.life(strategy=strategy).write(0, rows)
    found = list(zip(*place.rows(), strict=True))[1:]
    for (name, (_, _, values)), stored in zip(EVERYTHING.items(), found, strict=True):
        padded = [*values, *[None] * (count - len(values))]
        assert list(stored) == [expected(name, value) for value in padded], name


@BOTH
def test_not_a_number_arrives(place, strategy):
    place.sql(f"CREATE TABLE {place.schema}.orders (f real, d double precision, n numeric)")
    nan = [math.nan]
    rows = pa.table({"f": pa.array(nan, pa.float32()), "d": nan, "n": nan})
    place.life(strategy=strategy).write(0, rows)
    assert all(math.isnan(value) for value in place.rows()[0])


@BOTH
def test_random_decimals_of_every_scale_arrive(place, strategy):
    chance = random.Random(7)
    for scale in (0, 1, 4, 5, 18, 37, 38):
        name = f"scale{scale}"
        place.sql(f"CREATE TABLE {place.schema}.{name} (id int, v numeric(38,{scale}))")
        values = [
            D(chance.randrange(-(10 ** chance.randint(1, 38)), 10 ** chance.randint(1, 38)))
            for _ in range(300)
        ]
        with decimal.localcontext(prec=60):
            values = [value.scaleb(-scale) for value in values]
        rows = pa.table(
            {
                "id": pa.array(range(300), pa.int32()),
                "v": pa.array(values, pa.decimal128(38, scale)),
            }
        )
        place.life(name, strategy=strategy).write(0, rows)
        assert [v for _, v in place.rows(name)] == values


TEXT_TARGETS = {
    "uuid": ("12345678-1234-1234-1234-1234567890AB", "12345678-1234-1234-1234-1234567890ab"),
    "mood": ("happy", "happy"),
    "inet": ("10.0.0.1/8", "10.0.0.1/8"),
    "cidr": ("10.0.0.0/8", "10.0.0.0/8"),
    "macaddr": ("08:00:2b:01:02:03", "08:00:2b:01:02:03"),
    "json": ('{"a": 1}', '{"a": 1}'),
    "jsonb": ('{"b":1,"a":[null]}', '{"a": [null], "b": 1}'),
    "positive": ("7", "7"),
    "short_name": ("abc", "abc"),
    "money": ("12.50", "$12.50"),
    "interval": ("1 day 02:00", "1 day 02:00:00"),
    "numeric(10,2)": ("12.345", "12.35"),
    "varchar(5)": ("abcde", "abcde"),
    "char(5)": ("abc", "abc  "),
    "bit(4)": ("1010", "1010"),
    "varbit": ("101", "101"),
    "date": ("2026-01-31", "2026-01-31"),
    "timestamptz": ("2026-01-31 09:30+01", "2026-01-31 08:30:00+00"),
    "point": ("(1,2)", "(1,2)"),
    "int4range": ("[1,5)", "[1,5)"),
    "tsvector": ("a b", "'a' 'b'"),
    "integer[]": ("{1,2}", "{1,2}"),
    "char(3)[]": ("{abc,def}", "{abc,def}"),
    "bit(3)[]": ("{101}", "{101}"),
    "codes": ("{abc,d}", '{abc,"d  "}'),
    "boolean": ("yes", "true"),
    "bytea": ("\\x6162", "\\x6162"),
}


@BOTH
def test_text_is_cast_to_the_type_of_its_column(place, strategy):
    place.sql("SET TimeZone = 'UTC'")
    place.sql(f"SET search_path = {place.schema}, public")
    place.sql("CREATE TYPE mood AS ENUM ('happy', 'sad')")
    place.sql("CREATE DOMAIN positive AS int CHECK (value > 0)")
    place.sql("CREATE DOMAIN short_name AS varchar(3)")
    place.sql("CREATE DOMAIN codes AS char(3)[]")
    columns = ", ".join(f'"{number}" {target}' for number, target in enumerate(TEXT_TARGETS))
    place.sql(f"CREATE TABLE orders ({columns})")
    names = [str(number) for number in range(len(TEXT_TARGETS))]
    given = {
        name: pa.array([text, None])
        for name, (text, _) in zip(names, TEXT_TARGETS.values(), strict=True)
    }
    place.life(strategy=strategy).write(0, pa.table(given))
    texts = ", ".join(f'concat("{name}"::text)' for name in names)
    stored, nulls = place.sql(f'SELECT {texts} FROM orders ORDER BY "0" NULLS LAST')
    for target, (_, wanted), found in zip(TEXT_TARGETS, TEXT_TARGETS.values(), stored, strict=True):
        assert found == wanted.rstrip(), target
    assert set(nulls) == {""}


ACROSS = [
    ("numeric(12,2)", pa.int32(), 5, D("5.00")),
    ("integer", pa.int64(), 5, 5),
    ("bigint", pa.int8(), 5, 5),
    ("integer", pa.decimal128(9, 0), D(5), 5),
    ("real", pa.float64(), 1.5, 1.5),
    ("double precision", pa.int32(), 5, 5.0),
    ("text", pa.int32(), 5, "5"),
    ("varchar(10)", pa.bool_(), True, "true"),
    ("timestamp", pa.date32(), dt.date(2026, 1, 1), dt.datetime.fromisoformat("2026-01-01")),
    ("timestamp", pa.timestamp("us", "UTC"), MOMENT.replace(tzinfo=UTC), MOMENT),
    ("timestamptz", pa.timestamp("us"), MOMENT, MOMENT.replace(tzinfo=UTC)),
    ("jsonb", pa.list_(pa.int32()), [1, None], [1, None]),
    ("uuid[]", pa.list_(pa.string()), ["0" * 32], ["0" * 8 + "-0000-0000-0000-" + "0" * 12]),
    ("money", pa.decimal128(9, 2), D("12.50"), "$12.50"),
    ("numeric", pa.uint64(), 2**64 - 1, D(2**64 - 1)),
    ("text", pa.dictionary(pa.int32(), pa.string()), "x", "x"),
    ("text", pa.large_string(), "x", "x"),
    ("bytea", pa.binary(3), b"abc", b"abc"),
]


@BOTH
def test_types_that_lose_nothing_are_taken(place, strategy):
    columns = ", ".join(f'"{number}" {column}' for number, (column, *_) in enumerate(ACROSS))
    place.sql(f"CREATE TABLE {place.schema}.orders ({columns})")
    rows = pa.table(
        {
            str(number): pa.array([given], arrow)
            for number, (_, arrow, given, _) in enumerate(ACROSS)
        }
    )
    place.life(strategy=strategy).write(0, rows)
    (found,) = place.rows()
    for (column, arrow, _, stored), value in zip(ACROSS, found, strict=True):
        assert (list(map(str, value)) if column == "uuid[]" else value) == stored, (column, arrow)


@BOTH
@pytest.mark.parametrize("case", ACROSS[1:6], ids=str)
def test_numbers_are_narrowed_and_widened_on_the_straight_way_too(place, strategy, case):
    column, arrow, given, stored = case
    place.sql(f"CREATE TABLE {place.schema}.orders (v {column})")
    place.life(strategy=strategy).write(0, pa.table({"v": pa.array([given], arrow)}))
    assert place.rows() == [(stored,)]


LOSING = [
    ("integer", pa.float64()),
    ("integer", pa.decimal128(9, 2)),
    ("boolean", pa.int32()),
    ("date", pa.timestamp("us")),
    ("text", pa.binary()),
    ("bytea", pa.int32()),
    ("uuid", pa.int64()),
    ("integer[]", pa.int32()),
    ("integer", pa.list_(pa.int32())),
    ("text", pa.list_(pa.int32())),
    ("integer[]", pa.list_(pa.float64())),
    ("composite", pa.map_(pa.string(), pa.string())),
    ("name", pa.string()),
    ('"char"', pa.string()),
    ("interval hour to minute", pa.duration("us")),
    ("interval year", pa.string()),
]


def test_types_that_would_lose_something_are_refused_before_the_first_row(place):
    place.sql(f"SET search_path = {place.schema}, public")
    place.sql("CREATE TYPE composite AS (x int)")
    columns = ", ".join(f"v{number} {column}" for number, (column, _) in enumerate(LOSING))
    place.sql(f"CREATE TABLE orders ({columns})")
    fields = [(f"v{number}", arrow) for number, (_, arrow) in enumerate(LOSING)]
    with pytest.raises(Misconfigured) as raised:
        place.life().committer.check(pa.schema(fields))
    for number in range(len(LOSING)):
        assert f'field "v{number}": ' in raised.value.message
    assert '.cast("string")' in raised.value.hint


FLOATS = {
    "numeric": [9007199254740991.0, 0.1, 123456789012345.67, 5e-324, -1.7976931348623157e308],
    "numeric(20,2)": [9007199254740991.0, 1234567.25],
}


@BOTH
@pytest.mark.parametrize("digits", [-15, 0, 3])
def test_floats_keep_all_their_digits_in_a_numeric(place, strategy, digits):
    """Whatever the role shows of a float by default."""
    url = f"{place.url()}?options=-c%20extra_float_digits%3D{digits}"
    for number, (column, doubles) in enumerate(FLOATS.items()):
        table, singles = f"t{number}", [1234567.0, 16777216.0, 0.25]
        place.sql(f"CREATE TABLE {place.schema}.{table} (v {column}, vs numeric[])")
        life = place.life(table, strategy=strategy, url=url)
        life.write(0, pa.table({"v": doubles, "vs": [[one] for one in doubles]}))
        life.write(
            1,
            pa.table(
                {
                    "v": pa.array(singles, pa.float32()),
                    "vs": pa.array([[]] * 3, pa.list_(pa.float32())),
                }
            ),
        )
        found = place.sql(f"SELECT v, vs FROM {place.schema}.{table}")
        assert [v for v, _ in found] == [D(repr(one)) for one in (*doubles, *singles)]
        assert [vs for _, vs in found] == [*([D(repr(one))] for one in doubles), [], [], []]


@BOTH
def test_a_double_that_is_too_large_for_a_real_is_refused_and_never_infinite(place, strategy):
    place.sql(f"CREATE TABLE {place.schema}.orders (v real)")
    with pytest.raises(RowRejected, match="out of range"):
        place.life(strategy=strategy).write(0, pa.table({"v": [1e300]}))


def test_columns_that_round_are_named_before_the_first_row(place):
    place.sql(f"CREATE TABLE {place.schema}.orders (a real, b numeric(10,2), c bigint)")
    schema = pa.schema([("a", pa.float64()), ("b", pa.decimal128(9, 4)), ("c", pa.int32())])
    (said,) = [one for one in place.life().committer.check(schema) if one.name == "exact values"]
    assert not said.granted
    assert said.because == (
        '"a": real keeps 24 bits, about 7 digits; "b": numeric(10,2) rounds to its scale'
    )
    unknown_rows = place.life().committer.check(None)
    assert "exact values" not in [one.name for one in unknown_rows]


@BOTH
def test_an_interval_that_is_finer_than_a_microsecond_is_refused(place, strategy):
    place.sql(f"CREATE TABLE {place.schema}.orders (v interval)")
    life = place.life(strategy=strategy)
    with pytest.raises(RowRejected, match="has nanoseconds"):
        life.write(0, pa.table({"v": pa.array([(0, 0, 1500)], pa.month_day_nano_interval())}))
    life.write(0, pa.table({"v": pa.array([(1, 2, 3000), None], pa.month_day_nano_interval())}))
    assert place.rows(columns="v::text") == [("1 mon 2 days 00:00:00.000003",), (None,)]


@BOTH
def test_a_number_that_does_not_fit_is_refused(place, strategy):
    place.sql(f"CREATE TABLE {place.schema}.orders (v integer)")
    life = place.life(strategy=strategy)
    with pytest.raises(RowRejected, match=r"out of range|not in range"):
        life.write(0, pa.table({"v": pa.array([1, 2**40], pa.int64())}))
    assert place.rows() == []


@BOTH
@pytest.mark.parametrize("column", ["varchar(3)", "char(3)", "short_name", "bit(3)", "three_bits"])
def test_a_string_that_is_too_long_is_refused_and_never_cut(place, strategy, column):
    place.sql(f"SET search_path = {place.schema}, public")
    place.sql("CREATE DOMAIN short_name AS varchar(3)")
    place.sql("CREATE DOMAIN three_bits AS bit(3)")
    place.sql(f"CREATE TABLE {place.schema}.orders (v {column})")
    with pytest.raises(RowRejected, match=r"too long|does not match"):
        place.life(strategy=strategy).write(0, pa.table({"v": ["101", "1010"]}))


@BOTH
@pytest.mark.parametrize("column", ["char(3)[]", "varchar(3)[]", "codes"])
def test_a_string_that_is_too_long_for_an_array_is_refused_and_never_cut(place, strategy, column):
    place.sql(f"SET search_path = {place.schema}, public")
    place.sql("CREATE DOMAIN codes AS char(3)[]")
    place.sql(f"CREATE TABLE {place.schema}.orders (v {column})")
    for name, rows in {"text": ["{abc,abcd}"], "list": [["abc", "abcd"]]}.items():
        with pytest.raises(RowRejected, match="too long"):
            place.life(strategy=strategy, name=name).write(0, pa.table({"v": rows}))


@BOTH
def test_a_nul_is_refused_with_its_column_and_row(orders, some, strategy):
    rows = some(*range(2500)).set_column(1, "name", [["x"] * 2345 + ["a\0b"] + ["x"] * 154])
    with pytest.raises(RowRejected, match='column "name", row 2345 holds the character NUL'):
        orders.life(strategy=strategy).write(0, rows)
    assert orders.leftovers() == []


def test_names_of_any_kind_are_quoted(place):
    table = f'{place.schema}."Order ""x"".y"'
    place.sql(
        f'CREATE TABLE {table} ("select" int PRIMARY KEY, "Mixed Case" text, "a.b%s{{}}!" int)'
    )
    sink = replace(
        place.sink(
            mode="upsert", keys="select", order_by="a.b%s{}", delete_when="\"op%{}\" = 'd%'"
        ),
        table=table,
        columns={"select": "select", "Mixed Case": "Mixed Case", "a.b%s{}": "a.b%s{}!"},
    )
    life = replace(place.life(), sink=sink)
    place.keep(life).write(
        0,
        pa.table(
            {
                "select": [1, 1, 2],
                "Mixed Case": ["x", "y", "z"],
                "a.b%s{}": [2, 3, 1],
                "op%{}": ["", "", "d%"],
            }
        ),
    )
    assert place.sql(f"SELECT * FROM {table}") == [(1, "y", 3)]


@pytest.fixture
def vectors(place):
    """A place with pgvector, which Debian's server lacks."""
    if place.sql("SELECT 1 FROM pg_available_extensions WHERE name = 'vector'"):
        yield place
        return
    with running_server() as newer, make_place(newer) as other:
        other.kind = place.kind
        yield other


def test_a_vector_takes_an_array(vectors):
    vectors.sql("CREATE EXTENSION IF NOT EXISTS vector")
    vectors.sql(f"CREATE TABLE {vectors.schema}.orders (v vector(2))")
    vectors.life().write(0, pa.table({"v": pa.array([[1.5, 2.0]], pa.list_(pa.float32()))}))
    assert vectors.rows(columns="v::text") == [("[1.5,2]",)]


def test_invalid_json_is_refused_by_the_row(place):
    place.sql(f"CREATE TABLE {place.schema}.orders (id int, v jsonb)")
    rows = pa.table({"id": pa.array([1, 2], pa.int32()), "v": ['{"a": 1}', "{nope"]})
    with pytest.raises(RowRejected, match=r'"id":2.*invalid input syntax for type json'):
        place.life().write(0, rows)
    good = json.dumps({"a": 1})
    place.life().write(1, pa.table({"id": pa.array([1], pa.int32()), "v": [good]}))
    assert place.rows() == [(1, {"a": 1})]
