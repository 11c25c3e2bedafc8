"""
The log and the sinks of a target that is named on the command line.

    jobs.orders:pipeline      a Pipeline, or a function that returns one: its log and its targets
    orders.yaml               a pipeline's file: the same
    s3://lake/chk/orders      a checkpoint, the folder of a once-only load, or a log: the log alone

With the log alone a command shows what the log knows, which includes descriptions of the sinks free
of secrets, and names what it can't query.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from epochal.config.pipeline import file_at, is_file, pipeline_of, session_of, stream_of
from epochal.contract import Sink
from epochal.coordinator.journal import EpochLog
from epochal.errors import Misconfigured
from epochal.logs import checkpoint_log, open_log
from epochal.registry import imported, is_import_path
from epochal.spark.local_session import quiet_session
from epochal.spark.pipeline import Pipeline
from epochal.terms import DEFAULT_LIMITS, Limits

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_THREADS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Streaming:
    """How a pipeline's stream is made anew."""

    session: Callable[[], SparkSession]
    stream: Callable[[SparkSession], DataFrame]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedTarget:
    """The log and the sinks that a command works with."""

    target: str
    """As the person named it."""
    log: EpochLog | None
    """None for a pipeline that declares no checkpoint."""
    pipeline: str | None = None
    """The declared name; None where only the log is known."""
    sinks: Sequence[Sink] | None = None
    limits: Limits = field(default=DEFAULT_LIMITS)
    streaming: Streaming | None = None
    """None where nothing but the sinks is declared."""

    def require_log(self) -> EpochLog:
        if self.log is None:
            raise Misconfigured(
                f"{self.target} names no checkpoint, and this command needs its epoch log",
                "give --checkpoint PLACE, or declare it: Pipeline(…, checkpoint=…)",
            )
        return self.log

    def require_sinks(self) -> Sequence[Sink]:
        if self.sinks is None:
            raise Misconfigured(
                f"{self.target} is a place, and a log holds no credentials: its targets can't be "
                "reached from here",
                "name the pipeline instead: its YAML file, or "
                f"`module:pipeline --checkpoint {self.target}`",
            )
        return self.sinks

    def require_streaming(self) -> Streaming:
        if self.streaming is None:
            raise Misconfigured(
                f"{self.target} does not say what its stream is",
                "give --stream module:function, a function of the session that returns the stream",
            )
        return self.streaming


def open_target(target: str | Pipeline, *, checkpoint: str | None = None) -> OpenedTarget:
    """The log and, where a pipeline was named, the sinks that a person means."""
    if isinstance(target, Pipeline):
        return _of_pipeline(target.name, target, checkpoint)
    if is_import_path(target):
        return _of_pipeline(target, _pipeline(target, imported(target)), checkpoint)
    if is_file(target):
        file = file_at(Path(target))
        opened = _of_pipeline(target, pipeline_of(file), checkpoint)
        return replace(
            opened,
            streaming=Streaming(session=partial(session_of, file), stream=partial(stream_of, file)),
        )
    if checkpoint is not None:
        raise Misconfigured(
            f"{target} is a place, and so is --checkpoint {checkpoint}",
            f"give one of them; or name the pipeline: `module:pipeline --checkpoint {checkpoint}`",
        )
    return OpenedTarget(target=target, log=log_at(target))


def names_pipeline(target: str) -> bool:
    """Whether a person names a pipeline by its module or file, and not a place."""
    return is_import_path(target) or is_file(target)


def streaming_by(function: str) -> Streaming:
    """The stream that a function of the session returns, in a local Spark or a submitted one."""
    stream = imported(function)
    if not callable(stream):
        raise Misconfigured(
            f"{function} is a {type(stream).__name__}, not a function",
            "name a function that takes the session and returns the streaming DataFrame",
        )
    session = partial(quiet_session, "epochal verify", threads=_THREADS)
    return Streaming(session=session, stream=stream)


def log_at(place: str) -> EpochLog:
    """The log inside a checkpoint; else of a once-only load; else the place is a log itself."""
    if place.startswith(("sqlite:", "postgres:", "postgresql:", "etcd:", "etcds:")):
        return open_log(place)
    candidates = [checkpoint_log(place), open_log(f"{place.rstrip('/')}/log"), open_log(place)]
    return next((log for log in candidates if log.numbers()), candidates[0])


def _of_pipeline(target: str, pipeline: Pipeline, checkpoint: str | None) -> OpenedTarget:
    # A checkpoint that is named by hand may be that of a once-only load of the same pipeline.
    log = None if checkpoint is None else log_at(checkpoint)
    if pipeline.has_own_log or (log is None and pipeline.checkpoint is not None):
        log = pipeline.log_of(checkpoint)
    return OpenedTarget(
        target=target,
        log=log,
        pipeline=pipeline.name,
        sinks=pipeline.sinks,
        limits=pipeline.limits,
    )


def _pipeline(target: str, found: object) -> Pipeline:
    if not isinstance(found, Pipeline) and callable(found):
        found = found()
    if not isinstance(found, Pipeline):
        raise Misconfigured(
            f"{target} is a {type(found).__name__}, not a Pipeline",
            "name a Pipeline of that module, or a function that returns one",
        )
    return found
