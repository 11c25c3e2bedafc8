"""
Fan-out under one decision: a table, an archive and a folder for large payments, with a gate that
may refuse an epoch, and dead letters for rows that the table refuses.
"""

from __future__ import annotations

import os

import psycopg
from pyspark.sql import DataFrame, SparkSession

import epochal as ep


def payments(spark: SparkSession, folder: str) -> DataFrame:
    schema = "id BIGINT, account STRING, amount DECIMAL(12, 2), day DATE"
    return spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).json(folder)


def not_all_refused(epoch: ep.PreparedEpoch) -> str | None:
    """An epoch of which the table refuses more than half is a fault of the source: stop."""
    refused, taken = epoch.rows("refused"), epoch.rows("table")
    return f"{refused} of {refused + taken} rows were refused" if refused > taken else None


def pipeline(postgres: str, folder: str) -> ep.Pipeline:
    refused = ep.Files(f"{folder}/refused", format="jsonl", name="refused")
    return ep.Pipeline(
        "payments",
        sinks=[
            ep.Postgres(postgres, table="payments", on_reject=refused, name="table"),
            ep.Files(f"{folder}/archive", partition_by=["day"], name="archive"),
            ep.Files(f"{folder}/large", format="jsonl", where="amount >= 10000", name="large"),
        ],
        gates=[not_all_refused],
    )


def make_table(postgres: str) -> None:
    with psycopg.connect(postgres, autocommit=True) as connection:
        connection.execute(
            "CREATE TABLE IF NOT EXISTS payments (id bigint PRIMARY KEY, account text NOT NULL, "
            "amount numeric(12, 2) CHECK (amount > 0), day date)"
        )


def run(spark: SparkSession) -> None:
    make_table(os.environ["POSTGRES_URL"])
    declared = pipeline(os.environ["POSTGRES_URL"], os.environ["FOLDER"])
    query = declared.start(
        payments(spark, os.environ["INPUT"]),
        checkpoint=f"{os.environ['FOLDER']}/chk",
        availableNow=True,
    )
    query.awaitTermination()
    print(declared)


if __name__ == "__main__":
    run(SparkSession.builder.master("local[2]").getOrCreate())
