"""
A change stream with deletes into PostgreSQL: late changes lose, deleted rows stay deleted.

Each line of the input is a change: `op` is c, u or d, `version` grows with every change of a row.
Debezium's envelopes, with their schema: docs/guides/debezium.md.
"""

from __future__ import annotations

import os

from pyspark.sql import DataFrame, SparkSession

import epochal as ep


def changes(spark: SparkSession, folder: str) -> DataFrame:
    schema = "op STRING, id BIGINT, name STRING, city STRING, version BIGINT"
    return spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).json(folder)


def pipeline(postgres: str) -> ep.Pipeline:
    customers = ep.Postgres(
        postgres,
        table="customers",
        mode="upsert",
        keys=["id"],
        newer="version",
        delete_when="op = 'd'",
        tombstones="customers_deleted",  # remembers deleted keys, for changes that come too late
        columns=["id", "name", "city", "version"],
        create_table="if_missing",
    )
    return ep.Pipeline("customers", sinks=[customers])


def run(spark: SparkSession) -> None:
    declared = pipeline(os.environ["POSTGRES_URL"])
    query = declared.start(
        changes(spark, os.environ["INPUT"]),
        checkpoint=f"{os.environ['FOLDER']}/chk",
        availableNow=True,
    )
    query.awaitTermination()
    print(declared)


if __name__ == "__main__":
    run(SparkSession.builder.master("local[2]").getOrCreate())
