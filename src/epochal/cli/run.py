"""`epochal run`: a pipeline without code, from its file to its end."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from epochal.assembly.frames import gates_of, session_of, stream_of
from epochal.assembly.pipelines import file_at, pipeline_of
from epochal.cli.progress import progress_of
from epochal.config.file import MetricsPart, PipelineFile, TriggerPart
from epochal.errors import EpochalError
from epochal.spark.pipeline import Pipeline
from epochal.spark.query_options import Trigger
from epochal.telemetry.switchboard import push_otlp

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_LOOK_EVERY_S = 0.5


def run(
    file: Annotated[
        Path, typer.Argument(metavar="PIPELINE.YAML", help="`epochal init` makes one.")
    ],
    available_now: Annotated[
        bool,
        typer.Option("--available-now", help="Write all that the source has now, then stop."),
    ] = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="Ask every target what it can promise, and write nothing."),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")] = False,
) -> None:
    """
    Run the pipeline that a YAML file declares.

    Starts where the last run ended, and first carries out what that one had decided. SIGTERM and
    Ctrl-C finish the epoch that is being written, or abort it cleanly.

    Example: epochal run orders.yaml
    """
    declared = file_at(file, is_to_run=True)
    if available_now:
        declared = replace(declared, trigger=TriggerPart(available_now=True))
    spark = session_of(declared)
    spark.sparkContext.setLogLevel("ERROR")
    try:
        stream = stream_of(declared, spark)
        pipeline = pipeline_of(declared, gates=gates_of(declared.gates, stream))
        if check:
            sys.stdout.write(f"{pipeline.check(stream)}\n")
            return
        with _pushing(declared.metrics):
            query = pipeline.start(
                stream,
                checkpoint=declared.checkpoint,
                run=declared.run,
                outputMode=declared.output_mode,
                trigger=_trigger(declared),
            )
            _follow(query, pipeline, quiet=quiet)
    finally:
        _leave(spark)


@contextmanager
def _pushing(metrics: MetricsPart) -> Iterator[None]:
    """Switched on before the pipeline starts; what is left to push goes at the end."""
    push = push_otlp() if metrics.otlp else None
    try:
        yield
    finally:
        if push is not None:
            push.close()


def _leave(spark: SparkSession) -> None:
    from py4j.protocol import Py4JError  # noqa: PLC0415  comes with Spark

    try:
        spark.stop()
    except (ConnectionError, Py4JError):
        # A signal to the whole process group ends Spark's JVM as well: nothing is left to stop.
        sys.stderr.write("Spark's JVM is gone; the next start finishes what is decided\n")


def _trigger(file: PipelineFile) -> Trigger:
    if file.trigger.available_now:
        return {"availableNow": True}
    if file.trigger.processing_time is not None:
        return {"processingTime": file.trigger.processing_time}
    return {}


def _follow(query: StreamingQuery, pipeline: Pipeline, *, quiet: bool) -> None:
    """Show what happens until the query ends, by itself or because somebody asked."""
    asked = threading.Event()
    with _on_signals(asked), progress_of(pipeline, quiet=quiet) as show:
        try:
            while query.isActive and not asked.is_set():
                asked.wait(_LOOK_EVERY_S)
                show()
        finally:
            _stop(query, pipeline)
            show()
    if pipeline.error is not None:
        raise pipeline.error
    _raise_what_spark_says(query, asked_to_stop=asked.is_set())


def _stop(query: StreamingQuery, pipeline: Pipeline) -> None:
    if query.isActive:
        query.stop()
    pipeline.close()


def _raise_what_spark_says(query: StreamingQuery, *, asked_to_stop: bool) -> None:
    error = query.exception()
    if error is not None and not asked_to_stop:
        raise EpochalError(
            f"the query stopped: {str(error).partition('JVM stacktrace')[0].strip()}"
        )


@contextmanager
def _on_signals(asked: threading.Event) -> Iterator[None]:
    """SIGTERM and Ctrl-C ask; they don't interrupt an epoch in the middle."""
    before = {
        number: signal.signal(number, lambda *_: asked.set())
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
