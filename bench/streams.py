"""A stream for comparisons on Spark: parquet files, two tasks an epoch, the same for both sides.

A start is paid once, as in the life of a query; every epoch pays what an epoch costs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from bench.harness import stopwatch
from epochal.spark.local_session import local_builder

TASKS = 2


class Stream:
    """Rows as a stream of equal epochs."""

    def __init__(self, spark: Any, folder: Path, rows: pa.Table, epochs: int) -> None:
        import pyarrow.parquet as pq  # noqa: PLC0415  only benchmarks write parquet by themselves

        self.rows = rows.num_rows
        self._spark = spark
        self._folder = folder
        folder.mkdir()
        size = self.rows // (epochs * TASKS)
        for number in range(epochs * TASKS):
            pq.write_table(rows.slice(number * size, size), folder / f"{number:03d}.parquet")

    def frame(self) -> Any:
        schema = self._spark.read.parquet(str(self._folder)).schema
        reader = self._spark.readStream.schema(schema).option("maxFilesPerTrigger", TASKS)
        return reader.parquet(str(self._folder))

    def rate(self, start: Callable[[Any, str], Any]) -> float:
        """Rows per second of a query, from its start to its end; it is given a checkpoint."""
        frame = self.frame()
        # Removed with all the rest: a pipeline writes its last record after its query has ended.
        checkpoint = tempfile.mkdtemp(dir=self._folder.parent)
        with stopwatch() as seconds:
            start(frame, checkpoint).awaitTermination()
            return self.rows / seconds()


@contextmanager
def streaming(rows: pa.Table, *, epochs: int, packages: str) -> Iterator[Stream]:
    builder = local_builder("bench", threads=TASKS).config("spark.jars.packages", packages)
    # One task per file, however small it is.
    builder = builder.config("spark.sql.files.openCostInBytes", 1 << 30)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        spark = builder.config("spark.driver.memory", "2g").getOrCreate()
        spark.sparkContext.setLogLevel("ERROR")
        try:
            yield Stream(spark, Path(folder) / "rows", rows, epochs)
        finally:
            spark.stop()


def each_batch(write: Callable[[Any], None]) -> Callable[[Any, str], Any]:
    """A query that hands every batch to a function, as people do by hand: at least once."""

    def start(frame: Any, checkpoint: str) -> Any:
        writer = frame.writeStream.foreachBatch(lambda batch, _: write(batch))
        return writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()

    return start
