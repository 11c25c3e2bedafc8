"""
The Pipeline: what a user declares once and starts on any streaming DataFrame.

One row, from `start` to a COMMIT at its target:

    pipeline.py       start: check the query, hand Spark the run's `epoch`
    start.py          Starter.run: claim the pipeline, carry out what is decided
    active_runs.py    Run.epoch: what Spark calls with each micro-batch, on the driver
    epoch.py          EpochWriter.write: begin, prepare at every sink, conclude
    jobs.py           prepare_all: one Spark job per sink
    task.py           PrepareTask, on an executor: the sink's writer takes the rows and prepares
    engine_write.py   or, for files: a job of Spark's own writer, and the sink's committer gathers
    driver_write.py   or, for few rows: a job collects them, and the writer runs on the driver
    coordinator/      conclude: rehearse, gates, decide, then the sink's committer commits

On Spark Connect, `start` claims in the client and hands over (`connect.py`); from `Run.epoch` on,
the same happens in a Python worker of the server.

Importable without pyspark, so that tools reach the targets of a declared pipeline without Spark.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Literal, Unpack, overload

from epochal.clock import SystemClock
from epochal.contract import Sink
from epochal.coordinator import Gate, Metrics, Tracker, by_hand
from epochal.coordinator.environment import OnStep, ignore_step, new_uid
from epochal.coordinator.journal import EpochLog
from epochal.coordinator.rejected_rows import check_schemas
from epochal.coordinator.targets import by_name, engine_ability
from epochal.coordinator.tracker import EPOCHS_KEPT, metrics_of
from epochal.errors import EpochalError, InvariantBroken, Misconfigured
from epochal.logs import checkpoint_log, open_log
from epochal.spark.active_runs import EachBatch, RemoteRun, Run, add_run, is_active
from epochal.spark.checkpoint import open_checkpoint
from epochal.spark.display import CheckReport, Epochs, Written, in_html, in_text
from epochal.spark.plan_analysis import leaves
from epochal.spark.query_options import (
    QueryOptions,
    StartOptions,
    UnfinishedChoice,
    configured,
    read_options,
    unfinished_choice,
)
from epochal.spark.start import Location, Starter, require_spark
from epochal.spark.versions import faster_settings, is_connect, require_classic, require_streaming
from epochal.storage.leases import Lease
from epochal.terms import DEFAULT_LIMITS, EpochNumber, Generation, Identity, Limits

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from epochal.spark.connect import WorkerEpochs
    from epochal.spark.standby import Standby

_RUN_KEY_SAFE = re.compile(r"[^A-Za-z0-9._-]+")
_RUN_KEY_CHARS_MAX = 60
_ONLY_EPOCH = EpochNumber(0)


class Pipeline:
    """
    Named sinks under one decision: each micro-batch appears in all of them once, or in none.

    `gates` are functions of the prepared epoch that may still refuse it. `log` is where decisions
    are kept, inside the checkpoint by default. `checkpoint` is the default of `start`, and where
    `epochal recover module:pipeline` and the other commands look. `fingerprint=False` saves the
    hashing of rows; without it, rows that a target lost after the decision can't be proven equal
    and written again. `metrics_port` serves metrics for Prometheus while the driver lives.
    """

    def __init__(
        self,
        name: str,
        sinks: Sequence[Sink],
        gates: Iterable[Gate] = (),
        *,
        limits: Limits = DEFAULT_LIMITS,
        log: Location | None = None,
        checkpoint: Location | None = None,
        fingerprint: bool = True,
        metrics_port: int | None = None,
        metrics_host: str = "127.0.0.1",
        watch: OnStep = ignore_step,
    ) -> None:
        if not name:
            raise Misconfigured("a pipeline needs a name", 'Pipeline("orders", sinks=[…])')
        self.name = name
        by_name(sinks)  # refuses at once what could never start: no sinks, or two of one name
        self.sinks = tuple(sinks)
        self.gates = tuple(gates)
        self.limits = limits
        self.checkpoint = checkpoint
        self._log = log
        self._fingerprint = fingerprint
        self._metrics_port = metrics_port
        self._metrics_host = metrics_host
        self._watch = watch
        self._run: Run | RemoteRun | None = None
        self._standby: Standby | None = None
        self._tracker = Tracker(SystemClock())

    def __getstate__(self) -> dict[str, object]:
        """What is declared: a pickled pipeline has not started anything."""
        unset: dict[str, object] = {"_run": None, "_standby": None, "_tracker": None}
        return {**vars(self), **unset}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._tracker = Tracker(SystemClock())

    # Writing

    @overload
    def start(
        self,
        df: DataFrame,
        checkpoint: Location | None = None,
        *,
        run: str | None = None,
        unfinished: UnfinishedChoice = "ask",
        retarget: Collection[str] = (),
        standby: Literal[False] = False,
        **options: Unpack[QueryOptions],
    ) -> StreamingQuery: ...

    @overload
    def start(
        self,
        df: DataFrame | Callable[[], DataFrame],
        checkpoint: Location | None = None,
        *,
        run: str | None = None,
        unfinished: UnfinishedChoice = "ask",
        retarget: Collection[str] = (),
        standby: Literal[True] | str | Lease,
        **options: Unpack[QueryOptions],
    ) -> Standby: ...

    def start(
        self,
        df: DataFrame | Callable[[], DataFrame],
        checkpoint: Location | None = None,
        *,
        run: str | None = None,
        unfinished: UnfinishedChoice = "ask",
        retarget: Collection[str] = (),
        standby: bool | str | Lease = False,
        **options: Unpack[QueryOptions],
    ) -> StreamingQuery | Standby:
        """
        Start a query that writes each micro-batch exactly once.

        Takes Spark's own options: `processingTime=`, `availableNow=` or `once=` (or
        `trigger={…}`), `outputMode=`, `queryName=`, and `checkpointLocation=` for `checkpoint`.
        The pipeline is claimed before the query starts; from then on no other driver decides on it.

        With `standby` this process first warms up, then waits until it is its turn: `True` has a
        lease beside the epoch log, a URL (`etcd://…/prefix`, `postgresql://…#name`, `s3://…`) has
        it there. `df` may then be a function that makes the DataFrame, and must be one where tables
        are joined: it is called at each turn, so that they are as new as the takeover. What can be
        refused is refused at once.
        """
        asked = StartOptions.read(run, unfinished, retarget)
        if standby is not False:
            build = df if callable(df) else _same_each_time(df)
            self._standby = self._stand_by(build, standby, checkpoint, asked, options)
            return self._standby
        if callable(df):
            raise Misconfigured(
                "start() takes a DataFrame; a function that makes one is for a standby",
                "start(make_orders, …, standby=True), or start(make_orders(), …)",
            )
        self._standby = None
        start = self._start_remote if is_connect(df.sparkSession) else self._start_query
        started: Run | RemoteRun = start(df, checkpoint, asked, options)
        if started.query is None:
            raise InvariantBroken(f"{started.location}: a run was started without a query")
        return started.query

    def _stand_by(
        self,
        build: Callable[[], DataFrame],
        lease: bool | str | Lease,
        checkpoint: Location | None,
        asked: StartOptions,
        options: QueryOptions,
    ) -> Standby:
        if not self.limits.fence_on_start:
            raise Misconfigured(
                "standby= needs a claim that fences, and Limits(fence_on_start=False) refuses it",
                "leave fence_on_start as it is; a standby claims only when it has the lease",
            )
        frame = build()
        require_classic(frame.sparkSession, "a standby")
        require_spark(frame.sparkSession)
        require_streaming(frame)
        query_options = read_options(options, self.sinks)
        configured(frame, query_options)
        location = self._location(checkpoint, query_options.checkpoint)
        return self._starter.stand_by(
            frame,
            location,
            asked,
            lease=lease,
            build=build,
            start=lambda made: self._start_query(made, location, asked, options),
        )

    def _start_query(
        self,
        df: DataFrame,
        checkpoint: Location | None,
        asked: StartOptions,
        options: QueryOptions,
    ) -> Run:
        """Claim, recover and start the query: `Run.query`."""
        require_spark(df.sparkSession)
        require_streaming(df)
        query_options = read_options(options, self.sinks)
        name = query_options.name or self.name
        # Before the claim: Spark refuses an option that it can't use as soon as it is given.
        writer = configured(df, query_options)
        started = self._start_run(
            df.sparkSession,
            df,
            self._location(checkpoint, query_options.checkpoint),
            asked,
            query_name=name,
        )
        try:
            writer = writer.foreachBatch(started.epoch).queryName(name)
            query = writer.option("checkpointLocation", started.location).start()
        except BaseException:
            started.end()
            raise
        started.end_with(query)
        return started

    def _start_run(
        self,
        spark: SparkSession,
        df: DataFrame | None,
        checkpoint: Location,
        asked: StartOptions,
        *,
        query_name: str | None = None,
    ) -> Run:
        starter = self._starter
        run = starter.run(
            starter.query(spark, df), checkpoint, asked, query_name=query_name, track=self._track
        )
        self._run, self._tracker = run, run.coordinator.tracker
        return run

    def _start_remote(
        self,
        df: DataFrame,
        checkpoint: Location | None,
        asked: StartOptions,
        options: QueryOptions,
    ) -> RemoteRun:
        """The same where epochs are written by a worker of the server, which claims after us."""
        from epochal.spark.connect import started_query  # noqa: PLC0415  most drivers need none

        require_spark(df.sparkSession)
        require_streaming(df)
        query_options = read_options(options, self.sinks)
        writer = configured(df, query_options)
        name = query_options.name or self.name
        starter = self._starter
        handed = starter.hand_over(
            starter.query(df.sparkSession, df),
            self._location(checkpoint, query_options.checkpoint),
            asked,
            query_name=name,
            track=self._track,
        )
        claimed, location = handed.claimed, handed.function.checkpoint
        try:
            writer = writer.foreachBatch(handed.function).queryName(name)
            query = started_query(writer.option("checkpointLocation", location))
        except BaseException:
            if claimed is not None:
                claimed.stop()
            raise
        if claimed is not None:
            claimed.leave()
        self._run = RemoteRun(
            location=location,
            query=query,
            log=self.log_of(location) if handed.is_log_reached else None,
            generation=Generation(0) if claimed is None else claimed.state.generation,
        )
        add_run(self._run)
        return self._run

    def each_batch(
        self,
        checkpoint: Location | None = None,
        *,
        spark: SparkSession | None = None,
        run: str | None = None,
        unfinished: UnfinishedChoice = "ask",
        retarget: Collection[str] = (),
    ) -> Callable[[DataFrame, int], None]:
        """
        The function for existing `writeStream.foreachBatch(…)` code, which keeps its own
        `checkpointLocation`: the same as is given here.

        Claims at once, and again when a later query runs with the same function. The plan is not
        known here, so each batch counts as one with state: it is evaluated before it is written.

        It can be pickled. Called in another process, as on Spark Connect, it claims there above
        what was claimed here, as long as nobody else has: it serves one query, and the next start
        of it needs a function of its own.
        """
        session = spark or _active_session()
        require_spark(session)
        location = self._location(checkpoint)
        starter = self._starter
        query = starter.query(session, None)
        asked = StartOptions.read(run, unfinished, retarget)
        if is_connect(session):
            handed = starter.hand_over(query, location, asked, track=self._track)
            if handed.claimed is not None:
                handed.claimed.leave()
            return handed.function

        def start_run() -> Run:
            # Anew: settings of the session may have changed since the last run.
            return self._start_run(session, None, location, asked)

        def hand_over(started: Run) -> WorkerEpochs:
            token = started.coordinator.token
            return starter.worker_epochs(query, started.location, asked, token=token)

        return EachBatch(session, start_run, hand_over)

    def write(self, df: DataFrame, *, run: str, checkpoint: Location) -> Written:
        """
        Load a batch DataFrame once: a second call with the same `run` writes nothing.

        What an earlier call left decided is carried out first. The log of the run is below the
        checkpoint, which may be the pipeline's own or a folder of its own.
        """
        spark = df.sparkSession
        require_spark(spark)
        if df.isStreaming:
            raise Misconfigured(
                "write() takes a batch; this DataFrame is a stream", "start(df, checkpoint=…)"
            )
        if not run:
            raise Misconfigured("a once-only load needs a key", 'write(df, run="backfill-2026-01")')
        starter = self._starter
        query = starter.query(spark, df)
        location = f"{open_checkpoint(checkpoint, query.jvm).location}/epochal/runs/{_safe(run)}"
        log = open_log(f"{location}/log", spark=query.jvm)
        asked = StartOptions(run=run)
        coordinator = starter.claim(log, location, query=query, asked=asked, track=self._track)
        try:
            is_repeat = coordinator.state.last is not None
            if not is_repeat or coordinator.lost:
                starter.epoch_writer(coordinator, query).write(df, _ONLY_EPOCH)
            last = coordinator.state.last
            rows = {} if last is None else dict(last.rows)
        finally:
            coordinator.stop()
        return Written(run=run, rows=rows, is_repeat=is_repeat)

    # Looking

    def check(self, df: DataFrame | None = None) -> CheckReport:
        """
        Ask every target what it can promise, for the rows of `df` where it is given.

        Raises `Misconfigured` with the fact and the way out where one can't keep the promise.
        Changes nothing that a reader of any target sees.
        """
        if df is not None:
            require_spark(df.sparkSession)
        query = None if df is None else self._starter.query(df.sparkSession, df)
        schemas = {} if query is None else dict(query.schemas)
        abilities = {}
        for name, sink in by_name(self.sinks).items():
            who = Identity(pipeline=self.name, uid=new_uid(), sink=name, generation=Generation(0))
            committer = sink.committer(who, self.limits)
            try:
                found = [*committer.check(schemas.get(name))]
                if query is not None:
                    found += engine_ability(committer, schemas.get(name), query.engines.get(name))
                abilities[name] = tuple(found)
                schemas.update(check_schemas({name: sink}, {name: committer}, {}))
            finally:
                committer.close()
        advice = () if df is None else faster_settings(df.sparkSession)
        return CheckReport(pipeline=self.name, abilities=abilities, advice=advice)

    @property
    def has_own_log(self) -> bool:
        """Decisions are kept elsewhere than in the checkpoint: `log=` was given."""
        return self._log is not None

    def log_of(self, checkpoint: Location | None = None) -> EpochLog:
        """The epoch log of this pipeline on a checkpoint, for tools that look without Spark."""
        if self._log is not None:
            return open_log(self._log)
        return checkpoint_log(self._location(checkpoint))

    @property
    def error(self) -> EpochalError | None:
        """The error that stopped the last query, with its class and hint; None where none did."""
        if self._standby is not None:
            return self._standby.error
        return None if self._run is None else self._run.error

    @property
    def query_id(self) -> str | None:
        """Spark's id of the query that runs, or ran last; None before its first epoch."""
        return None if self._run is None else self._run.query_id

    def close(self) -> None:
        """Wait until the epoch that is being written has ended, then stop cleanly."""
        if self._standby is not None:
            self._standby.stop()
        if self._run is not None:
            self._run.end()

    def last_epochs(self, count: int = 20) -> Epochs:
        """
        The newest epochs of the query that runs, or of the last start, oldest first; a notebook
        shows them as a table. On Spark Connect those that have ended, by the history, which is
        some seconds behind.
        """
        if isinstance(self._run, RemoteRun):
            return Epochs(self._run.last_epochs(count))
        return Epochs(self._tracker.last_epochs(count))

    def metrics(self) -> Metrics:
        """Counters and latencies of the query that runs, or of the last start."""
        if isinstance(self._run, RemoteRun):
            return metrics_of(self._run.last_epochs(EPOCHS_KEPT))
        return self._tracker.metrics()

    # Identity: each change is one record of the epoch log

    def adopt(self, checkpoint: Location, *, unfinished: UnfinishedChoice = "ask") -> None:
        """Go on with a checkpoint that was moved here, or that other code ran meanwhile."""
        spark = _jvm_session_or_none()
        found = open_checkpoint(checkpoint, spark)
        by_hand.adopt(
            self._starter.log_of(checkpoint, spark),
            location=found.location,
            query_id=found.query_id,
            position=found.position,
            unfinished=unfinished_choice(unfinished),
        )

    def fork(self, checkpoint: Location, *, original_lives: bool = False) -> None:
        """
        Make a copied checkpoint a pipeline of its own. `original_lives`: the original is there and
        will carry out what is decided.
        """
        spark = _jvm_session_or_none()
        by_hand.fork(
            self._starter.log_of(checkpoint, spark),
            location=open_checkpoint(checkpoint, spark).location,
            is_original_alive=original_lives,
        )

    def rename(self, checkpoint: Location) -> None:
        """Let a checkpoint belong to this pipeline under its present name."""
        by_hand.rename(self._starter.log_of(checkpoint, _jvm_session_or_none()), pipeline=self.name)

    # Notebooks

    def __repr__(self) -> str:
        return in_text(self.name, self.sinks, self._status(), self.last_epochs())

    def _repr_html_(self) -> str:
        return in_html(self.name, self.sinks, self._status(), self.last_epochs())

    def _status(self) -> str:
        standby, run = self._standby, self._run
        if self.error is not None:
            return f"stopped by an error: {self.error.message}"
        if standby is not None and standby.isActive and standby.query is None:
            return f"standby, {standby.role.value}"
        if run is None:
            return "not started"
        # A run ends a moment after its query.
        is_over = run.is_over or (run.query is not None and not is_active(run.query))
        return "stopped" if is_over else f"running on {run.location}"

    # Parts of the above

    def _location(self, *given: Location | None) -> Location:
        named = [one for one in given if one is not None]
        if len({os.fspath(one) for one in named}) > 1:
            raise Misconfigured(
                f"checkpoint={named[0]!r} and checkpointLocation={named[1]!r} differ",
                "give one of them",
            )
        location = named[0] if named else self.checkpoint
        if location is None:
            raise Misconfigured(
                f"pipeline {self.name!r} has no checkpoint",
                "give one to start, or to the pipeline: Pipeline(…, checkpoint=…)",
            )
        return location

    @property
    def _starter(self) -> Starter:
        return Starter(
            name=self.name,
            sinks=self.sinks,
            gates=self.gates,
            limits=self.limits,
            log=self._log,
            fingerprint=self._fingerprint,
            metrics_port=self._metrics_port,
            metrics_host=self._metrics_host,
            watch=self._watch,
        )

    def _track(self, tracker: Tracker) -> None:
        """Show what a start measures, unless a query runs: then that of the query."""
        if self._run is None or self._run.is_over:
            self._tracker = tracker


def _safe(run: str) -> str:
    """A run's key as a folder's name; a digest tells apart what had to be changed or cut."""
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


def _jvm_session_or_none() -> SparkSession | None:
    """The active session, where Spark's own file systems are reached by it."""
    session = _session_or_none()
    return None if session is None or is_connect(session) else session


def _same_each_time(frame: DataFrame) -> Callable[[], DataFrame]:
    """A stream that may be started at any later time: what a table lists is of its first day."""
    require_classic(frame.sparkSession, "a standby")
    if all(leaf.isStreaming() for leaf in leaves(frame)):
        return lambda: frame
    raise Misconfigured(
        "this DataFrame reads a table beside its stream, and shows it as it was when the DataFrame "
        "was made; a standby may wait for days",
        "give a function that makes it: start(make_orders, …, standby=True)",
    )
