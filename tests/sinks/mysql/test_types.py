"""Every Spark type arrives as it was sent, or is refused with its row: nothing is cut."""

from __future__ import annotations

import datetime as dt
import json
import re
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest

from column_types_page import ARRIVING, MYSQL, mysql_verdict
from epochal.errors import Misconfigured, RowRejected
from epochal.sinks.memory import Memory

BOTH = pytest.mark.parametrize("strategy", ["staged", "prepared"])
UTC = dt.UTC


def local(*parts: int) -> dt.datetime:
    """A timestamp without a zone."""
    return dt.datetime(*parts, tzinfo=UTC).replace(tzinfo=None)


NESTED = pa.struct([("a", pa.int32()), ("b", pa.list_(pa.string()))])
CASES = [
    ("boolean", "tinyint(1)", pa.bool_(), [True, False], [1, 0]),
    ("bit", "bit(1)", pa.bool_(), [True, False], [b"\x01", b"\x00"]),
    ("byte", "tinyint", pa.int8(), [-128, 127], None),
    ("short", "smallint", pa.int16(), [-(2**15), 2**15 - 1], None),
    ("int", "int", pa.int32(), [-(2**31), 2**31 - 1], None),
    ("long", "bigint", pa.int64(), [-(2**63), 2**63 - 1], None),
    ("unsigned", "bigint unsigned", pa.uint64(), [0, 2**64 - 1], None),
    ("float", "float", pa.float32(), [0.1, -16777216.0], [0.1, -16777200.0]),
    ("double", "double", pa.float64(), [0.1, -1.7976931348623157e308, 5e-324], None),
    (
        "decimal",
        "decimal(38,18)",
        pa.decimal128(38, 18),
        [Decimal("12345678901234567890.123456789012345678"), Decimal("-0.000000000000000001")],
        None,
    ),
    ("string", "longtext", pa.string(), ["", "a\tb\nc\\d'e\"\0\r世🌍", "\\N", "\\"], None),
    ("binary", "longblob", pa.binary(), [b"", bytes(range(256)), b"\\N\t\n"], None),
    ("date", "date", pa.date32(), [dt.date(1582, 10, 15), dt.date(9999, 12, 31)], None),
    (
        "instant",
        "timestamp(6) NULL",
        pa.timestamp("us", "UTC"),
        [dt.datetime(2026, 3, 29, 1, 30, 0, 123456, UTC)],
        [local(2026, 3, 29, 1, 30, 0, 123456)],
    ),
    (
        "zoned",
        "datetime(6)",
        pa.timestamp("us", "Europe/Berlin"),
        [dt.datetime(1890, 1, 1, 0, 0, 0, 1, UTC)],
        [local(1890, 1, 1, 0, 0, 0, 1)],
    ),
    ("timestamp", "datetime(6)", pa.timestamp("us"), [local(2026, 1, 1, 0, 0, 0, 7)], None),
    ("interval", "bigint", pa.duration("us"), [dt.timedelta(days=-1)], [-86_400_000_000]),
    ("array", "json", pa.list_(pa.int32()), [[1, None], []], ["[1,null]", "[]"]),
    ("struct", "json", NESTED, [{"a": 1, "b": ["x\t\\"]}], ['{"a":1,"b":["x\\t\\\\"]}']),
    (
        "map",
        "longtext",
        pa.map_(pa.string(), pa.int64()),
        [[("k", 1)]],
        ['{"k":1}'],
    ),
]


def same(kind: str, found: object) -> object:
    return json.dumps(json.loads(found), separators=(",", ":")) if kind == "json" else found


@BOTH
def test_every_spark_type_arrives_as_it_was_sent_with_nulls(place, strategy):
    columns = ", ".join(f"`{name}` {ddl}" for name, ddl, *_ in CASES)
    place.sql(f"CREATE TABLE {place.schema}.orders (n int, {columns})")
    longest = max(len(values) for *_, values, _ in CASES) + 1
    padded = [(c, [*c[3], *[None] * (longest - len(c[3]))]) for c in CASES]
    rows = pa.table(
        [pa.array(range(longest), pa.int32()), *(pa.array(v, c[2]) for c, v in padded)],
        names=["n", *(c[0] for c in CASES)],
    )
    place.life(strategy=strategy).write(0, rows)
    for (name, ddl, _, sent, wanted), _ in padded:
        found = [value for _, value in place.rows(columns=f"n, `{name}`")]
        expected = [*(sent if wanted is None else wanted), *[None] * (longest - len(sent))]
        shown = [None if v is None else same(ddl, v) for v in found]
        assert shown == expected, name


