"""
[s3_append_spark] A parquet epoch to a bucket through `Files`, against Spark's own file sink through
s3a. Spark's streaming sink writes under the final names and makes them visible by its log, for
readers that know it; ours keeps every reader from undecided rows.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.broker import TESTS
from bench.files_parquet import ROWS, write_source
from bench.harness import Comparison, stopwatch
from epochal.sinks.files import Files, read_epochs
from epochal.spark.local_session import local_builder
from epochal.spark.pipeline import Pipeline

ROUNDS = 3


def append_spark() -> Comparison:
    comparison = Comparison(
        name="s3_append_spark",
        peer_name="Spark's own parquet file sink through s3a",
        unit="rows/s",
        is_rate=True,
    )
    with _bucket() as (spark, server), tempfile.TemporaryDirectory() as name:
        source = Path(name) / "source"
        write_source(spark, source)
        ours, peer = _ours(spark, server), _sparks(spark)
        numbers = iter(range(1000))
        comparison.run(
            lambda: _rows_per_s(spark, source, ours, f"ours-{next(numbers)}"),
            lambda: _rows_per_s(spark, source, peer, f"sparks-{next(numbers)}"),
            rounds=ROUNDS,
        )
    return comparison


@contextmanager
def _bucket() -> Iterator[tuple[Any, Any]]:
    """A Spark that reaches an S3 server of its own."""
    sys.path.insert(0, str(TESTS))
    from servers import s3, s3a  # type: ignore[import-not-found]  # noqa: PLC0415  by the line above

    with s3.running_s3() as server:
        builder = local_builder("bench", threads=2).config("spark.jars", s3a.jars())
        for key, value in s3a.settings(server).items():
            builder = builder.config(key, value)
        spark = builder.getOrCreate()
        spark.sparkContext.setLogLevel("ERROR")
        try:
            yield spark, server
        finally:
            spark.stop()


Write = Callable[[Any, str, str], Callable[[], int]]
"""Writes a stream to a folder of the bucket; what it gives counts what a reader then sees."""


def _ours(spark: Any, server: Any) -> Write:
    def write(stream: Any, folder: str, checkpoint: str) -> Callable[[], int]:
        target, options = f"s3://lake/{folder}", server.options()
        pipeline = Pipeline("bench", [Files(target, storage_options=options)])
        pipeline.start(stream, checkpoint=checkpoint, availableNow=True).awaitTermination()
        return lambda: int(read_epochs(target, storage_options=options, spark=spark).count())

    return write


def _sparks(spark: Any) -> Write:
    def write(stream: Any, folder: str, checkpoint: str) -> Callable[[], int]:
        target = f"s3a://lake/{folder}"
        writer = stream.writeStream.format("parquet").option("checkpointLocation", checkpoint)
        writer.trigger(availableNow=True).start(target).awaitTermination()
        return lambda: int(spark.read.parquet(target).count())

    return write


def _rows_per_s(spark: Any, source: Path, write: Write, folder: str) -> float:
    schema = spark.read.parquet(str(source)).schema
    with tempfile.TemporaryDirectory() as checkpoint, stopwatch() as seconds:
        stream = spark.readStream.schema(schema).parquet(str(source))
        count = write(stream, folder, f"{checkpoint}/c")
        elapsed_s = seconds()
        assert count() == ROWS
    return ROWS / elapsed_s


RUNS = {"s3_append_spark": append_spark}
