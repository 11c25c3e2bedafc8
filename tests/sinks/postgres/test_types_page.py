"""The page of types, against the server: its catalog, and values at the edges of each type."""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
import psycopg

from column_types_page import ARRIVING, POSTGRES, postgres_verdict
from epochal.kit.sql.names import TableName
from epochal.sinks.postgres.catalog import read_table
from epochal.sinks.postgres.types import Column, cast_between, sent_as

EDGES: dict[str, list[str]] = {
    "boolean": ["true", "false"],
    "tinyint": ["-128", "127"],
    "smallint": ["-32768", "32767"],
    "int": ["16777217", "2147483647", "5"],
    "bigint": ["9007199254740993", "16777217", "5"],
    "float": ["0.1", "1.0000001", "16777216", "5"],
    "double": ["0.1", "1.0000000000000002", "123456.789", "5"],
    "decimal(6,0)": ["999999", "5"],
    "decimal(10,2)": ["12345678.91", "1.25"],
    "decimal(38,18)": ["1.005000000000000001", "5"],
    "string": [
        *("5", "1.005", "16777217", "9007199254740993", "true", "\\x61", "0101", "null"),
        *("2026-01-31", "2026-01-31 12:00:00", "2026-01-31 12:00:00.123456", "12:00:00.5"),
        *("2026-01-31 12:00:00+02", "1 day 00:00:00.5", "10.0.0.1", "{1.005}", "0" * 32, "x" * 90),
    ],
    "binary": ["\\x00ff"],
    "date": ["2026-01-31"],
    "timestamp": ["2026-01-31 12:00:00.123456+00"],
    "timestamp_ntz": ["2026-01-31 12:00:00.123456"],
    "interval day to second": ["1 day 00:00:00.123456"],
    "array<int>": ["{1,NULL}"],
    "array<double>": ["{1.005}"],
    "array<string>": ["{1.005}", "{a}"],
    "struct": ['{"a": 1}'],
}
"""Values that some column would round or cut."""
NUMBERS = {"int2", "int4", "int8", "float4", "float8", "numeric", "money"}
MOMENTS = {"date", "time", "timestamp", "timestamptz", "interval"}
PART = re.compile(r"\d{4}-\d\d-\d\d|\d\d:\d\d:\d\d|\.\d+|\+02")


def is_changed(arriving: str, base: str, given: str, stored: str) -> bool:
    """Whether a column of this type stores another value than it was given."""
    given, stored = (one.rstrip().removesuffix("+00") for one in (given, stored))
    if arriving in {"float", "double"} and base in {"float4", "float8"}:
        kind = np.float32 if arriving == "float" else np.float64
        return bool(kind(given) != kind(stored))
    if base in NUMBERS or arriving in {"float", "double", "decimal(38,18)"}:
        pairs = zip(_numbers(given), _numbers(stored), strict=True)
        return any(one != other for one, other in pairs)
    if base in MOMENTS and arriving == "string":
        # A zone is what a timestamp without one can't keep.
        parts = set(PART.findall(given)) - ({"+02", "12:00:00"} if base == "timestamptz" else set())
        return not all(part in stored for part in parts)
    if base in MOMENTS:
        return not stored.startswith(given)
    return base in {"text", "varchar", "bpchar"} and stored != given


def _numbers(text: str) -> list[Decimal]:
    return [Decimal(one) for one in re.findall(r"[-+.\de]+", re.sub(r"NULL|[$,]", "", text))]


def changes(place, table: str, column: Column, arriving: str) -> set[bool]:
    """Of values at the edges that the column takes: whether it stores another."""
    sent, quoted = sent_as(ARRIVING[arriving]), f'"{column.name}"'
    cast = cast_between(sent.type, column.type)
    found = set()
    for text in EDGES[arriving]:
        with contextlib.suppress(psycopg.DataError):
            ((stored,),) = place.sql(
                f"INSERT INTO {table} ({quoted}) SELECT {cast.before}s.v{cast.after}"
                f" FROM (SELECT '{text}'::{sent.ddl} AS v) s RETURNING {quoted}::text"
            )
            found.add(is_changed(arriving, column.type.base, text, stored))
    return found


@dataclass
class _Asking:
    place: Any

    def query_all(self, statements: list[str]) -> list[list[tuple[Any, ...]]]:
        return [self.place.sql(one) for one in statements]


def test_the_documented_table_of_types_is_what_the_server_does(place):
    table = f"{place.schema}.everything"
    columns = ", ".join(f"{json.dumps(one.strip(chr(34)))} {one}" for one in POSTGRES)
    place.sql(f"SET TimeZone = 'UTC'; CREATE TABLE {table} ({columns})")
    found = read_table(_Asking(place), TableName(schema=place.schema, table="everything")).columns
    for (column, written), there in zip(POSTGRES.items(), found.values(), strict=True):
        same = ("base", "category", "typmod", "is_array")
        assert [getattr(there.type, one) for one in same] == [
            getattr(written, one) for one in same
        ], column
    wrong = []
    for column in POSTGRES:
        for arriving, kind in ARRIVING.items():
            verdict = postgres_verdict(kind, column)
            if verdict != "refused":
                changed = changes(place, table, found[column.strip('"')], arriving)
                if (True in changed) != (verdict == "rounded"):
                    wrong.append((arriving, column, verdict, changed))
    assert wrong == [], "\n".join(map(str, wrong))
