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
_WARM_UP_EPOCHS = 30
_WARM_UP_ROWS = 6_000
"""Of an epoch: enough that tasks write it, and not the driver."""


class Stream:
    """Rows as a stream of equal epochs."""

    def __init__(self, spark: Any, folder: Path, rows: pa.Table, epochs: int) -> None:
        import pyarrow.parquet as pq  # noqa: PLC0415  only benchmarks write parquet by themselves

        self.rows = rows.num_rows
        self._spark = spark
        self._folder, self._few = folder, folder.with_name("few")
        for place, size, files in (
            (self._folder, self.rows // (epochs * TASKS), epochs * TASKS),
            (self._few, _WARM_UP_ROWS // TASKS, _WARM_UP_EPOCHS * TASKS),
        ):
            place.mkdir()
            for number in range(files):
                pq.write_table(rows.slice(number * size, size), place / f"{number:03d}.parquet")

    def frame(self) -> Any:
        return self._read(self._folder)

    def _read(self, folder: Path) -> Any:
        schema = self._spark.read.parquet(str(folder)).schema
        reader = self._spark.readStream.schema(schema).option("maxFilesPerTrigger", TASKS)
        return reader.parquet(str(folder))

    def rate(self, start: Callable[[Any, str], Any]) -> float:
        """Rows per second of a query, from its start to its end; it is given a checkpoint."""
        frame = self.frame()
        with stopwatch() as seconds:
            start(frame, self._checkpoint()).awaitTermination()
            return self.rows / seconds()

    def warm_up(self, start: Callable[[Any, str], Any]) -> None:
        """
        Run many small epochs: Java compiles what Spark does once an epoch for longer than a
        measured query lives, and that took a third of its CPU.
        """
        start(self._read(self._few), self._checkpoint()).awaitTermination()

    def _checkpoint(self) -> str:
        # Removed with all the rest: a pipeline writes its last record after its query has ended.
        return tempfile.mkdtemp(dir=self._folder.parent)


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
