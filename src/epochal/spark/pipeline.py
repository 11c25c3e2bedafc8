"""
The Pipeline: what a user declares once and starts on any streaming DataFrame.

One row, from `start` to a COMMIT at its target:

    pipeline.py       start: check the query, claim the pipeline, hand Spark the run's `epoch`
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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, Unpack, overload

from epochal.clock import SystemClock
from epochal.contract import EngineAbility, Sink
from epochal.coordinator import (
    Coordinator,
    Environment,
    Gate,
    Metrics,
    Tracker,
    by_hand,
    this_driver,
)
from epochal.coordinator.environment import OnStep, ignore_step, new_uid
from epochal.coordinator.journal import EpochLog, StartToken, read_state
from epochal.coordinator.rejected_rows import check_schemas
from epochal.coordinator.targets import by_name, described, engine_ability
from epochal.coordinator.tracker import EPOCHS_KEPT, metrics_of
from epochal.errors import EpochalError, InvariantBroken, Misconfigured
from epochal.logs import StoredLog, checkpoint_log, open_log
from epochal.protocol.admission import Position, Start
from epochal.spark.active_runs import (
    EachBatch,
    RemoteRun,
    Run,
    add_run,
    end_earlier_run,
    is_active,
    require_free_name,
)
from epochal.spark.checkpoint import Checkpoint, open_checkpoint
from epochal.spark.display import CheckReport, Epochs, Written, in_html, in_text
from epochal.spark.driver_write import DriverWrites
from epochal.spark.engine_write import SessionWriter
from epochal.spark.epoch import EpochWriter
from epochal.spark.error_text import stoppable
from epochal.spark.plan_analysis import UNKNOWN_PLAN, PlanFacts, facts_of, leaves
from epochal.spark.projection import arrow_schema, empty_like, project
from epochal.spark.query_options import (
    QueryOptions,
    StartOptions,
    UnfinishedChoice,
    configured,
    read_options,
    unfinished_choice,
)
from epochal.spark.versions import (
    faster_settings,
    is_connect,
    require_classic,
    require_streaming,
    require_supported,
    require_workers,
)
from epochal.storage import open_store
from epochal.storage.leases import Lease, lease_at
from epochal.telemetry.exporters import attach, serve_metrics
from epochal.telemetry.probes import Activity, set_activity
from epochal.terms import (
    DEFAULT_LIMITS,
    EpochNumber,
    Generation,
    Identity,
    Limits,
    SinkName,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.types import StructType

    from epochal.spark.connect import WorkerEpochs
    from epochal.spark.standby import Standby

Location = str | os.PathLike[str]

_RUN_KEY_SAFE = re.compile(r"[^A-Za-z0-9._-]+")
_RUN_KEY_CHARS_MAX = 60
_ONLY_EPOCH = EpochNumber(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Query:
    """
    What is known of a query before its first epoch. Read before it starts: once it runs, a batch's
    plan no longer shows what it was made from.
    """

    spark: SparkSession
    plan: PlanFacts
    schemas: Mapping[SinkName, pa.Schema]
    """Of each sink's rows; empty where only batches will show them."""
    engines: Mapping[SinkName, EngineAbility]
    """Whether Spark's own writer could prepare a sink's rows."""

    @property
    def jvm(self) -> SparkSession | None:
        """The session, where this process reaches Spark's JVM and its file systems by it."""
        return None if is_connect(self.spark) else self.spark


