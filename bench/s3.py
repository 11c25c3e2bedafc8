"""
[s3_append_spark] Parquet epochs to a bucket through `Files` with `uploads="manifest"`, against
Spark's own file sink through s3a: both write objects that readers find by a manifest or a log.
Beside it the default, uploads left incomplete, which keeps every reader from undecided rows; and
the peer with our settings.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.broker import TESTS
from bench.files_parquet import FILES_PER_EPOCH, ROWS, our_settings, write_source
from bench.harness import Comparison, stopwatch
from epochal.sinks.files import Files, read_epochs
from epochal.sinks.files.backend import Uploads
from epochal.spark.local_session import local_builder
from epochal.spark.pipeline import Pipeline

ROUNDS = 8


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
        ours, peer = _ours(spark, server, "manifest"), _sparks(spark)
        default = _ours(spark, server, "auto")
        numbers = iter(range(1000))

        def alike() -> float:
            with our_settings(spark):
                return _rows_per_s(spark, source, peer, f"alike-{next(numbers)}")

        comparison.run(
            lambda: _rows_per_s(spark, source, ours, f"ours-{next(numbers)}"),
            lambda: _rows_per_s(spark, source, peer, f"sparks-{next(numbers)}"),
            rounds=ROUNDS,
            beside={
                "ours_by_incomplete_uploads": lambda: _rows_per_s(
                    spark, source, default, f"default-{next(numbers)}"
                ),
                "peer_with_our_timestamps": alike,
            },
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


def _ours(spark: Any, server: Any, uploads: Uploads) -> Write:
    def write(stream: Any, folder: str, checkpoint: str) -> Callable[[], int]:
        target, options = f"s3://lake/{folder}", server.options()
        pipeline = Pipeline("bench", [Files(target, storage_options=options, uploads=uploads)])
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
        reader = spark.readStream.schema(schema).option("maxFilesPerTrigger", FILES_PER_EPOCH)
        stream = reader.parquet(str(source))
        count = write(stream, folder, f"{checkpoint}/c")
        elapsed_s = seconds()
        assert count() == ROWS
    return ROWS / elapsed_s


RUNS = {"s3_append_spark": append_spark}
