"""
The pipeline door: what a user declares once and starts on any streaming DataFrame.

Importable without pyspark, so that tools reach the targets of a declared pipeline without Spark.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from epochal.clock import SystemClock
from epochal.contract import DEFAULT_LIMITS, EpochLog, Limits, Sink
from epochal.coordinator import (
    Coordinator,
    EpochFigures,
    Gate,
    Metrics,
    Surroundings,
    Tracker,
    life,
    this_driver,
)
from epochal.coordinator.rejecting import check_schemas
from epochal.coordinator.starting import by_name, described
from epochal.coordinator.surroundings import Watch, mint_uid, watch_nothing
from epochal.errors import EpochalError, Misconfigured
from epochal.logs import checkpoint_log, open_log
from epochal.protocol.admission import Start, Unfinished
from epochal.spark.active_runs import Run, query_id_of, require_query_of, take_over
from epochal.spark.checkpoint import Checkpoint, open_checkpoint
from epochal.spark.epoch import Runner
from epochal.spark.error_text import presented
from epochal.spark.plan_analysis import is_narrow, is_stateless
from epochal.spark.projection import arrow_schema, empty_like, taken_by
from epochal.spark.report import CheckReport, Written, in_html, in_text
from epochal.spark.triggers import require_mode, trigger_words
from epochal.spark.versions import require_classic, require_streaming, require_supported
from epochal.telemetry.switchboard import attach, serve_metrics
from epochal.terms import EpochNumber, Generation, Identity, SinkName

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

Place = str | os.PathLike[str]
EachBatch = Callable[["DataFrame", int], None]

_RUN_KEY_SAFE = re.compile(r"[^A-Za-z0-9._-]+")
_RUN_KEY_CHARS_MAX = 60
_ONLY_EPOCH = EpochNumber(0)


class Pipeline:
    """
    Named sinks under one decision: each micro-batch appears in all of them once, or in none.

    `gates` are functions of the prepared epoch that may still refuse it. `log` is where decisions
    live, inside the checkpoint by default. `checkpoint` is where `start` goes unless it is told
    otherwise, and where `epochal recover module:pipeline` and its like look. `fingerprint=False`
    saves the hashing of rows, and with it the proof by which rows that a target lost could be
    written again. `metrics_port` serves metrics for Prometheus while the driver lives.
    """

    def __init__(
        self,
        name: str,
        sinks: Sequence[Sink],
        gates: Iterable[Gate] = (),
        *,
        limits: Limits = DEFAULT_LIMITS,
        log: Place | None = None,
        checkpoint: Place | None = None,
        fingerprint: bool = True,
        metrics_port: int | None = None,
        metrics_host: str = "127.0.0.1",
        watch: Watch = watch_nothing,
    ) -> None:
        if not name:
            raise Misconfigured("a pipeline needs a name", 'Pipeline("orders", sinks=[…])')
        self.name = name
        self.sinks = tuple(sinks)
        self.gates = tuple(gates)
        self.limits = limits
        self.checkpoint = checkpoint
        self._log = log
        self._fingerprint = fingerprint
        self._metrics_port = metrics_port
        self._metrics_host = metrics_host
        self._watch = watch
        self._run: Run | None = None
        self._tracker = Tracker(SystemClock())
        by_name(self.sinks)  # refuses at once what could never start: no sinks, or two of one name

    # The doors

    def start(
        self,
        df: DataFrame,
        checkpoint: Place | None = None,
        *,
        run: str | None = None,
        output_mode: str = "append",
        query_name: str | None = None,
        unfinished: str = "ask",
        retarget: Collection[str] = (),
        **trigger: Any,
    ) -> StreamingQuery:
        """
        Start a query that writes each micro-batch exactly once. Spark's own trigger words follow:
        `processingTime=`, `availableNow=`, `once=`.

        The pipeline is claimed before the query starts; from then on no other driver decides on it.
        """
        self._require_spark(df.sparkSession)
        require_streaming(df)
        words = trigger_words(trigger)
        require_mode(output_mode, self.sinks)
        # Asked now: once the query runs, a batch's plan no longer shows what it was made from.
        stateless, narrow = is_stateless(df), is_narrow(df)
        started = self._claim(
            df.sparkSession,
            self._place(checkpoint),
            schemas=self._schemas(df),
            stateless=stateless,
            narrow=narrow,
            run=run,
            unfinished=unfinished,
            retarget=retarget,
        )
        try:
            writer = df.writeStream.foreachBatch(started.epoch).outputMode(output_mode)
            writer = writer.option("checkpointLocation", started.location)
            writer = writer.queryName(query_name or self.name)
            query = (writer.trigger(**words) if words else writer).start()
        except BaseException:
            started.end()
            raise
        started.end_with(query)
        return query

    def each_batch(
        self,
        checkpoint: Place | None = None,
        *,
        spark: SparkSession | None = None,
        run: str | None = None,
        unfinished: str = "ask",
        retarget: Collection[str] = (),
    ) -> EachBatch:
        """
        The function for existing `writeStream.foreachBatch(…)` code, which keeps its own
        `checkpointLocation`: the same as is given here.

        Claims at once, and again when a later query runs with the same function. The plan is not
        known here, so each batch counts as one with state: it is evaluated before it is written.
        """
        session = spark or _active_session()
        self._require_spark(session)
        place = self._place(checkpoint)

        def claim() -> Run:
            return self._claim(
                session,
                place,
                schemas={},
                stateless=False,
                narrow=False,
                run=run,
                unfinished=unfinished,
                retarget=retarget,
            )

        return _EachBatch(session, claim)

    def write(self, df: DataFrame, *, run: str, checkpoint: Place) -> Written:
        """
        Load a batch DataFrame once: whoever calls this again with the same `run` writes nothing.

        What an earlier call left decided is carried out first. The log of the run is below the
        checkpoint, which may be the pipeline's own or a folder of its own.
        """
        self._require_spark(df.sparkSession)
        if df.isStreaming:
            raise Misconfigured(
                "write() takes a batch; this DataFrame is a stream", "start(df, checkpoint=…)"
            )
        place = self._run_place(checkpoint, run, df.sparkSession)
        coordinator = self._coordinator(open_log(f"{place}/log", spark=df.sparkSession))
        if self._run is None or self._run.is_over:
            self._tracker = coordinator.tracker
        try:
            start = self._start(location=place, run=run)
            coordinator.start(start, self._schemas(df))
            is_repeat = coordinator.state.last is not None
            if not is_repeat or coordinator.lost:
                runner = self._runner(coordinator, stateless=True, narrow=is_narrow(df))
                runner.run(df, _ONLY_EPOCH)
            last = coordinator.state.last
            rows = {} if last is None else dict(last.rows)
        finally:
            coordinator.stop()
        return Written(run=run, rows=rows, is_repeat=is_repeat)

    def check(self, df: DataFrame | None = None) -> CheckReport:
        """
        Ask every target what it can promise, for the rows of `df` where it is given.

        Raises `Misconfigured` with the fact and the way out where one can't keep the promise.
        Changes nothing that a reader of any target sees.
        """
        if df is not None:
            self._require_spark(df.sparkSession)
        schemas = {} if df is None else dict(self._schemas(df))
        abilities = {}
        for name, sink in by_name(self.sinks).items():
            who = Identity(pipeline=self.name, uid=mint_uid(), sink=name, generation=Generation(0))
            committer = sink.committer(who, self.limits)
            try:
                abilities[name] = tuple(committer.check(schemas.get(name)))
                schemas.update(check_schemas({name: sink}, {name: committer}, {}))
            finally:
                committer.close()
        return CheckReport(pipeline=self.name, abilities=abilities)

    @property
    def has_own_log(self) -> bool:
        """Decisions live elsewhere than in the checkpoint: `log=` was given."""
        return self._log is not None

    def log_of(self, checkpoint: Place | None = None) -> EpochLog:
        """The epoch log of this pipeline on a checkpoint, for tools that look without Spark."""
        if self._log is not None:
            return open_log(self._log)
        return checkpoint_log(self._place(checkpoint))

    # What became of it

    @property
    def error(self) -> EpochalError | None:
        """The error that stopped the last query, with its class and hint; None where none did."""
        return None if self._run is None else self._run.error

    def close(self) -> None:
        """Wait until the epoch that is being written has ended, and leave in good order."""
        if self._run is not None:
            self._run.end()

    def last_epochs(self, count: int = 20) -> Sequence[EpochFigures]:
        """The newest epochs of the query that runs, or of the last start, oldest first."""
        return self._tracker.last_epochs(count)

    def metrics(self) -> Metrics:
        """Counters and latencies of the query that runs, or of the last start."""
        return self._tracker.metrics()

    # Identity: each is one record of the epoch log

    def adopt(self, checkpoint: Place, *, unfinished: str = "ask") -> None:
        """This checkpoint was moved here, or other code ran it meanwhile: go on where it is."""
        spark = _session_or_none()
        found = open_checkpoint(checkpoint, spark)
        life.adopt(
            self._log_of(checkpoint, spark),
            location=found.location,
            query_id=found.query_id,
            position=found.position,
            unfinished=_unfinished(unfinished),
        )

    def fork(self, checkpoint: Place, *, original_lives: bool = False) -> None:
        """
        This checkpoint is a copy: from here on it is a pipeline of its own. `original_lives` says
        that the original will carry out what is decided.
        """
        spark = _session_or_none()
        life.fork(
            self._log_of(checkpoint, spark),
            location=open_checkpoint(checkpoint, spark).location,
            is_original_alive=original_lives,
        )

    def rename(self, checkpoint: Place) -> None:
        """This checkpoint belongs to this pipeline under its present name."""
        life.rename(self._log_of(checkpoint, _session_or_none()), pipeline=self.name)

    # Notebooks

    def __repr__(self) -> str:
        return in_text(self.name, self.sinks, self._status(), self.last_epochs())

    def _repr_html_(self) -> str:
        return in_html(self.name, self.sinks, self._status(), self.last_epochs())

    # Inside

    def _place(self, checkpoint: Place | None) -> Place:
        place = self.checkpoint if checkpoint is None else checkpoint
        if place is None:
            raise Misconfigured(
                f"pipeline {self.name!r} has no checkpoint",
                "name one where it starts, or once for all: Pipeline(…, checkpoint=…)",
            )
        return place

    def _claim(
        self,
        spark: SparkSession,
        checkpoint: Place,
        *,
        schemas: Mapping[SinkName, pa.Schema],
        stateless: bool,
        narrow: bool,
        run: str | None,
        unfinished: str,
        retarget: Collection[str],
    ) -> Run:
        folder = open_checkpoint(checkpoint, spark)

        def claim() -> Run:
            coordinator = self._coordinator(self._log_of(folder.location, spark))
            self._tracker = coordinator.tracker
            start = self._start(
                location=folder.location,
                run=run,
                folder=folder,
                unfinished=_unfinished(unfinished),
                retarget=retarget,
            )
            try:
                coordinator.start(start, schemas)
            except BaseException:
                coordinator.stop()
                raise
            runner = self._runner(coordinator, stateless=stateless, narrow=narrow)
            return Run(coordinator=coordinator, runner=runner, checkpoint=folder)

        self._run = take_over(folder.location, claim)
        return self._run

    def _start(
        self,
        *,
        location: str,
        run: str | None,
        folder: Checkpoint | None = None,
        unfinished: Unfinished = Unfinished.ASK,
        retarget: Collection[str] = (),
    ) -> Start:
        found = {} if folder is None else {"query_id": folder.query_id, "position": folder.position}
        return Start(
            pipeline=self.name,
            location=location,
            sinks=described(self.sinks),
            driver=this_driver(),
            run=run,
            unfinished=unfinished,
            retarget=[SinkName(name) for name in retarget],
            fence=self.limits.fence_on_start,
            **found,  # type: ignore[arg-type]
        )

    def _coordinator(self, log: EpochLog) -> Coordinator:
        coordinator = Coordinator(
            log=log,
            sinks=self.sinks,
            gates=self.gates,
            limits=self.limits,
            around=Surroundings(watch=self._watch),
        )
        if self._metrics_port is not None:
            serve_metrics(self._metrics_port, self._metrics_host)
        attach(coordinator.tracker, log, self.limits)
        return coordinator

    def _runner(self, coordinator: Coordinator, *, stateless: bool, narrow: bool) -> Runner:
        return Runner(
            pipeline=self.name,
            coordinator=coordinator,
            sinks=self.sinks,
            limits=self.limits,
            has_gates=bool(self.gates),
            fingerprint=self._fingerprint,
            is_stateless=stateless,
            is_narrow=narrow,
        )

    def _log_of(self, checkpoint: Place, spark: SparkSession | None) -> EpochLog:
        if self._log is None:
            return checkpoint_log(checkpoint, spark=spark)
        return open_log(self._log, spark=spark)

    def _run_place(self, checkpoint: Place, run: str, spark: SparkSession) -> str:
        if not run:
            raise Misconfigured("a once-only load needs a key", 'write(df, run="backfill-2026-01")')
        return f"{open_checkpoint(checkpoint, spark).location}/epochal/runs/{_safe(run)}"

    def _schemas(self, df: DataFrame) -> Mapping[SinkName, pa.Schema]:
        batch = empty_like(df)
        return {sink.name: arrow_schema(sink, taken_by(sink, batch).schema) for sink in self.sinks}

    def _require_spark(self, spark: SparkSession) -> None:
        require_supported()
        require_classic(spark)

    def _status(self) -> str:
        if self._run is None:
            return "not started"
        if self._run.error is not None:
            return f"stopped by an error: {self._run.error.message}"
        return "stopped" if self._run.is_over else f"running on {self._run.location}"


class _EachBatch:
    """Spark's callback. A start that is over is followed by the next one, at its first batch."""

    def __init__(self, spark: SparkSession, claim: Callable[[], Run]) -> None:
        self._spark = spark
        self._claim = claim
        self._run = claim()
        self._query_run: str | None = None

    def __call__(self, batch: DataFrame, epoch: int) -> None:
        # Spark gives each run of a query a job group of its own.
        query_run = batch.sparkSession.sparkContext.getLocalProperty("spark.jobGroup.id")
        if self._query_run != query_run:
            # Before anything else: to claim for a query of another checkpoint stops this one's own.
            self._require_own_query(batch)
        if self._run.is_over or (self._query_run is not None and self._query_run != query_run):
            self._claim_again()
        if self._run.query is None:
            self._follow_end(batch)
        self._query_run = query_run
        self._run.epoch(batch, epoch)

    def _require_own_query(self, batch: DataFrame) -> None:
        try:
            require_query_of(self._run.checkpoint, query_id_of(batch))
        except EpochalError as error:
            shown = presented(error)
            raise shown from shown.__cause__

    def _claim_again(self) -> None:
        try:
            self._run = self._claim()
        except EpochalError as error:
            self._run.error = error
            shown = presented(error)
            raise shown from shown.__cause__

    def _follow_end(self, batch: DataFrame) -> None:
        query = self._spark.streams.get(query_id_of(batch) or "")
        if query is not None:
            self._run.end_with(query)


def _safe(run: str) -> str:
    """A run's key as a folder's name; what is changed or cut is told apart by a digest."""
    plain = _RUN_KEY_SAFE.sub("-", run)[:_RUN_KEY_CHARS_MAX].lstrip(".")
    return plain if plain == run else f"{plain}-{hashlib.sha256(run.encode()).hexdigest()[:8]}"


def _active_session() -> SparkSession:
    session = _session_or_none()
    if session is None:
        raise Misconfigured(
            "there is no active Spark session", "each_batch(…, spark=spark), once Spark runs"
        )
    return session


def _session_or_none() -> SparkSession | None:
    try:
        from pyspark.sql import SparkSession  # noqa: PLC0415  this module is importable without it
    except ImportError:
        return None
    return SparkSession.getActiveSession()


def _unfinished(word: str) -> Unfinished:
    """The user's word for what is to become of a batch that other code left unfinished."""
    try:
        return Unfinished(word)
    except ValueError:
        known = ", ".join(repr(one.value) for one in Unfinished)
        raise Misconfigured(f"unfinished={word!r} is none of {known}", f"one of {known}") from None
