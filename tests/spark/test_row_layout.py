"""Spark lays rows out as bytes: the same bytes as the plain way, of every type and value."""

from __future__ import annotations

import datetime as dt
import math
import random
import string
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from row_layout_reference import laid_out

from epochal.sinks.memory import Memory
from epochal.sinks.postgres import Postgres
from epochal.spark import jvm_expressions
from epochal.spark.jvm_expressions import JvmExpressions
from epochal.spark.projection import arrow_schema
from epochal.spark.row_hash import fingerprint_of, row_hash
from epochal.spark.row_layout import packed

SINK = Postgres("postgresql://nobody@localhost/nothing", table="public.orders")
EARLY, LATE = dt.datetime(1, 1, 1), dt.datetime(9999, 12, 31, 23, 59, 59, 999999)  # noqa: DTZ001  of no zone
EDGES: dict[str, list[Any]] = {
    "boolean": [True, False],
    "tinyint": [-128, 127, 0],
    "smallint": [-(2**15), 2**15 - 1],
    "int": [-(2**31), 2**31 - 1, -1],
    "bigint": [-(2**63), 2**63 - 1, -1],
    "float": [math.inf, -0.0, 1.5e-45, math.nan],
    "double": [-math.inf, -0.0, 5e-324, math.nan],
    "decimal(18,2)": [Decimal("-9999999999999999.99"), Decimal("0.01"), Decimal(0)],
    "decimal(18,0)": [Decimal(10**18 - 1), Decimal(-1), Decimal(10_000)],
    "decimal(18,18)": [Decimal("-0.999999999999999999"), Decimal("1e-18")],
    "decimal(17,3)": [Decimal("12345678901234.567"), Decimal("-0.001")],
    "decimal(9,5)": [Decimal("-9999.99999"), Decimal("0.00010")],
    "decimal(4,4)": [Decimal("-0.9999"), Decimal("0.0001")],
    "decimal(1,0)": [Decimal(-9), Decimal(9)],
    "string": ["", "naïve 😀 \t\n\\\0", "x" * 70_000],
    "binary": [bytearray(), bytearray(range(256))],
    "date": [dt.date(1, 1, 1), dt.date(9999, 12, 31), dt.date(1999, 12, 31)],
    "timestamp_ntz": [EARLY, LATE],
}
INSTANTS = ["0001-01-01 00:00:00", "1969-12-31 23:59:59.999999", "9999-12-31 23:59:59.999999"]


def both_ways(frame: DataFrame) -> tuple[list[bytes], list[bytes]]:
    """The rows as Spark lays them out, and as Python does, both sorted."""
    schema = arrow_schema(SINK, frame.schema)
    layout = SINK.row_layout(schema, None)
    assert layout is not None
    there = packed(frame, SINK, schema, None, extra_column=None)
    assert there is not None
    # toArrow() came with Spark 4.
    table = pa.Table.from_batches(frame._collect_as_arrow()).cast(schema)
    here = [row for batch in table.to_batches() for row in laid_out(batch, layout)["row"]]
    sent = pa.Table.from_batches(there._collect_as_arrow())["row"].cast(pa.binary())
    return sorted(sent.to_pylist()), sorted(row.as_py() for row in here)


@pytest.mark.compat
def test_every_type_and_its_edges(spark: SparkSession) -> None:
    count = 1 + max(map(len, EDGES.values()))
    columns = [[*some, *[None] * (count - len(some))] for some in EDGES.values()]
    rows = [*zip(*columns, strict=True)]
    schema = ", ".join(f"c{place} {kind}" for place, kind in enumerate(EDGES))
    there, here = both_ways(spark.createDataFrame(rows, schema))
    assert len(there) == count
    assert there == here


