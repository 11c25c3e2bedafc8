"""A pipeline's file as a `Pipeline`, with its Spark session, its stream and its gates."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from epochal.config.file import GatePart, PipelineFile, SourcePart, StepPart, read_file
from epochal.coordinator import Gate, PreparedEpoch
from epochal.errors import Misconfigured
from epochal.registry import imported
from epochal.spark.error_text import spark_message
from epochal.spark.local_session import local_builder, quiet
from epochal.spark.pipeline import Pipeline
from epochal.spark.projection import empty_like
from epochal.spark.versions import UNIX_SOCKETS, require_startable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_BEFORE = "input"
_BATCH = "batch"
_THREADS = 2


SUFFIXES = (".yaml", ".yml")


def is_file(where: str) -> bool:
    return where.endswith(SUFFIXES)


def file_at(path: Path, *, is_to_run: bool = False) -> PipelineFile:
    """Read a pipeline's file; raises `Mistakes` with every line that is wrong."""
    return read_file(path, finds_names=is_to_run)


def pipeline_of(file: PipelineFile, gates: Iterable[Gate] = ()) -> Pipeline:
    """The declared pipeline. Gates may be left out where no query runs that would ask them."""
    return Pipeline(
        file.pipeline,
        sinks=file.sinks,
        gates=gates,
        limits=file.limits,
        log=file.log,
        checkpoint=file.checkpoint,
        fingerprint=file.fingerprint,
        metrics_port=file.metrics.port,
        metrics_host=file.metrics.host,
    )


def session_of(file: PipelineFile) -> SparkSession:
    """The session that the file asks for, or the one that `spark-submit` has started."""
    part = file.spark
    builder = _builder(f"epochal {file.pipeline}", part.master)
    settings = {
        "spark.master": part.master,
        "spark.jars.packages": ",".join(part.packages) or None,
        "spark.jars": ",".join(part.jars) or None,
        **part.conf,
    }
    for key, value in settings.items():
        if value is not None:
            builder = builder.config(key, value)
    return builder.getOrCreate()


def _builder(name: str, master: str | None) -> SparkSession.Builder:
    is_started = "PYSPARK_GATEWAY_PORT" in os.environ  # by spark-submit, with settings of its own
    if not is_started:
        require_startable()
    from pyspark.sql import SparkSession  # noqa: PLC0415  importable without pyspark

    if is_started:
        return SparkSession.builder.appName(name)
    if not (master or "local").startswith("local"):
        return SparkSession.builder.appName(name).config(UNIX_SOCKETS, True)
    return quiet(local_builder(name, threads=_THREADS))


def stream_of(file: PipelineFile, spark: SparkSession) -> DataFrame:
    """The stream that the sinks get."""
    streams = {name: _read(spark, name, part) for name, part in file.streams.items()}
    for name, frame in streams.items():
        frame.createOrReplaceTempView(name)
    current = next(iter(streams.values()))
    for at, step in enumerate(file.steps):
        current = _without_stack(f"steps[{at}]", partial(_step, spark, current, step))
        if step.name:
            current.createOrReplaceTempView(step.name)
    return current


def _read(spark: SparkSession, name: str, part: SourcePart) -> DataFrame:
    reader = spark.readStream.format(part.format).options(**part.options)
    if part.schema is not None:
        reader = reader.schema(part.schema)
    return _without_stack(f"source {name!r}", lambda: reader.load(part.path))


def _step(spark: SparkSession, frame: DataFrame, step: StepPart) -> DataFrame:
    if step.sql is not None:
        frame.createOrReplaceTempView(_BEFORE)
        return spark.sql(step.sql)
    if step.select is not None:
        return frame.selectExpr(*step.select)
    if step.where is not None:
        return frame.where(step.where)
    for column, delay in (step.watermark or {}).items():
        frame = frame.withWatermark(column, delay)
    return frame


def gates_of(parts: Sequence[GatePart], stream: DataFrame) -> list[Gate]:
    """The gates of a file. Queries are tried on no rows first: a gate that fails stops a query."""
    return [
        _function(part.python)
        if part.python is not None
        else _query_gate(f"gates[{at}]", part.sql or "", stream)
        for at, part in enumerate(parts)
    ]


def _function(path: str) -> Gate:
    gate: Gate = imported(path)
    if not callable(gate):
        raise Misconfigured(
            f"gates: {path} is a {type(gate).__name__}, not a function",
            "name a function of the prepared epoch: python: module:function",
        )
    return gate


def _query_gate(where: str, query: str, stream: DataFrame) -> Gate:
    def ask(batch: DataFrame) -> DataFrame:
        batch.createOrReplaceTempView(_BATCH)
        return batch.sparkSession.sql(query)

    def gate(epoch: PreparedEpoch) -> str | None:
        refused = [row for row in ask(epoch.frame).collect() if not row[0]]
        return f"{query} gave {refused[0].asDict()}" if refused else None

    _without_stack(where, lambda: ask(empty_like(stream)))
    gate.__name__ = repr(query)
    return gate


def _without_stack(where: str, work: Callable[[], DataFrame]) -> DataFrame:
    """Spark's message about a source or a query that it does not understand, without its stack."""
    from py4j.protocol import Py4JError  # noqa: PLC0415  comes with Spark
    from pyspark.errors import PySparkException  # noqa: PLC0415  importable without pyspark

    try:
        return work()
    except (PySparkException, Py4JError) as error:
        raise Misconfigured(f"{where}: {spark_message(error)}", _hint(str(error))) from None


_PACKAGES: Mapping[str, str] = {
    "kafka": "org.apache.spark:spark-sql-kafka-0-10_{scala}:{spark}",
    "delta": "io.delta:delta-spark_{scala}:…",
    "hudi": "org.apache.hudi:hudi-spark3.5-bundle_{scala}:…",
    "iceberg": "org.apache.iceberg:iceberg-spark-runtime-{minor}_{scala}:…",
}
"""What brings formats that Spark does not have by itself."""


def _hint(text: str) -> str:
    if "DATA_SOURCE_NOT_FOUND" not in text and "Failed to find data source" not in text:
        return ""
    from pyspark import __version__ as spark  # noqa: PLC0415  importable without pyspark

    package = next((one for word, one in _PACKAGES.items() if word in text.lower()), None)
    if package is None:
        return ""
    scala = "2.12" if spark.startswith("3.") else "2.13"
    named = package.format(scala=scala, spark=spark, minor=spark.rpartition(".")[0])
    return f"spark: {{packages: [{named}]}}"
