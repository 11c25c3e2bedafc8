"""`epochal run`: run the pipeline of a YAML file, and show its progress."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from epochal.cli.output import UnfinishedBatch
from epochal.config.file import MetricsPart, PipelineFile, TriggerPart
from epochal.config.pipeline import file_at, gates_of, pipeline_of, session_of, stream_of
from epochal.coordinator import EpochFigures
from epochal.errors import EpochalError, TaskFailed
from epochal.protocol.admission import Unfinished
from epochal.protocol.machine import Phase
from epochal.spark.active_runs import is_active, stop_query
from epochal.spark.local_session import log_uncaught_exceptions
from epochal.spark.pipeline import Pipeline
from epochal.spark.query_options import Trigger
from epochal.telemetry.exporters import push_otlp
from epochal.terms import quantity

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from epochal.spark.standby import Standby

_POLL_EVERY_S = 0.5
_EPOCHS_SHOWN = 8
_EPOCHS_PRINTED_MAX = 1000
_RATE_EPOCHS = 20
_Show = Callable[[], None]


def run(
    file: Annotated[
        Path,
        typer.Argument(metavar="PIPELINE.YAML", help="`epochal init` writes an example."),
    ],
    *,
    available_now: Annotated[
        bool,
        typer.Option("--available-now", help="Write all rows that the source has now, then stop."),
    ] = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="Query every target's abilities, and write nothing."),
    ] = False,
    standby: Annotated[
        bool,
        typer.Option(
            "--standby", help="Warm up, and wait until no other driver works on the pipeline."
        ),
    ] = False,
    lease: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Where standbys agree whose turn it is; beside the epoch log if not given.",
        ),
    ] = None,
    retarget: Annotated[
        list[str] | None,
        typer.Option(metavar="SINK", help="A sink that writes to another target from now on."),
    ] = None,
    unfinished: UnfinishedBatch = Unfinished.ASK,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")] = False,
) -> None:
    """
    Run the pipeline that a YAML file declares.

    Continues where the last run ended, and first commits the epoch that it had decided. SIGTERM and
    Ctrl-C stop it cleanly: the epoch in progress is finished or aborted. A SIGINT that the caller
    ignores, as shells do for background jobs of scripts, stays ignored.

    With --standby any number of drivers may run: one works, the others wait, and one of them takes
    over within seconds where it dies. `--lease` takes etcd://…/prefix, postgresql://…#name, s3://….

    Example: epochal run orders.yaml
    """
    declared = file_at(file, is_to_run=True)
    if available_now:
        declared = replace(declared, trigger=TriggerPart(available_now=True))
    signals = _StopSignals()
    spark = session_of(declared)
    with signals:
        spark.sparkContext.setLogLevel("ERROR")
        log_uncaught_exceptions()
        try:
            stream = stream_of(declared, spark)
            pipeline = pipeline_of(declared, gates=gates_of(declared.gates, stream))
            if check:
                sys.stdout.write(f"{pipeline.check(stream)}\n")
                return
            if signals.requested.is_set():
                return
            options: dict[str, Any] = {
                "checkpoint": declared.checkpoint,
                "run": declared.run,
                "retarget": retarget or (),
                "unfinished": unfinished.value,
                "outputMode": declared.output_mode,
                "trigger": _trigger(declared),
            }
            with _pushing(declared.metrics):
                if standby or lease is not None:
                    build = partial(stream_of, declared, spark)
                    waiting = pipeline.start(build, standby=lease or True, **options)
                    _follow_standby(waiting, pipeline, signals.requested, quiet=quiet)
                    return
                query = pipeline.start(stream, **options)
                _follow(query, pipeline, signals.requested, quiet=quiet)
        finally:
            _stop_spark(spark)


@contextmanager
def _pushing(metrics: MetricsPart) -> Iterator[None]:
    """Push metrics while the block runs; the rest is pushed at its end."""
    push = push_otlp() if metrics.otlp else None
    try:
        yield
    finally:
        if push is not None:
            push.close()


def _stop_spark(spark: SparkSession) -> None:
    from py4j.protocol import Py4JError  # noqa: PLC0415  comes with Spark

    try:
        spark.stop()
    except (ConnectionError, Py4JError):
        # A signal to the process group ends Spark's JVM as well.
        sys.stderr.write("Spark's JVM has exited; the next start commits what is decided\n")


def _trigger(file: PipelineFile) -> Trigger:
    if file.trigger.available_now:
        return {"availableNow": True}
    if file.trigger.processing_time is not None:
        return {"processingTime": file.trigger.processing_time}
    return {}


def _follow(
    query: StreamingQuery, pipeline: Pipeline, stop_requested: threading.Event, *, quiet: bool
) -> None:
    """Show progress until the query ends or a signal arrives."""
    with _progress_of(pipeline, quiet=quiet) as show:
        try:
            while is_active(query) and not stop_requested.is_set():
                stop_requested.wait(_POLL_EVERY_S)
                show()
        finally:
            _stop(query, pipeline)
            show()
    error = pipeline.error
    # A signal to the process group ends Spark's JVM as well, and with it the epoch in progress.
    if error is not None and not (stop_requested.is_set() and isinstance(error, TaskFailed)):
        raise error
    if not stop_requested.is_set():
        _raise_error_of(query)


def _follow_standby(
    standby: Standby, pipeline: Pipeline, stop_requested: threading.Event, *, quiet: bool
) -> None:
    """Show its role and its progress until it ends or a signal arrives."""
    role = None
    with _progress_of(pipeline, quiet=quiet) as show:
        try:
            while standby.isActive and not stop_requested.is_set():
                if standby.role is not role and not quiet:
                    role = standby.role
                    sys.stderr.write(f"{pipeline.name}: standby: {role.value}\n")
                    sys.stderr.flush()
                stop_requested.wait(_POLL_EVERY_S)
                show()
        finally:
            pipeline.close()
            show()
    if not stop_requested.is_set():
        standby.awaitTermination()


def _stop(query: StreamingQuery, pipeline: Pipeline) -> None:
    if is_active(query):
        stop_query(query)
    pipeline.close()


def _raise_error_of(query: StreamingQuery) -> None:
    from py4j.protocol import Py4JError  # noqa: PLC0415  comes with Spark

    try:
        error = query.exception()
    except (ConnectionError, Py4JError):
        raise EpochalError("Spark's JVM has exited", "start again") from None
    if error is not None:
        raise EpochalError(
            f"the query stopped: {str(error).partition('JVM stacktrace')[0].strip()}"
        )


class _StopSignals:
    """
    SIGTERM and SIGINT request a stop instead of interrupting the start or the epoch in progress; a
    second signal interrupts it.

    A signal that the caller ignores stays ignored: Ctrl-C at a script must not stop the pipelines
    that the script started in the background. Made before Spark starts, whose context takes SIGINT
    for itself in any case; entered after it.
    """

    def __init__(self) -> None:
        self.requested = threading.Event()
        self._before = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)}

    def __enter__(self) -> Self:
        for number, handler in self._before.items():
            is_ignored = handler is signal.SIG_IGN
            signal.signal(number, signal.SIG_IGN if is_ignored else self._request)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _request(self, *_: object) -> None:
        if self.requested.is_set():
            raise KeyboardInterrupt
        self.requested.set()


@contextmanager
def _progress_of(pipeline: Pipeline, *, quiet: bool) -> Iterator[_Show]:
    """Yield a function that shows the current progress: as a table on a terminal, else as lines."""
    if quiet:
        yield lambda: None
    elif sys.stderr.isatty():
        with Live(console=Console(stderr=True), auto_refresh=False, transient=False) as live:
            yield lambda: live.update(_table(pipeline), refresh=True)
    else:
        yield _Lines(pipeline)


class _Lines:
    """Prints every ended epoch once."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._printed: tuple[float, int] = (0.0, -1)

    def __call__(self) -> None:
        for figures in self._pipeline.last_epochs(_EPOCHS_PRINTED_MAX):
            mark = (figures.opened_at, int(figures.epoch))
            if figures.finished_at is not None and mark > self._printed:
                self._printed = mark
                sys.stderr.write(f"{self._pipeline.name}: {_line(figures)}\n")
        sys.stderr.flush()


