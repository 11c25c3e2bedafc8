"""[files_parquet] A parquet epoch through `Files`, against Spark's own parquet file sink."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from bench.harness import Comparison, PeakMemory, stopwatch
from epochal.sinks.files import Files
from epochal.spark.local_session import local_session
from epochal.spark.pipeline import Pipeline

ROWS = 2_000_000
ROUNDS = 4


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
            comparison.run(
                lambda: _rows_per_s(spark, source, _ours, peaks, "ours"),
                lambda: _rows_per_s(spark, source, _spark_sink, peaks, "peer"),
                rounds=ROUNDS,
            )
            plain = [_rows_per_s(spark, source, _plain, peaks, "ours") for _ in range(ROUNDS)]
    finally:
        spark.stop()
    comparison.beside = {f"{who}_peak_mb": round(peak) for who, peak in peaks.items()}
    comparison.beside["ours_without_fingerprint"] = round(statistics.median(plain), 3)
    return comparison


def write_source(spark: Any, source: Path) -> None:
    (
        spark.range(ROWS, numPartitions=4)
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


def _spark_sink(stream: Any, target: Path, checkpoint: Path) -> Any:
    return (
        stream.writeStream.format("parquet")
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start(str(target))
    )


def _rows_per_s(spark: Any, source: Path, start: Any, peaks: dict[str, float], who: str) -> float:
    schema = spark.read.parquet(str(source)).schema
    # A pipeline writes its last record after its query has ended.
    scratch = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    with scratch as name, PeakMemory() as peak, stopwatch() as seconds:
        folder = Path(name)
        stream = spark.readStream.schema(schema).parquet(str(source))
        start(stream, folder / "target", folder / "checkpoint").awaitTermination()
        elapsed_s = seconds()
        assert spark.read.parquet(str(folder / "target")).count() == ROWS
    peaks[who] = max(peaks[who], peak.bytes / 1e6)
    return ROWS / elapsed_s