@pytest.mark.compat
@pytest.mark.parametrize("zone", ["UTC", "America/St_Johns"])
def test_instants_are_those_of_utc_in_every_zone(spark: SparkSession, zone: str) -> None:
    before = spark.conf.get("spark.sql.session.timeZone")
    texts = ", ".join(f"(TIMESTAMP '{text} UTC')" for text in INSTANTS)
    spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        there, here = both_ways(spark.sql(f"SELECT * FROM VALUES {texts}, (NULL) AS t(at)"))
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)
    assert there == here


def test_random_rows(spark: SparkSession) -> None:
    chance = random.Random(11)
    kinds = [*(f"decimal({p},{chance.randint(0, p)})" for p in range(1, 19)), "string", "bigint"]

    def value(kind: str) -> Any:
        if chance.random() < 0.1:
            return None
        if kind == "string":
            return "".join(chance.choices(string.printable, k=chance.randint(0, 40)))
        if kind == "bigint":
            return chance.randrange(-(2**63), 2**63)
        precision, scale = map(int, kind[8:-1].split(","))
        digits = chance.randint(0, precision)
        return Decimal(chance.randrange(-(10**digits) + 1, 10**digits)).scaleb(-scale)

    rows = [tuple(map(value, kinds)) for _ in range(500)]
    schema = ", ".join(f"c{place} {kind}" for place, kind in enumerate(kinds))
    there, here = both_ways(spark.createDataFrame(rows, schema))
    assert there == here


def test_no_setting_of_sparks_makes_text_of_the_bytes(spark: SparkSession) -> None:
    spark.conf.set("spark.sql.function.concatBinaryAsString", "true")
    try:
        there, here = both_ways(
            spark.createDataFrame([(-(2**62), b"\xff\x00")], "n long, b binary")
        )
    finally:
        spark.conf.unset("spark.sql.function.concatBinaryAsString")
    assert there == here


def test_texts_of_several_collations(spark: SparkSession) -> None:
    there, here = both_ways(
        spark.sql("SELECT 'É' COLLATE UTF8_LCASE AS a, 'b' COLLATE UNICODE AS b, 'c' AS c")
    )
    assert there == here


def test_names_of_any_kind(spark: SparkSession) -> None:
    frame = spark.sql("SELECT 1 AS `a.b`, 'x' AS `tick``s`, 2L AS n")
    there, here = both_ways(frame)
    assert there == here


def test_the_hash_of_a_row_is_one_more_column(spark: SparkSession) -> None:
    frame = spark.sql("SELECT 1 AS n, 'x' AS `a.b`")
    schema = arrow_schema(SINK, frame.schema)
    there = packed(frame, SINK, schema, None, extra_column=row_hash(frame))
    assert there is not None
    ((_, hash_sum),) = there.collect()
    assert hash_sum % 2**64 == fingerprint_of(frame).hash_sum


def test_columns_cross_where_a_sink_or_a_type_wants_it_so(spark: SparkSession) -> None:
    plain, nested = spark.sql("SELECT 1 AS n"), spark.sql("SELECT array(1) AS n")
    by_case = spark.sql("SELECT 1 AS n, 2 AS N")
    for frame, sink in ((plain, Memory()), (nested, SINK), (by_case, SINK)):
        schema = arrow_schema(SINK, frame.schema)
        assert packed(frame, sink, schema, None, extra_column=None) is None


def test_columns_cross_where_spark_lacks_an_expression(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jvm_expressions, "_built", {})
    monkeypatch.setattr(JvmExpressions, "bytes_of", lambda self, _: self._expressions.No(1))
    frame = spark.sql("SELECT 1 AS n")
    assert packed(frame, SINK, arrow_schema(SINK, frame.schema), None, extra_column=None) is None


def test_an_expression_is_built_once_for_all_epochs(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    bytes_of = JvmExpressions.bytes_of
    monkeypatch.setattr(jvm_expressions, "_built", {})
    monkeypatch.setattr(
        JvmExpressions, "bytes_of", lambda self, column: made.append(1) or bytes_of(self, column)
    )
    for number in (1, 2):
        frame = spark.sql(f"SELECT {number} AS n")
        there, here = both_ways(frame)
        assert there == here
    assert len(made) == 1
