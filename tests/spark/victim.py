"""
A driver to be killed: three pipelines, two with state, each with files, a table and a topic under
one decision.

    python victim.py <folder>

It starts Spark, then waits for a line on stdin: how it ends, the pipeline and the step at which it
does; or an empty line to run to the end of the source.

    kill    SIGKILL of this process; its JVM notices later
    jvm     SIGKILL of the JVM; this process must end by itself
    freeze  SIGSTOP of this process and its JVM, as on a machine that hangs
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession, functions

from epochal.contract import Sink
from epochal.coordinator import Gate
from epochal.sinks.files import Files
from epochal.sinks.kafka import Kafka
from epochal.sinks.postgres import Postgres
from epochal.spark.pipeline import Pipeline
from epochal.terms import Limits, SinkName

ROWS = 20
GAP = ROWS + 1
"""What is joined is that far apart: in two epochs."""
DIED = "died.txt"


@dataclass(frozen=True)
class Targets:
    """Where the driver writes; in a file of its folder."""

    postgres: str
    kafka: str

    def save(self, root: Path) -> None:
        (root / "targets.json").write_text(json.dumps(vars(self)))

    @classmethod
    def load(cls, root: Path) -> Targets:
        return cls(**json.loads((root / "targets.json").read_text()))


def add_epoch(root: Path, epoch: int) -> None:
    """Numbers with an event time; one file is one epoch."""
    file = root / "in" / f"{epoch}.json"
    rows = [{"id": n, "at": n} for n in range(epoch * ROWS, (epoch + 1) * ROWS)]
    scratch = root / file.name
    scratch.write_text("\n".join(json.dumps(row) for row in rows))
    os.utime(scratch, (1_700_000_000 + epoch, 1_700_000_000 + epoch))
    scratch.rename(file)


def folder(root: Path, pipeline: str) -> Path:
    return root / "out" / pipeline


def sinks_of(root: Path, pipeline: str) -> list[Sink]:
    at = Targets.load(root)
    strategy = "prepared" if pipeline == "windows" else "staged"
    return [
        Files(str(folder(root, pipeline)), name=SinkName("files")),
        Postgres(at.postgres, table=pipeline, name=SinkName("table"), strategy=strategy),
        Kafka(at.kafka, topic=pipeline, name=SinkName("topic")),
    ]


def plain(df: DataFrame) -> DataFrame:
    return df.selectExpr("id", "id * 7 AS value")


def windows(df: DataFrame) -> DataFrame:
    counted = (
        _timed(df)
        .groupBy(functions.window("at", "10 seconds"))
        .agg(functions.sum("id").alias("value"))
    )
    return counted.selectExpr("unix_timestamp(window.start) AS id", "value")


def joined(df: DataFrame) -> DataFrame:
    left = _timed(df.where("id % 2 = 0")).alias("l")
    right = _timed(df.where("id % 2 = 1")).alias("r")
    on = f"l.id + {GAP} = r.id AND r.at BETWEEN l.at AND l.at + INTERVAL {2 * GAP} SECONDS"
    return left.join(right, functions.expr(on)).selectExpr("l.id AS id", "r.id AS value")


def _timed(df: DataFrame) -> DataFrame:
    return df.selectExpr("id", "timestamp_seconds(at) AS at").withWatermark("at", "5 seconds")


QUERIES: dict[str, Callable[[DataFrame], DataFrame]] = {
    "plain": plain,
    "windows": windows,
    "joined": joined,
}


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


def end(how: str, spark: SparkSession) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "jvm":
        os.kill(spark.sparkContext._gateway.proc.pid, signal.SIGKILL)
    else:
        os.killpg(0, signal.SIGSTOP)
        time.sleep(1)  # it takes effect a moment later: on a busy machine the epoch would be done


def _are_equal(sinks: list[Sink]) -> Gate:
    """The first and the last have as many rows."""
    return lambda epoch: epoch.rows(sinks[0].name) == epoch.rows(sinks[-1].name)


def run(
    spark: SparkSession,
    root: Path,
    death: str,
    queries: Mapping[str, Callable[[DataFrame], DataFrame]],
    sinks_of: Callable[[Path, str], list[Sink]],
) -> None:
    how, _, at = death.partition(" ")
    victim, _, step = at.partition(" ")

    def watch_for(pipeline: str) -> Callable[[str, int | None], None]:
        def watch(at: str, epoch: int | None) -> None:
            if pipeline == victim and at == step and not (root / DIED).exists():
                (root / DIED).write_text(f"{how} {pipeline} {at}")
                end(how, spark)

        return watch

    reader = spark.readStream.schema("id bigint, at bigint").option("maxFilesPerTrigger", 1)
    df = reader.json(str(root / "in"))
    started = [
        Pipeline(
            name,
            sinks_of(root, name),
            gates=[_are_equal(sinks_of(root, name))],
            watch=watch_for(name),  # type: ignore[arg-type]
            # Tasks write in some lives, the driver itself in others.
            limits=Limits(driver_rows_max=random.choice((0, 2_000))),
        ).start(query(df), root / name, availableNow=True)
        for name, query in queries.items()
    ]
    for query in started:
        query.awaitTermination()


if __name__ == "__main__":
    session = connect()
    run(session, Path(sys.argv[1]), sys.stdin.readline().strip(), QUERIES, sinks_of)
