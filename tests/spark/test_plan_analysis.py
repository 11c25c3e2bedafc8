"""Which plans are proven to keep nothing between epochs."""

from __future__ import annotations

import pytest
from pyspark.sql import DataFrame, functions
from spark_stage import Source

from epochal.spark.plan_analysis import UNKNOWN_PLAN, PlanFacts, facts_in, facts_of, is_stateless

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


JOINS = {"looked up", "looked up in an aggregate"}
"""Of a join the text does not say how many of its sides are streams."""


def _explained(df: DataFrame) -> str:
    """As Spark Connect shows a plan, by the same code of Spark."""
    execution = df._jdf.queryExecution()
    modes = df.sparkSession._jvm.org.apache.spark.sql.execution.ExplainMode
    return str(execution.explainString(modes.fromString("extended")))


@pytest.mark.compat
@pytest.mark.parametrize("name", [*STATELESS, *STATEFUL])
def test_the_text_of_a_plan_proves_the_same_as_the_plan(source: Source, name: str) -> None:
    df = {**STATELESS, **STATEFUL}[name](source.stream)
    found = facts_in(_explained(df))
    assert found == (UNKNOWN_PLAN if name in JOINS else facts_of(df))


@pytest.mark.parametrize(
    "text",
    [
        "a\n\n== Optimized Logical Plan ==\nProject",
        "a\n== Analyzed Logical Plan ==\nx\nProject",
        "a\n+- Aggregate",
        "a\nProject [id]\nstate",
    ],
)
def test_text_within_a_query_hides_no_state(source: Source, text: str) -> None:
    counted = source.stream.groupBy("id").count().withColumn("v", functions.lit(text))
    assert facts_in(_explained(counted)) == UNKNOWN_PLAN


def test_a_plan_that_is_cut_short_proves_nothing(source: Source) -> None:
    whole = _explained(source.stream.where("id > 1"))
    assert facts_in(whole) == PlanFacts(is_stateless=True, is_narrow=True)
    for end in range(0, whole.index("== Physical Plan =="), 7):
        assert facts_in(whole[:end]) == UNKNOWN_PLAN
