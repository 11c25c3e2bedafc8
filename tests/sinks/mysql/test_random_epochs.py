"""Upserts, replaces and deletes with columns of many types do what single statements do."""

from __future__ import annotations

import datetime as dt
import itertools
from dataclasses import replace
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given
from kit.sql.random_epochs import BOUNDED, Column, check_epochs, epochs

pytestmark = pytest.mark.products("mariadb", "mysql")
MOMENT = dt.datetime.fromisoformat("2026-01-31T23:59:59.120000")
MOMENTS = [MOMENT + dt.timedelta(milliseconds=one) for one in (0, 1, 880)]
WORDS = ["ab", "AB", "ä", "a", "", "b"]
BLANKS = [*WORDS, "ab ", " ab"]
_numbers = itertools.count()


def literal(value: object) -> str:
    if isinstance(value, float):
        return f"{value!r} + 0e0"
    if isinstance(value, bytes):
        return f"x'{value.hex()}'"
    return str(value) if isinstance(value, int | Decimal) else f"'{value}'"


def column(ddl: str, arrow: pa.DataType, values: list) -> Column:
    return Column(ddl=ddl, arrow=arrow, literal=literal, values=values)


COLUMNS = [
    column("decimal(6,2)", pa.decimal128(6, 2), [Decimal("1.00"), Decimal("-0.01"), Decimal(0)]),
    column("decimal(12,2)", pa.float64(), [0.1, 1.006, 1.01, 16777216.0, 0.0]),
    column("decimal(6,2)", pa.string(), ["1", "1.00", "1e0"]),
    column("int", pa.int64(), [1, 2, -1]),
    column("bigint", pa.decimal128(9, 0), [Decimal(1), Decimal(2)]),
    column("bigint unsigned", pa.uint64(), [2**64 - 1, 2**64 - 2]),
    column("double", pa.float64(), [0.1, 0.10000000149011612, 1e300]),
    column("datetime(3)", pa.timestamp("us"), MOMENTS),
    column("timestamp(6)", pa.timestamp("us"), MOMENTS),
    column("date", pa.date32(), [MOMENT.date(), dt.date(1, 1, 1)]),
    column("time(3)", pa.time64("us"), [moment.time() for moment in MOMENTS]),
    column("varchar(4) COLLATE utf8mb4_bin", pa.string(), WORDS),
    column("varchar(4) COLLATE utf8mb4_general_ci", pa.string(), BLANKS),
    column("varchar(4) COLLATE {no_pad}", pa.string(), BLANKS),
    column("char(4) COLLATE utf8mb4_unicode_ci", pa.string(), BLANKS),
    column("varchar(4) CHARACTER SET latin1", pa.string(), WORDS),
    column("varchar(20)", pa.int32(), [9, 10, -1]),
    column("varbinary(4)", pa.binary(), [b"ab", b"AB", b"ab\0", b""]),
    column("enum('a','b')", pa.string(), ["a", "b", "B"]),
    column("year", pa.int32(), [1999, 2026]),
]


@BOUNDED
@given(drawn=epochs(COLUMNS, COLUMNS))
def test_random_epochs_do_what_single_statements_do(place, drawn):
    place.sql("SET time_zone = '+00:00'")
    no_pad = "utf8mb4_nopad_bin" if place.is_mariadb else "utf8mb4_0900_bin"
    key, value = (
        replace(one, ddl=one.ddl.format(no_pad=no_pad)) for one in (drawn.key, drawn.value)
    )
    drawn = replace(drawn, key=key, value=value)
    check_epochs(place, drawn, next(_numbers), "{0} <=> {1}")
