"""
Spark's own Kafka source and sink, run against a broker; what they saw goes to stdout as JSON.

    python spark_client.py <bootstrap> <source topic> <target topic> <folder>

A stream moves committed rows from source to target in several epochs. Then a batch adds rows to the
source, and the stream goes on from its checkpoint.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
for folder in (HERE.parent, HERE):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from client_jars import spark_jars  # noqa: E402  found by the lines above

from epochal.spark.local_session import local_builder  # noqa: E402  the same

ROWS_AN_EPOCH = 40
MORE = range(1000, 1010)


def connect() -> Any:
    builder = (
        local_builder("spark-client", threads=2)
        .config("spark.jars", spark_jars())
        .config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
        .config("spark.sql.shuffle.partitions", "1")
    )
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def options(reader: Any, bootstrap: str, topic: str, isolation: str) -> Any:
    return (
        reader.format("kafka")
        .option("kafka.bootstrap.servers", bootstrap)
        .option("subscribe", topic)
        .option("startingOffsets", "earliest")
        .option("kafka.isolation.level", isolation)
    )


def move(spark: Any, bootstrap: str, source: str, target: str, folder: str) -> int:
    """The stream, to the end of what there is now; how many epochs it took."""
    moved = (
        options(spark.readStream, bootstrap, source, "read_committed")
        .option("maxOffsetsPerTrigger", ROWS_AN_EPOCH)
        .option("includeHeaders", "true")
        .load()
        .selectExpr("key", "concat('moved-', CAST(value AS STRING)) AS value", "headers")
    )
    query = (
        moved.writeStream.format("kafka")
        .option("kafka.bootstrap.servers", bootstrap)
        .option("topic", target)
        .option("checkpointLocation", folder)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return len([one for one in query.recentProgress if one.numInputRows])


def add(spark: Any, bootstrap: str, topic: str) -> None:
    rows = spark.createDataFrame(
        [(str(number), f"row-{number}") for number in MORE], "key string, value string"
    )
    writer = rows.write.format("kafka").option("kafka.bootstrap.servers", bootstrap)
    writer.option("topic", topic).save()


def seen(spark: Any, bootstrap: str, topic: str, isolation: str) -> list[str]:
    frame = options(spark.read, bootstrap, topic, isolation).load()
    return sorted(row.value for row in frame.selectExpr("CAST(value AS STRING) AS value").collect())


def main(bootstrap: str, source: str, target: str, folder: str) -> None:
    spark = connect()
    result: dict[str, Any] = {
        isolation: seen(spark, bootstrap, source, isolation)
        for isolation in ("read_committed", "read_uncommitted")
    }
    epochs = [move(spark, bootstrap, source, target, folder)]
    add(spark, bootstrap, source)
    epochs.append(move(spark, bootstrap, source, target, folder))
    print(json.dumps(result | {"epochs": epochs}))  # noqa: T201  stdout is the answer
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
