"""A program: a pipeline writes a table, delta-spark reads and changes it, the pipeline goes on."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from epochal.coordinator.journal import read_state
from epochal.errors import Misconfigured
from epochal.logs import open_log
from epochal.session import Session
from epochal.sinks.delta import Delta
from epochal.spark.local_session import local_builder
from epochal.spark.pipeline import Pipeline

ODD = "a:b c/ü%3D'"


def session(jars: str) -> Any:
    listed = ",".join(str(path) for path in sorted(Path(jars).glob("*.jar")))
    return (
        local_builder("delta", threads=2)
        .config("spark.jars", listed)
        # Few rows, once: compiling, and fifty tasks to read a table's log, would cost minutes.
        .config("spark.sql.codegen.wholeStage", False)
        .config("spark.databricks.delta.snapshotPartitions", 2)
        .config("spark.sql.extensions", "io.delta.sql.DeltaSparkSessionExtension")
        .config(
            "spark.sql.catalog.spark_catalog", "org.apache.spark.sql.delta.catalog.DeltaCatalog"
        )
        .getOrCreate()
    )


class Job:
    def __init__(self, spark: Any, home: Path) -> None:
        self._spark = spark
        self._home = home
        self.table = str(home / "table")
        self._given = 0

    def epoch(self, *days: str | None) -> None:
        """A row for every day, and one run of the pipeline over them."""
        rows = [(self._given + at, day) for at, day in enumerate(days)]
        self._given += len(rows)
        frame = self._spark.createDataFrame(rows, "id long, day string").selectExpr(
            "*", "timestamp_seconds(1700000000 + id) at", "cast(id as decimal(10, 2)) price"
        )
        frame.coalesce(1).write.mode("append").parquet(str(self._home / "source"))
        stream = self._spark.readStream.schema(frame.schema).parquet(str(self._home / "source"))
        sink = Delta(self.table, create_table="if_missing", partition_by=["day"], name="lake")
        query = Pipeline("beside", sinks=[sink]).start(
            stream, checkpoint=str(self._home / "checkpoint"), availableNow=True
        )
        query.awaitTermination()

    def rows(self, where: str = "true") -> list[Any]:
        frame = self._spark.read.format("delta").load(self.table).where(where)
        return sorted(([row.id, row.day] for row in frame.collect()), key=repr)

    def sql(self, statement: str) -> None:
        self._spark.sql(statement.format(table=f"delta.`{self.table}`")).collect()


def generated(spark: Any, home: Path) -> dict[str, Any]:
    """A table that delta-spark made, with columns that follow from others."""
    table, checkpoint = home / "generated", home / "generated-checkpoint"
    spark.sql(
        f"CREATE TABLE delta.`{table}` (id BIGINT, name STRING, at TIMESTAMP,"
        " day DATE GENERATED ALWAYS AS (CAST(at AS DATE)),"
        " area STRING GENERATED ALWAYS AS (IF(id = 2, NULL, concat('a', id))),"
        " twice DECIMAL(12, 1) GENERATED ALWAYS AS (CAST(id * 10 AS DECIMAL(12, 1))))"
        " USING delta PARTITIONED BY (day, area)"
    )
    frame = spark.createDataFrame(
        [(1, "n1", "2026-01-31"), (2, "n2", "2026-02-01"), (3, "n3", "2026-02-01")],
        "id long, name string, day string",
    ).selectExpr("id", "name", "timestamp(day) + interval 5 hours at")
    sink = Delta(table, name="g")
    Pipeline("generated", [sink]).write(frame, run="a", checkpoint=checkpoint)
    spark.sql(
        f"INSERT INTO delta.`{table}` (id, name, at) VALUES (4, 'n4', timestamp '2026-02-02 01:00')"
    ).collect()
    read = spark.read.format("delta").load(str(table))
    area = "IF(id = 2, NULL, concat('a', id))"
    wrong = f"day <> cast(at AS date) OR NOT area <=> {area} OR twice <> id * 10"
    on_one_day = read.where("day = '2026-02-01'").collect()
    state = read_state(open_log(f"{checkpoint}/epochal/runs/a/log"))
    return {
        "generated": sorted(
            [one.id, str(one.day), one.area, int(one.twice)] for one in read.collect()
        ),
        "generated_wrong": read.where(wrong).count(),
        "generated_on_one_day": sorted(one.id for one in on_one_day),
        "generated_by": state.sinks["g"]["writer"],
        "without_spark": without_spark(sink, home),
    }


def by_the_hour(spark: Any, home: Path) -> dict[str, Any]:
    """A table by generated instants, written where clocks are set back in between."""
    table, zone = home / "hours", "spark.sql.session.timeZone"
    spark.sql(
        f"CREATE TABLE delta.`{table}` (id BIGINT, at TIMESTAMP,"
        " hour TIMESTAMP GENERATED ALWAYS AS (date_trunc('HOUR', at)))"
        " USING delta PARTITIONED BY (hour)"
    )
    before = spark.conf.get(zone)
    spark.conf.set(zone, "America/New_York")
    frame = spark.range(4).selectExpr("id", "timestamp_millis(1793507400500 + id * 1800000) at")
    sink = Delta(table, name="h")
    Pipeline("hours", [sink]).write(frame, run="a", checkpoint=home / "hours-checkpoint")
    replacing = Delta(table, name="r", mode="overwrite_partitions")
    refused = partial(Pipeline("r", [replacing]).write, frame, run="a", checkpoint=home / "r")
    found = {"hours_replaced": refusal(refused)}
    for reader in ("America/New_York", "UTC"):
        spark.conf.set(zone, reader)
        read = spark.read.format("delta").load(str(table))
        wrong = read.where("hour <> date_trunc('HOUR', at)").count()
        seconds = [row[0] for row in read.selectExpr("unix_seconds(hour)").collect()]
        found[f"hours in {reader}"] = [wrong, sorted(seconds)]
    spark.conf.set(zone, before)
    return found


def without_spark(sink: Delta, home: Path) -> str:
    """What a session says of such a table."""
    at = pa.timestamp("us", "UTC")
    schema = pa.schema([("id", pa.int64()), ("name", pa.string()), ("at", at)])
    return refusal(partial(Session, "alone", sinks=[sink], log=home / "alone", schema=schema))


def mapped(spark: Any, home: Path) -> dict[str, list[str]]:
    """What is said of tables that map column names, where Spark would write and without it."""
    frame = spark.range(3).selectExpr("id", "'n' name", "timestamp_seconds(id) at")
    found = {}
    for mode in ("name", "id"):
        table = home / f"mapped-by-{mode}"
        spark.sql(
            f"CREATE TABLE delta.`{table}` (id BIGINT, name STRING, at TIMESTAMP) USING delta"
            f" TBLPROPERTIES ('delta.columnMapping.mode' = '{mode}')"
        )
        sink = Delta(table, name="m")
        write = partial(Pipeline("mapped", [sink]).write, frame, run="a", checkpoint=home / mode)
        found[f"mapped_by_{mode}"] = [refusal(write), without_spark(sink, home)]
    return found


def refusal(act: Callable[[], Any]) -> str:
    try:
        act()
    except Misconfigured as error:
        return str(error)
    return ""


def main(jars: str, home: str) -> dict[str, Any]:
    spark = session(jars)
    spark.sparkContext.setLogLevel("ERROR")
    job = Job(spark, Path(home))
    found: dict[str, Any] = {}
    job.epoch("mon", "tue", None, ODD, "mon", ODD)
    found["written"] = job.rows()
    found["skipping"] = job.rows("at = timestamp_seconds(1700000004) AND price = 4")
    job.sql(
        "ALTER TABLE {table} SET TBLPROPERTIES ('delta.checkpointInterval' = '2',"
        " 'delta.enableDeletionVectors' = 'true')"
    )
    job.sql("INSERT INTO {table} SELECT 100 + id, 'thu', timestamp_seconds(0), 0 FROM range(10)")
    job.sql("OPTIMIZE {table}")
    job.sql("DELETE FROM {table} WHERE id IN (1, 105)")
    job.epoch("thu", "wed")
    found["after"] = job.rows()
    found |= generated(spark, Path(home)) | by_the_hour(spark, Path(home))
    found |= mapped(spark, Path(home))
    spark.stop()
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(*sys.argv[1:])) + "\n")
