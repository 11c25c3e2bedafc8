"""
Orders into PostgreSQL and Kafka: the table and the topic that announces it agree after every crash.

The source is a folder of JSON files, so that the program needs nothing else; with a Kafka source
only `orders` changes.
"""

from __future__ import annotations

import os

from pyspark.sql import DataFrame, SparkSession

import epochal as ep


def orders(spark: SparkSession, folder: str) -> DataFrame:
    schema = "id BIGINT, customer STRING, amount DECIMAL(12, 2), version BIGINT"
    return spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).json(folder)


def pipeline(postgres: str, kafka: str) -> ep.Pipeline:
    return ep.Pipeline(
        "orders",
        sinks=[
            ep.Postgres(
                postgres,
                table="orders",
                mode="upsert",
                keys=["id"],
                newer="version",  # a late row never overwrites a newer one
                create_table="if_missing",
                name="table",
            ),
            ep.Kafka(kafka, topic="orders.v1", key="id", value=ep.json("*"), name="topic"),
        ],
    )


def run(spark: SparkSession) -> None:
    """Take in all that is there, then stop; a service would leave `availableNow` out."""
    declared = pipeline(os.environ["POSTGRES_URL"], os.environ["KAFKA_BOOTSTRAP"])
    stream = orders(spark, os.environ["INPUT"])
    print(declared.check(stream))
    query = declared.start(stream, checkpoint=f"{os.environ['FOLDER']}/chk", availableNow=True)
    query.awaitTermination()
    print(declared)


if __name__ == "__main__":
    run(SparkSession.builder.master("local[2]").getOrCreate())
