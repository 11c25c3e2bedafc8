"""Batches by the plan of their query: the same rows and the same progress; and which are left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession, functions
from spark_stage import FILES_ARE_WRITTEN_BY, Source, ids, run_to_end

from epochal.sinks.files import Files, read_epochs
from epochal.sinks.memory import Memory
from epochal.spark import batch_plan
from epochal.spark import epoch as epoch_writer
from epochal.spark.pipeline import Pipeline
from epochal.terms import Limits

LIMITS = Limits(driver_rows_max=0)
EPOCHS, ROWS = 4, 10
OURS = ("spark.sql.adaptive.enabled", "spark.sql.parquet.outputTimestampType")
"""Settings that our jobs change."""
IS_KNOWN = FILES_ARE_WRITTEN_BY == "Spark"
"""Spark 3.5 lacks a part of it."""

Shape = Callable[[DataFrame], DataFrame]
Read = Callable[[], list[dict[str, Any]]]


def projected(rows: DataFrame) -> DataFrame:
    return rows.selectExpr("id", "concat(v, '!') AS v", "id % 3 = 0 AS third").where("id % 7 <> 3")


def by_python(rows: DataFrame) -> DataFrame:
    shout = functions.udf(lambda text: text.upper(), "string")
    return rows.select("id", shout("v").alias("v")).where("v <> 'V7'")


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Per epoch that was to be opened, whether it was; filled while a pipeline runs."""
    found: list[bool] = []
    real = batch_plan.opened

    def noted(batch: DataFrame, query: Any, epoch: int) -> DataFrame:
        rows = real(batch, query, epoch)
        found.append(rows is not batch)
        return rows

    monkeypatch.setattr(epoch_writer, "opened", noted)
    return found


@pytest.fixture
def rows(source: Source) -> Source:
    source.add_numbers(EPOCHS, rows=ROWS)
    return source


def expected(spark: SparkSession, source: Source, shape: Shape) -> list[dict[str, Any]]:
    """What Spark itself computes of all rows at once."""
    frame = shape(spark.read.schema(source.schema).json(str(source.folder)))
    return [row.asDict() for row in frame.collect()]


def by_id(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: row["id"])


def in_memory(folder: Path) -> tuple[Memory, Read]:
    sink = Memory()
    return sink, lambda: sink.rows().to_pylist()


def in_files(folder: Path) -> tuple[Files, Read]:
    return Files(folder), lambda: read_epochs(str(folder)).to_table().to_pylist()


@pytest.mark.compat
@pytest.mark.parametrize("shape", [projected, by_python])
@pytest.mark.parametrize("place", [in_memory, in_files])
def test_rows_and_progress_are_the_same(
    rows: Source, tmp_path: Path, batches: list[bool], shape: Shape, place: Any
) -> None:
    """Written by tasks in Python, and by Spark's own writer."""
    sink, read = place(tmp_path / "out")
    pipeline = Pipeline("numbers", [sink], limits=LIMITS)
    query = pipeline.start(shape(rows.stream), tmp_path / "checkpoint", availableNow=True)
    query.awaitTermination()
    assert by_id(read()) == by_id(expected(rows.spark, rows, shape))
    assert [one["numInputRows"] for one in query.recentProgress] == [ROWS] * EPOCHS
    # The first may come before the query is at hand.
    assert batches[-1] is IS_KNOWN


@pytest.mark.compat
def test_columns_become_rows_once(
    rows: Source, checkpoint: Path, tmp_path: Path, batches: list[bool]
) -> None:
    """Parquet is read by columns: one loop makes rows of them and hashes them."""
    parquet = tmp_path / "parquet"
    for number in range(EPOCHS):
        one = rows.spark.read.schema(rows.schema).json(str(rows.folder / f"{number:04d}.json"))
        one.coalesce(1).write.mode("append").parquet(str(parquet))
    reader = rows.spark.readStream.schema(rows.schema).option("maxFilesPerTrigger", 1)
    pipeline = Pipeline("numbers", [Files(tmp_path / "out")], limits=LIMITS)
    run_to_end(pipeline, reader.parquet(str(parquet)), checkpoint)
    assert by_id(read_epochs(str(tmp_path / "out")).to_table().to_pylist()) == rows.rows
    assert batches[-1] is IS_KNOWN


