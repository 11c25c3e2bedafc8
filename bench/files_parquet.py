"""
[files_parquet] Parquet epochs through `Files`, against Spark's own parquet file sink; and
[files_small_epochs] what an epoch of 100 rows takes.

The peer is measured as it is, and with our settings: timestamps of microseconds, and dictionaries
only for columns whose values repeat.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from bench.epoch_overhead import median_ms
from bench.harness import Comparison, PeakMemory, stopwatch
from epochal.sinks.files import Files
from epochal.spark.local_session import local_session
from epochal.spark.pipeline import Pipeline

ROWS = 4_000_000
FILES = 16
FILES_PER_EPOCH = 2
"""Eight epochs: a start is paid once in the life of a query, and what an epoch costs by each."""
ROUNDS = 8
SMALL_ROUNDS = 3
_TIMESTAMPS = "spark.sql.parquet.outputTimestampType"
_DISTINCT = ("id", "amount", "title", "price", "at")


def run() -> Comparison:
    spark = local_session("bench", threads=2)
    comparison = Comparison(
        name="files_parquet",
        peer_name="Spark's own parquet file sink",
        unit="rows/s",
        is_rate=True,
    )
    peaks: dict[str, float] = {"ours": 0.0, "peer": 0.0}
    try:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "source"
            write_source(spark, source)

            def alike() -> float:
                with our_settings(spark):
                    return _rows_per_s(spark, source, _spark_sink_alike, peaks, "peer")

            comparison.run(
                lambda: _rows_per_s(spark, source, _ours, peaks, "ours"),
                lambda: _rows_per_s(spark, source, _spark_sink, peaks, "peer"),
                rounds=ROUNDS,
                beside={
                    "ours_without_fingerprint": lambda: _rows_per_s(
                        spark, source, _plain, peaks, "ours"
                    ),
                    "peer_with_our_settings": alike,
                },
            )
    finally:
        spark.stop()
    comparison.beside |= {f"{who}_peak_mb": round(peak) for who, peak in peaks.items()}
    return comparison


def run_small() -> Comparison:
    """The time of `addBatch`: Spark's own log entry, and ours with its decision, are in it."""
    spark = local_session("bench", threads=2)
    comparison = Comparison(
        name="files_small_epochs",
        peer_name="Spark's own parquet file sink",
        unit="ms/epoch",
        is_rate=False,
    )
    add_batch = partial(median_ms, spark, duration="addBatch")
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            numbers = iter(range(1000))

            def to_new_folder(start: Any) -> float:
                target = Path(folder) / str(next(numbers))
                return add_batch(lambda stream, checkpoint: start(stream, target, checkpoint))

            def alike() -> float:
                with our_settings(spark):
                    return to_new_folder(_spark_sink_small)

            comparison.run(
                lambda: to_new_folder(_ours_small),
                lambda: to_new_folder(_spark_sink_small),
                rounds=SMALL_ROUNDS,
                beside={"peer_with_our_settings": alike},
            )
    finally:
        spark.stop()
    return comparison


RUNS = {"files_parquet": run, "files_small_epochs": run_small}


@contextmanager
def our_settings(spark: Any) -> Iterator[None]:
    spark.conf.set(_TIMESTAMPS, "TIMESTAMP_MICROS")
    try:
        yield
    finally:
        spark.conf.unset(_TIMESTAMPS)


def write_source(spark: Any, source: Path) -> None:
    (
        spark.range(ROWS, numPartitions=FILES)
        .selectExpr(
            "id",
            "cast(id % 997 as int) as customer",
            "cast(id as double) / 7 as amount",
            "concat('order ', id) as title",
            "id % 2 = 0 as paid",
            "cast(id / 3 as decimal(18, 2)) as price",
            "timestamp_seconds(1700000000 + id) as at",
            "date_from_unix_date(cast(id % 20000 as int)) as day",
        )
        .write.parquet(str(source))
    )


def _ours(stream: Any, target: Path, checkpoint: Path) -> Any:
    pipeline = Pipeline("bench", sinks=[Files(str(target))])
    return pipeline.start(stream, checkpoint=str(checkpoint), availableNow=True)


def _plain(stream: Any, target: Path, checkpoint: Path) -> Any:
    """Ours without the hashing of rows: what the fingerprint costs."""
    pipeline = Pipeline("bench", sinks=[Files(str(target))], fingerprint=False)
    return pipeline.start(stream, checkpoint=str(checkpoint), availableNow=True)


def _spark_sink(stream: Any, target: Path, checkpoint: Path, **options: str) -> Any:
    return (
        stream.writeStream.format("parquet")
        .options(**options)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start(str(target))
    )


def _spark_sink_alike(stream: Any, target: Path, checkpoint: Path) -> Any:
    plain = {f"parquet.enable.dictionary#{name}": "false" for name in _DISTINCT}
    return _spark_sink(stream, target, checkpoint, **plain)


def _ours_small(stream: Any, target: Path, checkpoint: str) -> Any:
    return Pipeline("bench", sinks=[Files(str(target))]).start(stream, checkpoint=checkpoint)


def _spark_sink_small(stream: Any, target: Path, checkpoint: str) -> Any:
    writer = stream.writeStream.format("parquet").option("checkpointLocation", checkpoint)
    return writer.start(str(target))


def _rows_per_s(spark: Any, source: Path, start: Any, peaks: dict[str, float], who: str) -> float:
    schema = spark.read.parquet(str(source)).schema
    # A pipeline writes its last record after its query has ended.
    scratch = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    with scratch as name, PeakMemory() as peak, stopwatch() as seconds:
        folder = Path(name)
        reader = spark.readStream.schema(schema).option("maxFilesPerTrigger", FILES_PER_EPOCH)
        stream = reader.parquet(str(source))
        start(stream, folder / "target", folder / "checkpoint").awaitTermination()
        elapsed_s = seconds()
        assert spark.read.parquet(str(folder / "target")).count() == ROWS
    peaks[who] = max(peaks[who], peak.bytes / 1e6)
    return ROWS / elapsed_s
