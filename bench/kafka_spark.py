"""
[kafka_append_spark] Rows from Spark to Kafka exactly once, against Spark's own Kafka sink with its
defaults, which is at least once; beside it the same sink tuned.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.broker import TESTS, apache
from bench.harness import Comparison, stopwatch
from bench.kafka import new_topic
from epochal.sinks.kafka import Kafka
from epochal.spark.local_session import local_builder
from epochal.spark.pipeline import Pipeline

ROWS = 2_000_000
ROUNDS = 3
VALUE_BYTES = 100
_TUNED = {"kafka.batch.size": 512 * 1024, "kafka.linger.ms": 20}


def append_spark() -> Comparison:
    spark = _connect()
    comparison = Comparison(
        name="kafka_append_spark",
        peer_name="Spark's own Kafka sink, defaults, at least once",
        unit="rows/s",
        is_rate=True,
    )
    try:
        with apache() as bootstrap, tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "source"
            _write_source(spark, source)
            comparison.run(
                lambda: _rows_per_s(spark, source, bootstrap, _ours),
                lambda: _rows_per_s(spark, source, bootstrap, _sparks({})),
                rounds=ROUNDS,
            )
            tuned = [_rows_per_s(spark, source, bootstrap, _sparks(_TUNED)) for _ in range(2)]
            comparison.beside = {"spark_tuned": round(max(tuned))}
    finally:
        spark.stop()
    return comparison


def _connect() -> Any:
    for folder in (TESTS, TESTS / "sinks" / "kafka", TESTS / "broker"):
        sys.path.insert(0, str(folder))
    import spark_victim  # type: ignore[import-not-found]  # noqa: PLC0415  found by the line above

    builder = local_builder("bench", threads=2).config("spark.jars", spark_victim.spark_jars())
    spark = builder.config("spark.driver.memory", "2g").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def _write_source(spark: Any, source: Path) -> None:
    filler = f"lpad(cast(id as string), {VALUE_BYTES}, 'abcdefghij')"
    rows = spark.range(ROWS, numPartitions=4).selectExpr(
        "cast(id as string) AS key", f"{filler} AS value"
    )
    rows.write.parquet(str(source))


def _ours(stream: Any, bootstrap: str, topic: str, checkpoint: str) -> Any:
    sink = Kafka(bootstrap, topic=topic, key="key", value="value")
    return Pipeline("bench", [sink]).start(stream, checkpoint=checkpoint, availableNow=True)


def _sparks(options: Mapping[str, Any]) -> Callable[..., Any]:
    def start(stream: Any, bootstrap: str, topic: str, checkpoint: str) -> Any:
        writer = (
            stream.writeStream.format("kafka")
            .option("kafka.bootstrap.servers", bootstrap)
            .option("topic", topic)
            .option("checkpointLocation", checkpoint)
        )
        for name, value in options.items():
            writer = writer.option(name, value)
        return writer.trigger(availableNow=True).start()

    return start


def _rows_per_s(spark: Any, source: Path, bootstrap: str, start: Callable[..., Any]) -> float:
    topic = new_topic(bootstrap)
    schema = spark.read.parquet(str(source)).schema
    # A pipeline may still write while its folder is being removed.
    folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    with folder as checkpoint, stopwatch() as seconds:
        stream = spark.readStream.schema(schema).parquet(str(source))
        start(stream, bootstrap, topic, checkpoint).awaitTermination()
        elapsed_s = seconds()
    return ROWS / elapsed_s


RUNS: Mapping[str, Callable[[], Comparison]] = {"kafka_append_spark": append_spark}