@dataclass(frozen=True, slots=True, kw_only=True)
class _HandedOver:
    """What another process goes on with."""

    function: WorkerEpochs
    claimed: Coordinator | None
    """None where this process could not claim: see `connect`."""
    is_log_reached: bool


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
        by_name(self.sinks)  # refuses at once what could never start: no sinks, or two of one name

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
            return self._stand_by(build, standby, checkpoint, asked, options)
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
        standby: bool | str | Lease,
        checkpoint: Location | None,
        asked: StartOptions,
        options: QueryOptions,
    ) -> Standby:
        """Refuse what a start would refuse before its claim, and wait for the lease."""
        from epochal.spark.standby import Standby  # noqa: PLC0415  most drivers are none

        if not self.limits.fence_on_start:
            raise Misconfigured(
                "standby= needs a claim that fences, and Limits(fence_on_start=False) refuses it",
                "leave fence_on_start as it is; a standby claims only when it has the lease",
            )
        frame = build()
        require_classic(frame.sparkSession, "a standby")
        self._require_spark(frame.sparkSession)
        require_streaming(frame)
        query_options = read_options(options, self.sinks)
        configured(frame, query_options)
        query = self._query(frame.sparkSession, frame)
        location = self._location(checkpoint, query_options.checkpoint)
        folder = open_checkpoint(location, query.spark)
        log = self._log_of(folder.location, query.spark)
        coordinator = Coordinator(log=log, sinks=self.sinks, limits=self.limits)
        try:
            start = self._start_of(
                folder.location, asked, query_id=folder.query_id, position=folder.position
            )
            coordinator.check_start(start, query.schemas, query.engines)
        finally:
            coordinator.stop()
        if self._metrics_port is not None:
            serve_metrics(self._metrics_port, self._metrics_host)
        self._standby = Standby(
            pipeline=self.name,
            spark=query.spark,
            sinks=self.sinks,
            columns=frame.schema,
            build=build,
            start=lambda made: self._start_query(made, location, asked, options),
            log=self._log_of(folder.location, query.spark),
            lease=self._lease(standby, folder.location, query.spark),
        )
        return self._standby

    def _lease(self, standby: bool | str | Lease, location: str, spark: SparkSession) -> Lease:
        if isinstance(standby, str):
            return lease_at(open_store(standby, spark=spark))
        if not isinstance(standby, bool):
            return standby
        log = self._log_of(location, spark)
        if not isinstance(log, StoredLog):
            raise Misconfigured(f"{log.place} has no room for a lease", "standby='etcd://…/prefix'")
        return lease_at(log.store)

    def _start_query(
        self,
        df: DataFrame,
        checkpoint: Location | None,
        asked: StartOptions,
        options: QueryOptions,
    ) -> Run:
        """Claim, recover and start the query: `Run.query`."""
        self._require_spark(df.sparkSession)
        require_streaming(df)
        query_options = read_options(options, self.sinks)
        name = query_options.name or self.name
        # Before the claim: Spark refuses an option that it can't use as soon as it is given.
        writer = configured(df, query_options)
        started = self._start_run(
            self._query(df.sparkSession, df),
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
        set_activity(self.name, Activity.WORKING)
        return started

    # On Spark Connect

    def _start_remote(
        self,
        df: DataFrame,
        checkpoint: Location | None,
        asked: StartOptions,
        options: QueryOptions,
    ) -> RemoteRun:
        """The same where epochs are written by a worker of the server, which claims after us."""
        from epochal.spark.connect import started_query  # noqa: PLC0415  most drivers need none

        self._require_spark(df.sparkSession)
        require_streaming(df)
        query_options = read_options(options, self.sinks)
        writer = configured(df, query_options)
        name = query_options.name or self.name
        handed = self._hand_over(
            self._query(df.sparkSession, df),
            self._location(checkpoint, query_options.checkpoint),
            asked,
            query_name=name,
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

    def _hand_over(
        self,
        query: _Query,
        checkpoint: Location,
        asked: StartOptions,
        *,
        query_name: str | None = None,
    ) -> _HandedOver:
        """Claim and recover, where this process reaches the log."""
        from epochal.spark import connect  # noqa: PLC0415  most drivers need none

        given = connect.spark_location(checkpoint)
        folder = connect.reached_checkpoint(query.spark, given)
        location = given if folder is None else folder.location
        if query_name is not None:
            require_free_name(query.spark, query_name, location)
        end_earlier_run(location)
        log = self._log_of(location, None)
        claim = partial(self._claim, log, query=query, asked=asked)
        coordinator = None
        is_reached = connect.is_reached(query.spark, log)
        known = read_state(log) if is_reached and folder is None else None
        if is_reached and folder is not None:
            coordinator = claim(location, query_id=folder.query_id, position=folder.position)
        elif known is not None:
            # Whether it belongs to the checkpoint, the worker compares.
            coordinator = claim(known.location, query_id=known.query_id)
        function = self._worker_epochs(
            query,
            location if location.startswith("/") and given.startswith("/") else given,
            asked,
            token=None if coordinator is None else coordinator.hand_over(),
        )
        return _HandedOver(function=function, claimed=coordinator, is_log_reached=is_reached)

    def _worker_epochs(
        self,
        query: _Query,
        checkpoint: str,
        asked: StartOptions,
        *,
        token: StartToken | None,
    ) -> WorkerEpochs:
        from epochal import __version__  # noqa: PLC0415  the root imports this module
        from epochal.spark.connect import WorkerEpochs  # noqa: PLC0415  most drivers need none

        return WorkerEpochs(
            pipeline=self,
            checkpoint=checkpoint,
            token=token,
            plan=query.plan,
            schemas=query.schemas,
            asked=asked,
            release=__version__,
        )

    def run_handed_over(
        self,
        given: WorkerEpochs,
        spark: SparkSession,
        folder: Checkpoint,
        position: Position | None,
    ) -> Run:
        """
        Claim above what the process that started the query has claimed. Called once, in the worker
        that writes its epochs, before the first.
        """
        query = _Query(
            spark=spark,
            plan=given.plan,
            schemas=given.schemas,
            engines={sink.name: SessionWriter(spark).ability for sink in self.sinks},
        )
        coordinator = self._claim(
            self._log_of(folder.location, query.jvm),
            folder.location,
            query=query,
            asked=given.asked,
            query_id=folder.query_id,
            position=position,
            above=given.token,
            only_new=given.token is None,
        )
        self._tracker = coordinator.tracker
        run = Run(
            coordinator=coordinator,
            writer=self._epoch_writer(coordinator, query),
            checkpoint=folder,
            read_schemas=None if query.schemas else self._schemas,
            query_id=folder.query_id,
        )
        self._run = run
        return run

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
        self._require_spark(session)
        location = self._location(checkpoint)
        query = self._query(session, None)
        asked = StartOptions.read(run, unfinished, retarget)
        if is_connect(session):
            handed = self._hand_over(query, location, asked)
            if handed.claimed is not None:
                handed.claimed.leave()
            return handed.function

        def start_run() -> Run:
            # Anew: settings of the session may have changed since the last run.
            return self._start_run(self._query(session, None), location, asked)

        def hand_over(started: Run) -> WorkerEpochs:
            token = started.coordinator.token
            return self._worker_epochs(query, started.location, asked, token=token)

        return EachBatch(session, start_run, hand_over)

    def write(self, df: DataFrame, *, run: str, checkpoint: Location) -> Written:
        """
        Load a batch DataFrame once: a second call with the same `run` writes nothing.

        What an earlier call left decided is carried out first. The log of the run is below the
        checkpoint, which may be the pipeline's own or a folder of its own.
        """
        spark = df.sparkSession
        self._require_spark(spark)
        if df.isStreaming:
            raise Misconfigured(
                "write() takes a batch; this DataFrame is a stream", "start(df, checkpoint=…)"
            )
        if not run:
            raise Misconfigured("a once-only load needs a key", 'write(df, run="backfill-2026-01")')
        query = self._query(spark, df)
        location = f"{open_checkpoint(checkpoint, query.jvm).location}/epochal/runs/{_safe(run)}"
        log = open_log(f"{location}/log", spark=query.jvm)
        coordinator = self._claim(log, location, query=query, asked=StartOptions(run=run))
        try:
            is_repeat = coordinator.state.last is not None
            if not is_repeat or coordinator.lost:
                self._epoch_writer(coordinator, query).write(df, _ONLY_EPOCH)
            last = coordinator.state.last
            rows = {} if last is None else dict(last.rows)
        finally:
            coordinator.stop()
        return Written(run=run, rows=rows, is_repeat=is_repeat)

    def _start_run(
        self,
        query: _Query,
        checkpoint: Location,
        asked: StartOptions,
        *,
        query_name: str | None = None,
    ) -> Run:
        """End this process's earlier run on the checkpoint, and claim for a new one."""
        folder = open_checkpoint(checkpoint, query.spark)
        if query_name is not None:
            require_free_name(query.spark, query_name, folder.location)
        end_earlier_run(folder.location)
        coordinator = self._claim(
            self._log_of(folder.location, query.spark),
            folder.location,
            query=query,
            asked=asked,
            query_id=folder.query_id,
            position=folder.position,
        )
        self._tracker = coordinator.tracker
        self._run = Run(
            coordinator=coordinator,
            writer=self._epoch_writer(coordinator, query),
            checkpoint=folder,
            read_schemas=None if query.schemas else self._schemas,
        )
        add_run(self._run)
        return self._run

    def _claim(
        self,
        log: EpochLog,
        location: str,
        *,
        query: _Query,
        asked: StartOptions,
        query_id: str | None = None,
        position: Position | None = None,
        above: StartToken | None = None,
        only_new: bool = False,
    ) -> Coordinator:
        """A coordinator that has claimed the pipeline at its log and finished what was decided."""
        coordinator = Coordinator(
            log=log,
            sinks=self.sinks,
            gates=[stoppable(gate) for gate in self.gates],
            limits=self.limits,
            environment=Environment(on_step=self._watch),
        )
        if self._metrics_port is not None:
            serve_metrics(self._metrics_port, self._metrics_host)
        attach(coordinator.tracker, log, self.limits)
        if self._run is None or self._run.is_over:
            self._tracker = coordinator.tracker
        start = self._start_of(
            location, asked, query_id=query_id, position=position, only_new=only_new
        )
        try:
            coordinator.start(start, query.schemas, query.engines, above=above)
        except BaseException:
            coordinator.stop()
            raise
        return coordinator

    def _start_of(
        self,
        location: str,
        asked: StartOptions,
        *,
        query_id: str | None,
        position: Position | None,
        only_new: bool = False,
    ) -> Start:
        return Start(
            pipeline=self.name,
            location=location,
            sinks=described(self.sinks),
            driver=this_driver(),
            query_id=query_id,
            run=asked.run,
            position=position,
            unfinished=asked.unfinished,
            retarget=asked.retarget,
            fence=self.limits.fence_on_start,
            only_new=only_new,
        )

    def _epoch_writer(self, coordinator: Coordinator, query: _Query) -> EpochWriter:
        return EpochWriter(
            pipeline=self.name,
            coordinator=coordinator,
            sinks=self.sinks,
            limits=self.limits,
            has_gates=bool(self.gates),
            fingerprint=self._fingerprint,
            plan=query.plan,
            writer=SessionWriter(query.spark),
            driver_writes=DriverWrites(coordinator, rows_max=self.limits.driver_rows_max),
            is_speculating=_is_speculating(query.spark),
        )

    # Looking

    def check(self, df: DataFrame | None = None) -> CheckReport:
        """
        Ask every target what it can promise, for the rows of `df` where it is given.

        Raises `Misconfigured` with the fact and the way out where one can't keep the promise.
        Changes nothing that a reader of any target sees.
        """
        if df is not None:
            self._require_spark(df.sparkSession)
        query = None if df is None else self._query(df.sparkSession, df)
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
            self._log_of(checkpoint, spark),
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
            self._log_of(checkpoint, spark),
            location=open_checkpoint(checkpoint, spark).location,
            is_original_alive=original_lives,
        )

    def rename(self, checkpoint: Location) -> None:
        """Let a checkpoint belong to this pipeline under its present name."""
        by_hand.rename(self._log_of(checkpoint, _jvm_session_or_none()), pipeline=self.name)

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

    def _log_of(self, checkpoint: Location, spark: SparkSession | None) -> EpochLog:
        if self._log is None:
            return checkpoint_log(checkpoint, spark=spark)
        return open_log(self._log, spark=spark)

    def _columns(self, df: DataFrame) -> dict[SinkName, StructType]:
        batch = empty_like(df)
        return {sink.name: project(sink, batch).schema for sink in self.sinks}

    def _schemas(self, df: DataFrame) -> dict[SinkName, pa.Schema]:
        columns = self._columns(df)
        return {sink.name: arrow_schema(sink, columns[sink.name]) for sink in self.sinks}

    def _query(self, spark: SparkSession, df: DataFrame | None) -> _Query:
        engine = SessionWriter(spark)
        if df is None:
            return _Query(
                spark=spark,
                plan=UNKNOWN_PLAN,
                schemas={},
                engines={sink.name: engine.ability for sink in self.sinks},
            )
        columns = self._columns(df)
        return _Query(
            spark=spark,
            plan=facts_of(df),
            schemas={sink.name: arrow_schema(sink, columns[sink.name]) for sink in self.sinks},
            engines={
                name: partial(engine.ability, schema=schema) for name, schema in columns.items()
            },
        )

    def _require_spark(self, spark: SparkSession) -> None:
        require_supported()
        if is_connect(spark):
            from epochal.spark.connect import require_server  # noqa: PLC0415  most need none

            require_server(spark)
        else:
            require_workers(spark)


def _safe(run: str) -> str:
    """A run's key as a folder's name; a digest tells apart what had to be changed or cut."""
    plain = _RUN_KEY_SAFE.sub("-", run)[:_RUN_KEY_CHARS_MAX].lstrip(".")
    return plain if plain == run else f"{plain}-{hashlib.sha256(run.encode()).hexdigest()[:8]}"


def _is_speculating(spark: SparkSession) -> bool:
    return str(spark.conf.get("spark.speculation", "false")).lower() == "true"


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