def test_a_float_keeps_all_its_bits(place):
    place.sql(f"CREATE TABLE {place.schema}.orders (id int, x float)")
    values = [0.1, 16777217.0, 1.1754944e-38, 3.4028235e38]
    rows = pa.table({"id": range(4), "x": pa.array(values, pa.float32())})
    place.life().write(0, rows)
    found = place.rows(columns="id, CAST(x AS double)")
    assert [x for _, x in found] == rows["x"].to_pylist()


def test_floats_keep_all_their_digits_in_a_decimal(place):
    doubles = [9007199254740991.0, 0.1, 123456789012345.67, -0.30000000000000004, 1e-20, 0.0]
    place.sql(f"CREATE TABLE {place.schema}.orders (id int, x decimal(38,20), y decimal(60,2))")
    large = [1e50, 123456789012345.67, 0.005, 1e-20, 2.5, -1e36]
    place.life().write(0, pa.table({"id": range(6), "x": doubles, "y": large}))
    found = place.rows()
    assert [x for _, x, _ in found] == [Decimal(repr(one)) for one in doubles]
    cents = [1e50, 123456789012345.67, "0.01", 0, 2.5, -1e36]
    assert [y for *_, y in found] == [Decimal(str(one)) for one in cents]


def test_columns_that_round_are_named_before_the_first_row(place):
    place.sql(
        f"CREATE TABLE {place.schema}.orders"
        " (a float, b decimal(10,2), c bigint, d double(10,2), e double(10,2))"
    )
    kinds = {"a": pa.float64(), "b": pa.float64(), "c": pa.int32(), "d": pa.float64()}
    schema = pa.schema({**kinds, "e": pa.int32()})
    (said,) = [one for one in place.life().committer.check(schema) if one.name == "exact values"]
    assert not said.granted
    assert said.because == (
        '"a": float keeps 24 bits, about 7 digits; "b": decimal(10,2) rounds to its scale; '
        '"d": double(10,2) rounds to its scale'
    )


EDGES: dict[str, list[object]] = {
    "boolean": [True, False],
    "tinyint": [-128, 127, 70],
    "smallint": [-32768, 32767, 2026],
    "int": [16777217, 2147483647, 5],
    "bigint": [9007199254740993, 16777217, 5],
    "float": [0.1, 1.0000001, 16777216.0, 5.0, 1.005],
    "double": [0.1, 1.0000000000000002, 123456.789, 5.0],
    "decimal(6,0)": [Decimal(999999), Decimal(5)],
    "decimal(10,2)": [Decimal("12345678.91"), Decimal("1.25")],
    "decimal(38,18)": [Decimal("1.005000000000000001"), Decimal(5)],
    "string": [
        *("5", "1.005", "16777217", "9007199254740993", "2026-01-31", "2026-01-31 12:00:00"),
        *("2026-01-31 12:00:00.123456", "12:00:00.5", "a", "b", "70", "2026", "x" * 90),
    ],
    "binary": [b"\x00\xff", b"abcd"],
    "date": [dt.date(2026, 1, 31)],
    "timestamp": [dt.datetime(2026, 1, 31, 12, 0, 0, 123456, UTC)],
    "timestamp_ntz": [local(2026, 1, 31, 12, 0, 0, 123456)],
    "interval day to second": [dt.timedelta(days=1, microseconds=1)],
    "array<int>": [[1, None]],
    "array<double>": [[1.005]],
    "array<string>": [["1.005"]],
    "struct": [{"a": 1}],
}
"""Values that some column would round or cut."""
PART = re.compile(r"\d{4}-\d\d-\d\d|\d\d:\d\d:\d\d|\.\d+")
MOMENTS = {"date", "time", "datetime", "timestamp"}
NUMBERS = {"tinyint", "smallint", "int", "bigint", "float", "double", "decimal", "year"}


def is_changed(  # noqa: PLR0911  one per family
    arriving: str, kind: str, given: object, stored: object
) -> bool:
    """Whether a column of this type stores another value than it was given."""
    if isinstance(given, float) and kind in {"float", "double"}:
        as_given = np.float32 if arriving == "float" else np.float64
        return bool(as_given(given) != as_given(stored))
    if isinstance(given, bytes):
        return stored != given
    if isinstance(given, str) and kind in MOMENTS:
        return not all(part in str(stored) for part in PART.findall(given))
    if kind in MOMENTS or isinstance(given, dt.date):
        return not str(stored).startswith(str(given).removesuffix("+00:00"))
    if isinstance(given, str) and kind not in NUMBERS:
        return kind in {"char", "varchar", "text", "enum"} and stored != given
    if isinstance(given, list | dict | dt.timedelta) or kind == "bit":
        return False
    number = int(given) if isinstance(given, bool) else given
    return Decimal(str(stored)) != Decimal(str(number))


