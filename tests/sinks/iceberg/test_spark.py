"""A pipeline of Spark into a table: tasks in workers of their own, restarts, rows in the table."""

from __future__ import annotations

import pytest
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import BucketTransform, DayTransform
from pyiceberg.types import (
    DecimalType,
    ListType,
    LongType,
    NestedField,
    StringType,
    StructType,
    TimestamptzType,
)
from sinks.delta.delta_stage import rows as rows_of_delta

from epochal.sinks.delta import Delta
from epochal.sinks.files import Files, read_epochs
from epochal.spark.pipeline import Pipeline

TABLE = Schema(
    NestedField(1, "id", LongType()),
    NestedField(2, "at", TimestamptzType()),
    NestedField(3, "title", StringType()),
    NestedField(4, "price", DecimalType(18, 2)),
)
SPEC = PartitionSpec(
    PartitionField(2, 1000, DayTransform(), "day"), PartitionField(1, 1001, BucketTransform(2), "b")
)


@pytest.fixture
def sources(spark, tmp_path):
    """Rows in files, one batch at a time."""

    def add(number: int) -> None:
        rows = spark.range(number * 1000, number * 1000 + 1000, 1, 2).selectExpr(
            "id",
            "timestamp_seconds(1700000000 + id * 60) as at",
            "concat('order ', id) as title",
            "cast(id / 3 as decimal(18, 2)) as price",
        )
        rows.write.mode("append").parquet(str(tmp_path / "source"))

    return add


def test_a_stream_arrives_in_a_partitioned_table_once(spark, sources, warehouse, tmp_path):
    name = warehouse.create(TABLE, SPEC)
    for number in range(2):
        sources(number)
        stream = spark.readStream.schema("id long, at timestamp, title string, price decimal(18,2)")
        query = Pipeline("orders", sinks=[warehouse.sink(name)]).start(
            stream.parquet(str(tmp_path / "source")),
            checkpoint=str(tmp_path / "checkpoint"),
            availableNow=True,
        )
        query.awaitTermination()
    assert warehouse.ids(name) == list(range(2000))
    assert [one["epochal.epoch"] for one in warehouse.history(name)] == ["0", "1"]
    assert not warehouse.leftovers(name)
    assert spark.read.parquet(str(tmp_path / "source")).count() == 2000


def test_structs_that_are_null_arrive_though_their_fields_take_no_null(spark, warehouse, tmp_path):
    """As one side of an outer join, or Debezium's `before` of an insert."""
    before = StructType(
        NestedField(3, "x", LongType(), required=True),
        NestedField(4, "l", ListType(5, LongType(), element_required=True), required=True),
    )
    name = warehouse.create(Schema(NestedField(1, "id", LongType()), NestedField(2, "b", before)))
    inner = spark.sql("SELECT id, named_struct('x', id, 'l', array(id)) AS b FROM range(2)")
    rows = spark.range(0, 6, 1, 2).join(inner, "id", "left")
    assert not rows.schema["b"].dataType["x"].nullable
    sinks = [
        Files(str(tmp_path / "parquet"), name="files"),
        Delta(str(tmp_path / "delta"), create_table="if_missing", name="delta"),
        warehouse.sink(name, name="iceberg"),
    ]
    pipeline = Pipeline("outer", sinks=sinks)
    pipeline.write(rows, run="once", checkpoint=str(tmp_path / "checkpoint"))
    expected = [{"id": i, "b": {"x": i, "l": [i]} if i < 2 else None} for i in range(6)]
    for found in (
        read_epochs(str(tmp_path / "parquet")).to_table().to_pylist(),
        rows_of_delta(tmp_path / "delta"),
        warehouse.rows(name),
    ):
        assert sorted(found, key=lambda row: row["id"]) == expected