def _line(figures: EpochFigures) -> str:
    sinks = ", ".join(
        f"{name} {quantity(sink.rows, 'row')}" for name, sink in figures.sinks.items()
    )
    return f"epoch {figures.epoch} {figures.phase.value} in {_spent(figures)} ({sinks or 'empty'})"


def _spent(figures: EpochFigures) -> str:
    return f"{sum(figures.seconds.values()):.2f} s"


def _table(pipeline: Pipeline) -> Table:
    epochs = pipeline.last_epochs(_RATE_EPOCHS)
    metrics = pipeline.metrics()
    table = Table(
        title=f"{pipeline.name} · {quantity(metrics.commits, 'epoch')}, "
        f"{quantity(metrics.rows, 'row')}, {_rate_of(epochs):,.0f} rows/s",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    for column in ("epoch", "phase", "rows", "prepare", "rehearse", "commit"):
        table.add_column(column, justify="left" if column == "phase" else "right")
    for figures in epochs[-_EPOCHS_SHOWN:]:
        table.add_row(
            str(figures.epoch),
            figures.phase.value,
            str(figures.rows),
            *(_ms(figures, phase) for phase in (Phase.PREPARING, Phase.PREPARED, Phase.COMMITTING)),
        )
    return table


def _ms(figures: EpochFigures, phase: Phase) -> str:
    seconds = figures.seconds.get(phase)
    return "" if seconds is None else f"{seconds * 1000:.0f} ms"


def _rate_of(epochs: Sequence[EpochFigures]) -> float:
    """Return the rows per second of the ended epochs."""
    done = [one for one in epochs if one.finished_at is not None]
    if not done:
        return 0.0
    first, last = done[0].opened_at, max(one.finished_at or 0.0 for one in done)
    return sum(one.rows for one in done) / max(last - first, 1e-3)