def changes(place, table: str, arriving: str, columns: list[str]) -> dict[str, set[bool]]:
    """Of values at the edges that columns take: whether they store others."""
    shown = {one: f"c{number}" for number, one in enumerate(columns)}
    ddl = ", ".join(f"{name} {one} NULL" for one, name in shown.items())
    place.sql(f"CREATE TABLE {place.schema}.{table} (id int, {ddl})")
    cells = [(column, value) for column in columns for value in EDGES[arriving]]
    rows = {
        shown[one]: pa.array([v if c == one else None for c, v in cells], ARRIVING[arriving])
        for one in columns
    }
    life = place.life(table, on_reject=Memory(name=f"bad {table}"))
    life.write(0, pa.table({"id": pa.array(range(len(cells)), pa.int32()), **rows}))
    found: dict[str, set[bool]] = {one: set() for one in columns}
    for column, name in shown.items():
        kind = MYSQL[column].data_type
        read = {"float": f"CAST({name} AS DOUBLE)"}.get(kind, name)
        read = f"CAST({name} AS CHAR)" if kind in MOMENTS else read
        for number, stored in place.rows(table, f"id, {read}"):
            if cells[number][0] == column:
                given = cells[number][1]
                found[column].add(is_changed(arriving, kind, given, stored))
    return found


def test_the_documented_table_of_types_is_what_the_server_does(place):
    wrong = []
    for number, (arriving, kind) in enumerate(ARRIVING.items()):
        verdicts = {column: mysql_verdict(kind, column) for column in MYSQL}
        taking = [one for one in MYSQL if verdicts[one] != "refused"]
        for column, changed in changes(place, f"t{number}", arriving, taking).items():
            if (True in changed) != (verdicts[column] == "rounded"):
                wrong.append((arriving, column, verdicts[column], changed))
    assert wrong == [], "\n".join(map(str, wrong))


REFUSED = [
    ("varchar(3)", pa.array(["abc", "abcd"]), r"row 1 .*Data too long|row 1 .*[Tt]runcated"),
    ("varchar(3)", pa.array(["abc", "abc "]), "row 1"),
    ("tinyint", pa.array([1, 300], pa.int64()), r"row 1 .*Out of range"),
    ("decimal(5,2)", pa.array([Decimal("1.23"), Decimal("1.234")]), "row 1 .*truncated"),
    ("int", pa.array(["12", "12x"]), "row 1"),
    ("date", pa.array(["2026-01-31", "2026-02-31"]), "row 1"),
    ("date", pa.array(["2026-01-31", "2026-01-31 10:00:00"]), "row 1"),
    ("enum('a','b')", pa.array(["a", "c"]), "row 1"),
    ("double", pa.array([1.0, float("nan")]), 'row 1: field "x" is nan: MySQL has no NaN'),
    ("double", pa.array([1.0, float("-inf")]), 'row 1: field "x" is -inf'),
    ("int NOT NULL", pa.array([1, None], pa.int32()), 'row 1: field "x" is None: .*NOT NULL'),
    ("timestamp NOT NULL", pa.array([local(2026, 1, 1), None]), "row 1: .*NOT NULL"),
    (
        "datetime",
        pa.array([local(2026, 1, 1), local(2026, 1, 1, 0, 0, 0, 1)]),
        "row 1: .*truncate the second",
    ),
    ("datetime", pa.array(["2026-01-01 10:00", "2026-01-01 10:00:00.5"]), "truncate the second"),
    ("datetime(3)", pa.array(["2026-01-01 10:00:00.1230", "2026-01-01 10:00:00.1239"]), "row 1"),
    ("time(2)", pa.array(["10:00:00.55", "10:00:00.555"]), "row 1"),
    ("int", pa.array(["12.0", "1.5"]), "row 1: .*which would round it"),
    ("bigint", pa.array(["120", "12e-1"]), "row 1"),
    ("year", pa.array([2026, 70], pa.int32()), "row 1: .*adds a century"),
    ("year", pa.array(["2026", "5"]), "row 1: .*takes four digits"),
    ("year", pa.array(["2026", "2026-01-31"]), "row 1: .*takes four digits"),
    ("enum('a','1','o''b')", pa.array(["1", "2"]), "row 1: .*the place of a member"),
    ("set('a','b')", pa.array(["a,b", "3"]), "row 1: .*the place of a member"),
    ("bit(64)", pa.array([1, -1]), "row 1: .*has no sign"),
    ("binary(3)", pa.array([b"abc", b"ab"]), "row 1: .*fill it up with zeros"),
    ("datetime(6)", pa.array([2**50, 2**58], pa.timestamp("us")), "row 1 .*truncated"),
    ("date", pa.array([9, 2**24], pa.date32()), "row 1 .*truncated"),
    ("varchar(9) CHARACTER SET latin1", pa.array(["ä", "世"]), "row 1 .*Incorrect string value"),
]


