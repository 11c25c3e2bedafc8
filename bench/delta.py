"""
[delta_append_spark] Epochs through `Delta`, against delta-spark's own streaming sink.
[delta_commit_history] The driver's commit as the table's history grows to 10,000 versions.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable

from bench.files_parquet import FILES_PER_EPOCH, ROUNDS, ROWS, write_source
from bench.harness import Comparison, say, stopwatch
from bench.postgres import TESTS
from epochal.contract import Begin, Task
from epochal.sinks.delta import Delta
from epochal.spark.local_session import local_builder
from epochal.spark.pipeline import Pipeline
from epochal.terms import EpochNumber, Generation, Identity, Limits, Uid

VERSIONS = 10_000
WINDOW = 200
SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])
_SNAPSHOT_TASKS = "spark.databricks.delta.snapshotPartitions"


def append_spark() -> Comparison:
    spark = (
        local_builder("bench", threads=2)
        .config("spark.jars", _jars())
        .config("spark.sql.extensions", "io.delta.sql.DeltaSparkSessionExtension")
        .config(
            "spark.sql.catalog.spark_catalog", "org.apache.spark.sql.delta.catalog.DeltaCatalog"
        )
        .getOrCreate()
    )
    comparison = Comparison(
        name="delta_append_spark",
        peer_name="delta-spark's own streaming sink",
        unit="rows/s",
        is_rate=True,
    )
    try:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "source"
            write_source(spark, source)

            def few_tasks() -> float:
                """delta-spark reads the log of a table by fifty tasks, after every commit."""
                spark.conf.set(_SNAPSHOT_TASKS, "2")
                try:
                    return _rows_per_s(spark, source, _theirs)
                finally:
                    spark.conf.unset(_SNAPSHOT_TASKS)

            comparison.run(
                lambda: _rows_per_s(spark, source, _ours),
                lambda: _rows_per_s(spark, source, _theirs),
                rounds=ROUNDS,
                beside={"peer_with_two_snapshot_partitions": few_tasks},
            )
    finally:
        spark.stop()
    return comparison


def _jars() -> str:
    sys.path.insert(0, str(TESTS))
    from servers.delta import jars  # noqa: PLC0415  of the tests, found above

    return str(jars())


def _ours(stream: Any, target: Path, checkpoint: Path) -> Any:
    pipeline = Pipeline("bench", sinks=[Delta(target, create_table="if_missing")])
    return pipeline.start(stream, checkpoint=str(checkpoint), availableNow=True)


def _theirs(stream: Any, target: Path, checkpoint: Path) -> Any:
    return (
        stream.writeStream.format("delta")
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start(str(target))
    )


def _rows_per_s(spark: Any, source: Path, start: Callable[..., Any]) -> float:
    schema = spark.read.parquet(str(source)).schema
    # A pipeline writes its last record after its query has ended.
    scratch = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    with scratch as name, stopwatch() as seconds:
        folder = Path(name)
        reader = spark.readStream.schema(schema).option("maxFilesPerTrigger", FILES_PER_EPOCH)
        stream = reader.parquet(str(source))
        start(stream, folder / "target", folder / "checkpoint").awaitTermination()
        elapsed_s = seconds()
        assert DeltaTable(str(folder / "target")).count() == ROWS
    return ROWS / elapsed_s


def commit_history(versions: int = VERSIONS) -> Comparison:
    """Ours: the last commits; the peer: the same on a young table. A ratio of 1 is flat."""
    comparison = Comparison(
        name="delta_commit_history",
        peer_name=f"the same commit below version {2 * WINDOW}",
        unit="ms",
        is_rate=False,
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "table"
        DeltaTable.create(str(folder), SCHEMA)
        times_ms = _commits(Delta(folder), versions)
    young, old = times_ms[WINDOW : 2 * WINDOW], times_ms[-WINDOW:]
    comparison.peer, comparison.ours = [statistics.median(young)], [statistics.median(old)]
    comparison.beside = {
        f"median_ms_below_{end}": round(statistics.median(times_ms[end - WINDOW : end]), 2)
        for end in (500, 1000, 2000, 5000, 10_000)
        if end <= versions
    }
    return comparison


def _commits(sink: Delta, versions: int) -> list[float]:
    identity = Identity(
        pipeline="bench", uid=Uid("abcdefgh2345"), sink=sink.name, generation=Generation(1)
    )
    committer = sink.committer(identity, Limits())
    handout = committer.begin(Begin(epoch=EpochNumber(0)))
    batch = pa.record_batch({"id": [1], "name": ["one"]}, schema=SCHEMA)
    times_ms = []
    for number in range(versions):
        epoch = EpochNumber(number)
        handle = identity.handle(epoch, partition=0, attempt=number)
        writer = sink.writer(Task(handle=handle, schema=SCHEMA, handout=handout))
        writer.write(batch)
        receipt = writer.prepare()
        with stopwatch() as seconds:
            committer.commit(epoch, [receipt])
            times_ms.append(seconds() * 1000)
        if number % 1000 == 999:
            say(f"delta_commit_history: {number + 1} versions, {times_ms[-1]:.1f} ms")
    return times_ms


RUNS = {"delta_append_spark": append_spark, "delta_commit_history": commit_history}
