"""Upserts, replaces and deletes with columns of many types do what single statements do."""

from __future__ import annotations

import datetime as dt
import itertools
from decimal import Decimal

import pyarrow as pa
from hypothesis import given
from kit.sql.random_epochs import BOUNDED, Column, check_epochs, epochs

from epochal.sinks.postgres.types import sent_as

MOMENT = dt.datetime.fromisoformat("2026-01-31T23:59:59.499999")
MOMENTS = [MOMENT + dt.timedelta(microseconds=one) for one in (0, 1, 400, 500_001, 1_000_000)]
DECIMALS = [Decimal(one) for one in ("1.0000", "1.0049", "1.0050", "-0.0010", "0.0000", "9.9950")]
FLOATS = [0.1, 0.10000000149011612, 1.005, 16777216.0, 16777217.0, -0.0, 0.0]
BLANKS = ["ab", "ab ", "AB", "a", "", "abcd", " ab"]
SAME = "{0}::text IS NOT DISTINCT FROM {1}::text"
_numbers = itertools.count()


def column(ddl: str, arrow: pa.DataType, values: list) -> Column:
    natural = sent_as(arrow).ddl

    def literal(value: object) -> str:
        # A float has no scale: "1.0" would give one to a numeric column without its own.
        written = repr(value).removesuffix(".0") if isinstance(value, float) else str(value)
        return f"'{written}'" if is_read else f"'{written}'::{natural}"

    # Text is read by the server; so are floats, as the cast to numeric would drop digits.
    is_read = natural == "text" or (pa.types.is_floating(arrow) and "numeric" in ddl)
    return Column(ddl=ddl, arrow=arrow, literal=literal, values=values)


COLUMNS = [
    column("numeric(6,2)", pa.decimal128(8, 4), DECIMALS),
    column("numeric(12,2)", pa.float64(), FLOATS),
    column("numeric", pa.float32(), [0.1, 0.25, 16777216.0]),
    column("numeric(6,2)", pa.string(), ["1.004", "1.00", " 1.0 ", "1e0"]),
    column("price", pa.decimal128(8, 4), DECIMALS[:3]),
    column("real", pa.float64(), FLOATS),
    column("double precision", pa.float32(), FLOATS[:2]),
    column("double precision", pa.int64(), [2**53, 2**53 + 1, 1]),
    column("integer", pa.int64(), [1, 2, -1]),
    column("bigint", pa.decimal128(9, 0), [Decimal(1), Decimal(2)]),
    column("timestamp(0)", pa.timestamp("us"), MOMENTS),
    column("timestamptz(3)", pa.timestamp("us"), MOMENTS),
    column("time(2)", pa.time64("us"), [moment.time() for moment in MOMENTS[:3]]),
    column("interval(0)", pa.duration("us"), [dt.timedelta(microseconds=n) for n in (0, 1, 10**6)]),
    column("date", pa.date32(), [MOMENT.date()]),
    column("char(4)", pa.string(), BLANKS),
    column("varchar(4)", pa.string(), BLANKS),
    column("code", pa.string(), BLANKS),
    column("text", pa.string(), BLANKS),
    column("text", pa.int32(), [9, 10]),
    column("uuid", pa.string(), ["AB" * 16, "ab" * 16, "{" + "0" * 32 + "}"]),
    column("char(2)[]", pa.list_(pa.string()), [["a"], ["a "], ["b"]]),
]


def _list_literal(value: list[str]) -> str:
    return f"ARRAY[{', '.join(repr(one) for one in value)}]::text[]"


COLUMNS[-1] = Column(
    ddl="char(2)[]",
    arrow=pa.list_(pa.string()),
    literal=_list_literal,
    values=COLUMNS[-1].values,
)
FOLDED = [
    column("citext", pa.string(), BLANKS),
    column("folded_text", pa.string(), BLANKS),
]


def make_types(place) -> None:
    place.sql(f"SET search_path = {place.schema}, public")
    place.sql("SET TimeZone = 'UTC'")
    place.sql("CREATE DOMAIN amount AS numeric(6,2)")
    place.sql("CREATE DOMAIN price AS amount CHECK (value < 1000)")
    place.sql("CREATE DOMAIN code AS char(4)")


@BOUNDED
@given(drawn=epochs(COLUMNS, COLUMNS))
def test_random_epochs_do_what_single_statements_do(place, drawn):
    number = next(_numbers)
    if not place.sql("SELECT 1 FROM pg_type WHERE oid = to_regtype('code')"):
        make_types(place)
    check_epochs(place, drawn, number, SAME)


@BOUNDED
@given(drawn=epochs([*FOLDED, *COLUMNS], COLUMNS))
def test_random_epochs_do_what_single_statements_do_on_an_older_server(older, drawn):
    number = next(_numbers)
    if not older.sql("SELECT 1 FROM pg_type WHERE oid = to_regtype('folded_text')"):
        make_types(older)
        older.sql(
            "CREATE COLLATION folded (provider = icu, locale = 'und-u-ks-level2',"
            " deterministic = false)"
        )
        older.sql("CREATE DOMAIN folded_text AS text COLLATE folded")
    check_epochs(older, drawn, number, SAME)