@BOTH
def test_what_a_column_can_not_hold_is_refused_with_its_row_and_never_cut(place, strategy):
    for number, (ddl, values, message) in enumerate(REFUSED):
        table = f"t{number}"
        place.sql(f"CREATE TABLE {place.schema}.{table} (id int, x {ddl})")
        life = place.life(table, strategy=strategy)
        with pytest.raises(RowRejected, match=message):
            life.write(0, pa.table({"id": [1, 2], "x": values}))
        assert place.rows(table) == [], ddl
        good = pa.table({"id": [1], "x": values.slice(0, 1)})
        life.write(0, good)
        assert len(place.rows(table)) == 1, ddl


@pytest.fixture
def odd_settings(place):
    """Of the server, which new sessions have: no notes, other languages, and limits for people."""
    odd = {
        "sql_notes": 0,
        "lc_messages": "'de_DE'",
        "sql_safe_updates": 1,
        "max_join_size": 1,
        "sql_select_limit": 1,
    }
    before = [place.sql(f"SELECT @@global.{name}")[0][0] for name in odd]
    for name, value in odd.items():
        place.sql(f"SET GLOBAL {name} = {value}")
    yield
    for name, value in zip(odd, before, strict=True):
        place.sql(f"SET GLOBAL {name} = {value!r}")


@pytest.mark.products("mariadb", "mysql")
def test_settings_of_the_server_change_nothing(place, odd_settings):
    place.sql(f"CREATE TABLE {place.schema}.orders (id int PRIMARY KEY, x decimal(5,2))")
    options = {"mode": "upsert", "keys": "id"}
    rows = pa.table({"id": [1, 2, 3], "x": ["1.23", "1.234", "x"]})
    with pytest.raises(RowRejected, match=r"row 1 .*truncated"):
        place.life(**options).write(0, rows)
    life = place.life(**options, name="keeping", on_reject=Memory(name="bad orders"))
    for epoch in range(2):
        life.write(epoch, rows, rows.slice(0, 1).set_column(0, "id", pa.array([9])))
    assert [key for key, _ in place.rows()] == [1, 9]


def test_types_that_would_lose_something_are_refused_before_the_first_row(place):
    for number, (ddl, kind) in enumerate(
        [
            ("int", pa.float64()),
            ("int", pa.decimal128(5, 2)),
            ("date", pa.timestamp("us")),
            ("text", pa.binary()),
            ("datetime", pa.int64()),
            ("int", pa.bool_()),
        ]
    ):
        place.sql(f"CREATE TABLE {place.schema}.t{number} (x {ddl})")
        schema = pa.schema([pa.field("x", kind)])
        if (ddl, kind) == ("int", pa.bool_()):
            place.life(f"t{number}").committer.check(schema)
            continue
        with pytest.raises(Misconfigured, match="without loss"):
            place.life(f"t{number}").committer.check(schema)


def test_names_of_any_kind_are_quoted(place):
    odd = ["select", "Mixed Case", "back`tick", "100%", "日本", "a?b"]
    columns = ", ".join(f"`{name.replace('`', '``')}` int" for name in odd)
    place.sql(f"CREATE TABLE {place.schema}.`or``ders %s` ({columns}, PRIMARY KEY (`100%`))")
    life = place.life("`or``ders %s`", mode="upsert", keys=["100%"], order_by="select")
    life.write(0, pa.table({name: pa.array([n], pa.int32()) for n, name in enumerate(odd)}))
    assert place.sql(f"SELECT * FROM {place.schema}.`or``ders %s`") == [(0, 1, 2, 3, 4, 5)]
