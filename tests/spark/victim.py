"""
A driver to be killed: two pipelines, one with state, that SIGKILL themselves at a named step.

    python victim.py <folder>

It starts Spark, then waits for a line on stdin: the pipeline and the step of its death, or an empty
line to run to the end of the source.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession, functions

from epochal.sinks.files import Files
from epochal.spark.pipeline import Pipeline

ROWS = 20
SINKS = {"plain": ("all", "odd"), "windows": ("counts",)}


def add_epoch(root: Path, epoch: int) -> None:
    """Numbers with an event time; one file is one epoch."""
    file = root / "in" / f"{epoch}.json"
    rows = [{"id": n, "at": n} for n in range(epoch * ROWS, (epoch + 1) * ROWS)]
    scratch = root / file.name
    scratch.write_text("\n".join(json.dumps(row) for row in rows))
    os.utime(scratch, (1_700_000_000 + epoch, 1_700_000_000 + epoch))
    scratch.rename(file)


def folder(root: Path, sink: str) -> Path:
    return root / "out" / sink


def counts(df: DataFrame) -> DataFrame:
    timed = df.selectExpr("id", "timestamp_seconds(at) AS at").withWatermark("at", "5 seconds")
    counted = timed.groupBy(functions.window("at", "10 seconds")).agg(
        functions.sum("id").alias("total")
    )
    return counted.selectExpr("unix_timestamp(window.start) AS id", "total")


def connect() -> SparkSession:
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def run(spark: SparkSession, root: Path, victim: str, step: str) -> None:
    def watch_for(pipeline: str) -> object:
        def watch(at: str, epoch: int | None) -> None:
            if pipeline == victim and at == step:
                (root / "died.txt").write_text(f"{pipeline} {at}")
                os.kill(os.getpid(), signal.SIGKILL)

        return watch

    reader = spark.readStream.schema("id bigint, at bigint").option("maxFilesPerTrigger", 1)
    df = reader.json(str(root / "in"))
    plain = Pipeline(
        "plain",
        [
            Files(str(folder(root, "all")), name="all"),
            Files(str(folder(root, "odd")), name="odd", format="jsonl", where="id % 2 = 1"),
        ],
        gates=[lambda epoch: epoch.rows("odd") * 2 == epoch.rows("all")],
        watch=watch_for("plain"),  # type: ignore[arg-type]
    )
    windows = Pipeline(
        "windows",
        [Files(str(folder(root, "counts")), name="counts")],
        watch=watch_for("windows"),  # type: ignore[arg-type]
    )
    queries = [
        plain.start(df, root / "plain", availableNow=True),
        windows.start(counts(df), root / "windows", availableNow=True),
    ]
    for query in queries:
        query.awaitTermination()


if __name__ == "__main__":
    session = connect()
    pipeline, _, step = sys.stdin.readline().strip().partition(" ")
    run(session, Path(sys.argv[1]), pipeline, step)