def aggregated(rows: DataFrame) -> DataFrame:
    return rows.groupBy("id").count()


def joined(rows: DataFrame) -> DataFrame:
    return rows.join(rows.sparkSession.range(EPOCHS * ROWS), "id")


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        (aggregated, {}),
        (joined, {}),
        (projected, {"select": lambda rows: rows.groupBy("id").count()}),
    ],
)
def test_plans_of_other_operators_are_left(
    rows: Source,
    checkpoint: Path,
    batches: list[bool],
    shape: Shape,
    options: dict[str, Any],
) -> None:
    sink = Memory(**options)
    pipeline = Pipeline("numbers", [sink], limits=LIMITS)
    mode = "update" if shape is aggregated else "append"
    run_to_end(pipeline, shape(rows.stream), checkpoint, outputMode=mode)
    wanted = expected(rows.spark, rows, shape)
    assert ids(sink) == sorted(row["id"] for row in wanted)
    assert not any(batches)


def test_no_job_on_an_opened_plan_is_planned_adaptively(
    rows: Source, checkpoint: Path, batches: list[bool]
) -> None:
    """It would wait for a stage that nobody computes. A subquery alone brings that about."""
    rows.spark.range(0, EPOCHS * ROWS, 2).createOrReplaceTempView("even")
    sink = Memory(where="id IN (SELECT id FROM even)")
    run_to_end(Pipeline("numbers", [sink], limits=LIMITS), projected(rows.stream), checkpoint)
    wanted = expected(rows.spark, rows, projected)
    assert ids(sink) == sorted(row["id"] for row in wanted if row["id"] % 2 == 0)
    assert batches[-1]


def spread(rows: DataFrame) -> DataFrame:
    return rows.repartition(8, "id")


@pytest.mark.compat
@pytest.mark.parametrize("place", [in_memory, in_files])
def test_every_epoch_of_a_query_is_planned_by_its_own_settings(
    rows: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Any
) -> None:
    """Those of our jobs are put back: without adaptive planning, a join would have 200 tasks."""
    sink, read = place(tmp_path / "out")
    found: list[tuple[str, dict[str, str]]] = []

    def noted(batch: DataFrame, query: Any, epoch: int) -> DataFrame:
        plan = query._jsq.streamingQuery().lastExecution().executedPlan()
        found.append((plan.nodeName(), {name: batch.sparkSession.conf.get(name) for name in OURS}))
        return batch_plan.opened(batch, query, epoch)

    monkeypatch.setattr(epoch_writer, "opened", noted)
    pipeline = Pipeline("numbers", [sink], limits=LIMITS)
    run_to_end(pipeline, spread(rows.stream), tmp_path / "checkpoint")
    assert len(by_id(read())) == EPOCHS * ROWS
    assert len(found) >= EPOCHS - 1
    assert found == found[:1] * len(found)


def test_a_load_is_planned_adaptively_as_its_user_has_it(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Of eight partitions with few rows Spark makes one, and so one file."""
    name = "spark.sql.shuffle.partitions"
    before = spark.conf.get(name)
    spark.conf.set(name, "8")
    try:
        frame = spark.range(1000).repartition("id").selectExpr("id", "id % 3 AS v")
        Pipeline("load", [Files(tmp_path / "out")], limits=LIMITS).write(
            frame, run="once", checkpoint=tmp_path / "checkpoint"
        )
    finally:
        spark.conf.set(name, str(before))
    assert read_epochs(str(tmp_path / "out")).to_table().num_rows == 1000
    assert len(list((tmp_path / "out").glob("*.parquet"))) == 1


def test_a_function_of_its_user_finds_its_settings_after_each_batch(
    rows: Source, tmp_path: Path
) -> None:
    before = {name: rows.spark.conf.get(name) for name in OURS}
    found: list[dict[str, str]] = []
    each = Pipeline("by hand", [Files(tmp_path / "by hand")]).each_batch(tmp_path / "checkpoint")

    def by_hand(batch: DataFrame, epoch: int) -> None:
        each(batch, epoch)
        found.append({name: batch.sparkSession.conf.get(name) for name in OURS})

    writer = rows.stream.writeStream.foreachBatch(by_hand).trigger(availableNow=True)
    writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start().awaitTermination()
    assert found == [before] * EPOCHS
