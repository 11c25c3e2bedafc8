"""
Files into an Iceberg table: one snapshot per epoch, and no file twice after a crash.

The catalog is a SQLite file and the warehouse a folder; with a REST or Glue catalog only the
properties change.
"""

from __future__ import annotations

import os

from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import DateType, LongType, NestedField, StringType
from pyspark.sql import DataFrame, SparkSession

import epochal as ep

TABLE = "web.events"


def properties(folder: str) -> dict[str, str]:
    return {
        "type": "sql",
        "uri": f"sqlite:///{folder}/catalog.db",
        "warehouse": f"file://{folder}/warehouse",
    }


def make_table(catalog: Catalog) -> None:
    catalog.create_namespace_if_not_exists("web")
    schema = Schema(
        NestedField(1, "id", LongType()),
        NestedField(2, "day", DateType()),
        NestedField(3, "page", StringType()),
    )
    by_day = PartitionSpec(PartitionField(2, 1000, IdentityTransform(), "day"))
    catalog.create_table_if_not_exists(TABLE, schema=schema, partition_spec=by_day)


def events(spark: SparkSession, folder: str) -> DataFrame:
    schema = "id BIGINT, day DATE, page STRING"
    return spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).json(folder)


def run(spark: SparkSession) -> None:
    folder = os.environ["FOLDER"]
    catalog = load_catalog("lake", **properties(folder))
    make_table(catalog)
    sink = ep.Iceberg("lake", table=TABLE, properties=properties(folder), snapshots_kept=100)
    declared = ep.Pipeline("events", sinks=[sink])
    query = declared.start(
        events(spark, os.environ["INPUT"]), checkpoint=f"{folder}/chk", availableNow=True
    )
    query.awaitTermination()
    print(declared)
    table = catalog.load_table(TABLE)
    for snapshot in table.snapshots():
        print(f"snapshot {snapshot.snapshot_id}: {snapshot.summary}")
    for row in table.scan().to_arrow().sort_by("id").to_pylist():
        print(row)
    catalog.close()


if __name__ == "__main__":
    run(SparkSession.builder.master("local[2]").getOrCreate())
