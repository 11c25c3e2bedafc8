"""Rows cross to Python in another form than they have, and arrive as they were."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from spark_stage import run_to_end

from epochal.sinks.memory import Memory
from epochal.spark.arrow_transfer import as_declared, for_transfer
from epochal.spark.pipeline import Pipeline
from epochal.spark.row_hash import fingerprint_of
from epochal.terms import Fingerprint

SCHEMA = (
    "`a.price` decimal(18,2), whole decimal(5,0), `part``s` decimal(18,18), wide decimal(19,2),"
    " widest decimal(38,18), kept array<decimal(9,2)>, n bigint"
)
VALUES: list[tuple[Any, ...]] = [
    (
        Decimal("9999999999999999.99"),
        Decimal(99999),
        Decimal("0.999999999999999999"),
        Decimal("99999999999999999.99"),
        Decimal("99999999999999999999.999999999999999999"),
        [Decimal("1.50"), None],
        1,
    ),
    (
        Decimal("-9999999999999999.99"),
        Decimal(-99999),
        Decimal("-0.999999999999999999"),
        Decimal("-0.01"),
        Decimal("-0.000000000000000001"),
        [],
        2,
    ),
    (Decimal("0.00"), Decimal(0), Decimal(0), Decimal(0), Decimal(0), None, 3),
    (None, None, None, None, None, None, None),
]


@pytest.mark.compat
def test_short_decimals_cross_as_longs_and_arrive_as_decimals(
    spark: SparkSession, checkpoint: Path, tmp_path: Path
) -> None:
    frame = spark.createDataFrame(VALUES, SCHEMA)
    crossing = for_transfer(frame, frame.schema).schema
    longs = ["bigint"] * 3
    assert [field.dataType.simpleString() for field in crossing] == [
        *longs,
        "decimal(19,2)",
        "decimal(38,18)",
        "array<decimal(9,2)>",
        "bigint",
    ]
    frame.repartition(2).write.parquet(str(tmp_path / "rows"))
    sink = Memory()
    prints: list[Fingerprint] = []
    gates = [lambda epoch: prints.extend(one.fingerprint for one in epoch.receipts("memory"))]
    stream = spark.readStream.schema(frame.schema).parquet(str(tmp_path / "rows"))
    run_to_end(Pipeline("decimals", [sink], gates), stream, checkpoint)
    arrived = sink.rows()
    assert [str(field.type) for field in arrived.schema][:3] == [
        "decimal128(18, 2)",
        "decimal128(5, 0)",
        "decimal128(18, 18)",
    ]
    assert _sorted([tuple(row.values()) for row in arrived.to_pylist()]) == _sorted(VALUES)
    assert sum(one.hash_sum or 0 for one in prints) % 2**64 == fingerprint_of(frame).hash_sum


def test_names_that_differ_by_case_alone_cross(spark: SparkSession) -> None:
    frame = spark.sql("SELECT CAST(1 AS decimal(9,2)) AS a, CAST(2 AS decimal(9,2)) AS A")
    assert for_transfer(frame, frame.schema).first()[:] == (100, 200)


def test_plain_columns_cross_as_they_are(spark: SparkSession) -> None:
    frame = spark.range(3)
    assert for_transfer(frame, frame.schema) is frame


def test_a_slice_of_longs_becomes_its_decimals() -> None:
    declared = pa.schema([pa.field("price", pa.decimal128(18, 2))])
    longs = pa.array([1, None, -250, 7], pa.int64()).slice(1, 2)
    assert as_declared([longs], declared)["price"].to_pylist() == [None, Decimal("-2.50")]


def _sorted(rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return sorted(rows, key=lambda row: row[-1] or 0)
