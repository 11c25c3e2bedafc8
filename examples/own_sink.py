"""
A sink that is not epochal's: SQLite, from the package in examples/epochal-sqlite, beside a folder.

Both are under one decision, as the sink keeps the same contract.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing

from epochal_sqlite import SQLite
from pyspark.sql import DataFrame, SparkSession

import epochal as ep


def events(spark: SparkSession, folder: str) -> DataFrame:
    schema = "id BIGINT, day DATE, page STRING"
    stream = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).json(folder)
    return stream.selectExpr("id", "page")


def make_table(path: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS events (id INTEGER, page TEXT)")


def run(spark: SparkSession) -> None:
    folder = os.environ["FOLDER"]
    make_table(f"{folder}/events.db")
    declared = ep.Pipeline(
        "events",
        sinks=[
            SQLite(path=f"{folder}/events.db", table="events", name="sqlite"),
            ep.Files(f"{folder}/archive", name="archive"),
        ],
    )
    query = declared.start(
        events(spark, os.environ["INPUT"]), checkpoint=f"{folder}/chk", availableNow=True
    )
    query.awaitTermination()
    print(declared)


if __name__ == "__main__":
    run(SparkSession.builder.master("local[2]").getOrCreate())
