"""A pipeline of Spark into a table: tasks in workers of their own, restarts, rows in the table."""

from __future__ import annotations

import pytest
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import BucketTransform, DayTransform
from pyiceberg.types import DecimalType, LongType, NestedField, StringType, TimestamptzType

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
