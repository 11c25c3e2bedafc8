"""Which plans are proven to keep nothing between epochs."""

from __future__ import annotations

import pytest
from pyspark.sql import DataFrame, functions
from spark_stage import Source

from epochal.spark.plan_analysis import is_stateless

STATELESS = {
    "rows": lambda df: df,
    "selected": lambda df: df.where("id > 1").selectExpr("id", "explode(array(1, 2)) AS n"),
    "looked up": lambda df: df.join(df.sparkSession.range(5), "id", "left"),
    "looked up in an aggregate": lambda df: df.join(_counted(df), "id"),
    "two streams": lambda df: df.union(df),
    "in arrow": lambda df: df.mapInArrow(lambda batches: batches, df.schema),
    "repartitioned": lambda df: df.repartition(3, "id"),
}
STATEFUL = {
    "counted": lambda df: df.groupBy("id").count(),
    "distinct": lambda df: df.dropDuplicates(["id"]),
    "limited": lambda df: df.limit(5),
    "two streams joined": lambda df: df.join(df.selectExpr("id", "v AS w"), "id"),
    "a watermark only": lambda df: _timed(df).withWatermark("at", "1 second"),
    "state below": lambda df: df.groupBy("id").count().where("count > 1"),
}


def _counted(df: DataFrame) -> DataFrame:
    return df.sparkSession.range(5).groupBy("id").count()


def _timed(df: DataFrame) -> DataFrame:
    return df.withColumn("at", functions.timestamp_seconds("id"))


@pytest.mark.compat
@pytest.mark.parametrize("name", [*STATELESS, *STATEFUL])
def test_only_what_is_known_to_keep_nothing_is_proven_stateless(source: Source, name: str) -> None:
    query = {**STATELESS, **STATEFUL}[name]
    assert is_stateless(query(source.stream)) is (name in STATELESS)
