"""The Spark side of [iceberg_append_spark]: run by bench.iceberg in an environment of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pyiceberg.catalog import load_catalog
from pyspark.sql import SparkSession

from bench.harness import Comparison, say, stopwatch
from epochal.sinks.iceberg import Iceberg
from epochal.spark.pipeline import Pipeline

ROWS = 8_000_000
FILES = 32
FILES_PER_EPOCH = 2
"""Sixteen epochs: a start is paid once in the life of a query."""
FEW_ROWS = 180_000
FEW_FILES = 60
"""Thirty small epochs run first, by both: Java compiles what an epoch takes for as long."""
COLUMNS = (
    "id",
    "cast(id % 997 as int) as customer",
    "cast(id as double) / 7 as amount",
    "concat('order ', id) as title",
    "id % 2 = 0 as paid",
    "cast(id / 3 as decimal(18, 2)) as price",
    "timestamp_seconds(1700000000 + id) as at",
    "date_from_unix_date(cast(id % 20000 as int)) as day",
)
DDL = (
    "id bigint, customer int, amount double, title string, paid boolean, price decimal(18, 2), "
    "at timestamp, day date"
)


def session(folder: Path, runtime: str) -> SparkSession:
    """`java` is a catalog of iceberg-spark; `lake` is one of pyiceberg's, beside it."""
    return (
        SparkSession.builder.master("local[2]")
        .appName("bench")
        .config("spark.jars", runtime)
        .config("spark.ui.enabled", "false")
        .config("spark.driver.memory", "2g")
        .config("spark.sql.session.timeZone", "UTC")
        .config(
            "spark.sql.extensions",
            "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
        )
        .config("spark.sql.catalog.java", "org.apache.iceberg.spark.SparkCatalog")
        .config("spark.sql.catalog.java.type", "hadoop")
        .config("spark.sql.catalog.java.warehouse", f"{folder}/java")
        .getOrCreate()
    )


class Contest:
    def __init__(self, folder: Path, runtime: str) -> None:
        self.folder = folder
        self.spark = session(folder, runtime)
        self.spark.sparkContext.setLogLevel("ERROR")
        self.source, self.few = folder / "source", folder / "few"
        for place, number, files in ((self.source, ROWS, FILES), (self.few, FEW_ROWS, FEW_FILES)):
            rows = self.spark.range(number, numPartitions=files).selectExpr(*COLUMNS)
            rows.write.parquet(str(place))
        self.properties = {
            "type": "sql",
            "uri": f"sqlite:///{folder}/catalog.db",
            "warehouse": f"file://{folder}/warehouse",
        }
        self.catalog = load_catalog("lake", **self.properties)
        self.catalog.create_namespace("shop")
        self.number = 0

    def warm_up(self) -> None:
        for write in (self._write_ours, self._write_theirs):
            write(self.few, FEW_ROWS)

    def ours(self) -> float:
        return self._write_ours(self.source, ROWS)

    def peer(self) -> float:
        return self._write_theirs(self.source, ROWS)

    def _write_ours(self, source: Path, rows: int) -> float:
        name = f"shop.orders{self._next()}"
        self.catalog.create_table(name, schema=self._arrow_schema())
        sink = Iceberg(f"lake.{name}", properties=self.properties)
        pipeline = Pipeline("bench", sinks=[sink])
        with stopwatch() as seconds:
            query = pipeline.start(
                self._stream(source), checkpoint=self._place(), availableNow=True
            )
            query.awaitTermination()
            took_s = seconds()
        location = self.catalog.load_table(name).metadata_location
        assert self.spark.read.format("iceberg").load(location).count() == rows
        return rows / took_s

    def _write_theirs(self, source: Path, rows: int) -> float:
        name = f"java.shop.orders{self._next()}"
        self.spark.sql(f"CREATE TABLE {name} ({DDL}) USING iceberg")
        with stopwatch() as seconds:
            query = (
                self._stream(source)
                .writeStream.format("iceberg")
                .outputMode("append")
                .option("checkpointLocation", self._place())
                .trigger(availableNow=True)
                .toTable(name)
            )
            query.awaitTermination()
            took_s = seconds()
        assert self.spark.table(name).count() == rows
        return rows / took_s

    def reads_equal(self) -> bool:
        """Whether Spark's Iceberg reader finds in a table of ours what is in the source."""
        name = f"shop.orders{self._next()}"
        self.catalog.create_table(name, schema=self._arrow_schema())
        pipeline = Pipeline("read", sinks=[Iceberg(f"lake.{name}", properties=self.properties)])
        pipeline.start(
            self._stream(self.source), checkpoint=self._place(), availableNow=True
        ).awaitTermination()
        location = self.catalog.load_table(name).metadata_location
        there = self.spark.read.format("iceberg").load(location)
        source = self.spark.read.parquet(str(self.source))
        return there.exceptAll(source).isEmpty() and source.exceptAll(there).isEmpty()

    def _arrow_schema(self) -> Any:
        return self.spark.read.parquet(str(self.source)).limit(1).toArrow().schema

    def _stream(self, source: Path) -> Any:
        schema = self.spark.read.parquet(str(source)).schema
        reader = self.spark.readStream.schema(schema).option("maxFilesPerTrigger", FILES_PER_EPOCH)
        return reader.parquet(str(source))

    def _place(self) -> str:
        return f"{self.folder}/checkpoint{self._next()}"

    def _next(self) -> int:
        self.number += 1
        return self.number


def main() -> None:
    folder, runtime, rounds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    contest = Contest(folder, runtime)
    contest.warm_up()
    comparison = Comparison(name="iceberg_append_spark", peer_name="", unit="rows/s", is_rate=True)
    comparison.run(contest.ours, contest.peer, rounds=rounds)
    same = contest.reads_equal()
    say(f"iceberg_append_spark: read back by Spark {contest.spark.version}: equal is {same}")
    assert same, "Spark reads other rows than were written"
    contest.spark.stop()
    beside = {"spark": contest.spark.version, "read_back_by_spark": same}
    figures = {"ours": comparison.ours, "peer": comparison.peer, "cpu_s": comparison.cpu_s}
    print(json.dumps({**figures, "beside": beside}))


if __name__ == "__main__":
    main()
