"""
The start of a declared pipeline: read the query, claim the pipeline at its epoch log, carry out
what is decided there, and write epochs from then on.

Who writes them:

    run               this process, for `Pipeline.start` and `each_batch`
    hand_over         a worker of a Spark Connect server, which claims above what this process has
                      claimed: `run_handed_over`
    stand_by          this process, once the driver that has the lease is gone
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from epochal.contract import EngineAbility, Sink
from epochal.coordinator import Coordinator, Environment, Gate, Tracker, this_driver
from epochal.coordinator.coordinator import ReadPosition
from epochal.coordinator.environment import OnStep
from epochal.coordinator.journal import EpochLog, StartToken, read_state
from epochal.coordinator.targets import described
from epochal.errors import Misconfigured
from epochal.logs import StoredLog, checkpoint_log, open_log
from epochal.protocol.admission import Position, Start
from epochal.spark.active_runs import Run, add_run, end_earlier_run, require_free_name
from epochal.spark.checkpoint import Checkpoint, open_checkpoint
from epochal.spark.driver_write import DriverWrites
from epochal.spark.engine_write import SessionWriter
from epochal.spark.epoch import EpochWriter
from epochal.spark.error_text import stoppable
from epochal.spark.plan_analysis import UNKNOWN_PLAN, PlanFacts, facts_of
from epochal.spark.projection import arrow_schema, empty_like, project
from epochal.spark.query_options import StartOptions
from epochal.spark.versions import is_connect, require_supported, require_workers
from epochal.storage import open_store
from epochal.storage.leases import Lease, lease_at
from epochal.telemetry.exporters import attach, serve_metrics
from epochal.telemetry.probes import show_activity
from epochal.terms import Limits, SinkName

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from epochal.spark.connect import WorkerEpochs
    from epochal.spark.standby import Standby

Location = str | os.PathLike[str]
Track = Callable[[Tracker], None]


def ignore_tracker(_tracker: Tracker) -> None:
    """Nobody follows what a start measures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
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
class HandedOver:
    """What another process goes on with."""

    function: WorkerEpochs
    claimed: Coordinator | None
    """None where this process could not claim: see `connect`."""
    is_log_reached: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Starter:
    """Starts a pipeline as it was declared. Can be pickled, and starts it in another process."""

    name: str
    sinks: Sequence[Sink]
    gates: Sequence[Gate]
    limits: Limits
    log: Location | None
    fingerprint: bool
    metrics_port: int | None
    metrics_host: str
    watch: OnStep

    # The query

    def query(self, spark: SparkSession, df: DataFrame | None) -> Query:
        """Read a query before it starts; without `df` only its batches will show what it is."""
        engine = SessionWriter(spark)
        if df is None:
            return Query(
                spark=spark,
                plan=UNKNOWN_PLAN,
                schemas={},
                engines={sink.name: engine.ability for sink in self.sinks},
            )
        columns = self._columns(df)
        return Query(
            spark=spark,
            plan=facts_of(df),
            schemas={sink.name: arrow_schema(sink, columns[sink.name]) for sink in self.sinks},
            engines={
                name: partial(engine.ability, schema=schema) for name, schema in columns.items()
            },
        )

    def _columns(self, df: DataFrame) -> dict[SinkName, StructType]:
        batch = empty_like(df)
        return {sink.name: project(sink, batch).schema for sink in self.sinks}

    def _schemas(self, df: DataFrame) -> dict[SinkName, pa.Schema]:
        columns = self._columns(df)
        return {sink.name: arrow_schema(sink, columns[sink.name]) for sink in self.sinks}

    def log_of(self, checkpoint: Location, spark: SparkSession | None) -> EpochLog:
        if self.log is None:
            return checkpoint_log(checkpoint, spark=spark)
        return open_log(self.log, spark=spark)

    # The claim

    def claim(
        self,
        log: EpochLog,
        location: str,
        *,
        query: Query,
        asked: StartOptions,
        query_id: str | None = None,
        position: ReadPosition | None = None,
        above: StartToken | None = None,
        only_new: bool = False,
        track: Track = ignore_tracker,
    ) -> Coordinator:
        """
        A coordinator that has claimed the pipeline at its log and finished what was decided.
        `position`: see `Coordinator.start`. `track` gets what it measures, before it claims.
        """
        coordinator = Coordinator(
            log=log,
            sinks=self.sinks,
            gates=[stoppable(gate) for gate in self.gates],
            limits=self.limits,
            environment=Environment(on_step=self.watch),
        )
        self._serve_metrics()
        attach(coordinator.tracker, log, self.limits)
        track(coordinator.tracker)
        start = self._start(location, asked, query_id=query_id, only_new=only_new)
        try:
            coordinator.start(start, query.schemas, query.engines, position=position, above=above)
        except BaseException:
            coordinator.stop()
            raise
        return coordinator

    def _start(
        self,
        location: str,
        asked: StartOptions,
        *,
        query_id: str | None = None,
        only_new: bool = False,
    ) -> Start:
        return Start(
            pipeline=self.name,
            location=location,
            sinks=described(self.sinks),
            driver=this_driver(),
            query_id=query_id,
            run=asked.run,
            unfinished=asked.unfinished,
            retarget=asked.retarget,
            fence=self.limits.fence_on_start,
            only_new=only_new,
        )

    def _serve_metrics(self) -> None:
        if self.metrics_port is not None:
            serve_metrics(self.metrics_port, self.metrics_host)

    def epoch_writer(self, coordinator: Coordinator, query: Query) -> EpochWriter:
        return EpochWriter(
            pipeline=self.name,
            coordinator=coordinator,
            sinks=self.sinks,
            limits=self.limits,
            has_gates=bool(self.gates),
            fingerprint=self.fingerprint,
            plan=query.plan,
            writer=SessionWriter(query.spark),
            driver_writes=DriverWrites(coordinator, rows_max=self.limits.driver_rows_max),
            is_speculating=_is_speculating(query.spark),
        )

    def _run(
        self,
        coordinator: Coordinator,
        query: Query,
        folder: Checkpoint,
        *,
        query_id: str | None = None,
    ) -> Run:
        run = Run(
            coordinator=coordinator,
            writer=self.epoch_writer(coordinator, query),
            checkpoint=folder,
            read_schemas=None if query.schemas else self._schemas,
            query_id=query_id,
        )
        show_activity(self.name, run.activity)
        return run

    # Epochs are written by this process

    def run(
        self,
        query: Query,
        checkpoint: Location,
        asked: StartOptions,
        *,
        query_name: str | None = None,
        track: Track = ignore_tracker,
    ) -> Run:
        """End this process's earlier run on the checkpoint, and claim for a new one."""
        folder = open_checkpoint(checkpoint, query.spark)
        if query_name is not None:
            require_free_name(query.spark, query_name, folder.location)
        end_earlier_run(self._start(folder.location, asked))
        coordinator = self.claim(
            self.log_of(folder.location, query.spark),
            folder.location,
            query=query,
            asked=asked,
            query_id=folder.query_id,
            position=lambda: folder.position,
            track=track,
        )
        run = self._run(coordinator, query, folder)
        add_run(run)
        return run

    # By a worker of a Spark Connect server

    def hand_over(
        self,
        query: Query,
        checkpoint: Location,
        asked: StartOptions,
        *,
        query_name: str | None = None,
        track: Track = ignore_tracker,
    ) -> HandedOver:
        """Claim and recover, where this process reaches the log."""
        from epochal.spark import connect  # noqa: PLC0415  most drivers need none

        given = connect.spark_location(checkpoint)
        folder = connect.reached_checkpoint(query.spark, given)
        location = given if folder is None else folder.location
        if query_name is not None:
            require_free_name(query.spark, query_name, location)
        end_earlier_run(self._start(location, asked))
        log = self.log_of(location, None)
        # Metrics are the worker's to serve: on one machine both would need the port.
        starter = replace(self, metrics_port=None)
        claim = partial(starter.claim, log, query=query, asked=asked, track=track)
        coordinator = None
        is_reached = connect.is_reached(query.spark, log)
        known = read_state(log) if is_reached and folder is None else None
        if is_reached and folder is not None:
            coordinator = claim(
                location, query_id=folder.query_id, position=lambda: folder.position
            )
        elif known is not None:
            # Whether it belongs to the checkpoint, the worker compares.
            coordinator = claim(known.location, query_id=known.query_id)
        function = self.worker_epochs(
            query,
            location if location.startswith("/") and given.startswith("/") else given,
            asked,
            token=None if coordinator is None else coordinator.hand_over(),
        )
        return HandedOver(function=function, claimed=coordinator, is_log_reached=is_reached)

    def worker_epochs(
        self, query: Query, checkpoint: str, asked: StartOptions, *, token: StartToken | None
    ) -> WorkerEpochs:
        """The function of `foreachBatch` that writes epochs in another process."""
        from epochal import __version__  # noqa: PLC0415  the root imports this module
        from epochal.spark.connect import WorkerEpochs  # noqa: PLC0415  most drivers need none

        return WorkerEpochs(
            starter=self,
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
        query = Query(
            spark=spark,
            plan=given.plan,
            schemas=given.schemas,
            engines={sink.name: SessionWriter(spark).ability for sink in self.sinks},
        )
        coordinator = self.claim(
            self.log_of(folder.location, query.jvm),
            folder.location,
            query=query,
            asked=given.asked,
            query_id=folder.query_id,
            position=lambda: position,
            above=given.token,
            only_new=given.token is None,
        )
        return self._run(coordinator, query, folder, query_id=folder.query_id)

    # By this process, once it has the lease

    def stand_by(
        self,
        frame: DataFrame,
        checkpoint: Location,
        asked: StartOptions,
        *,
        lease: bool | str | Lease,
        build: Callable[[], DataFrame],
        start: Callable[[DataFrame], Run],
    ) -> Standby:
        """Refuse what a start of `frame` would refuse before its claim, and wait for the lease."""
        from epochal.spark.standby import Standby  # noqa: PLC0415  most drivers are none

        query = self.query(frame.sparkSession, frame)
        folder = open_checkpoint(checkpoint, query.spark)
        log = self.log_of(folder.location, query.spark)
        coordinator = Coordinator(log=log, sinks=self.sinks, limits=self.limits)
        try:
            coordinator.check_start(
                self._start(folder.location, asked, query_id=folder.query_id),
                query.schemas,
                query.engines,
                position=lambda: folder.position,
            )
        finally:
            coordinator.stop()
        self._serve_metrics()
        return Standby(
            pipeline=self.name,
            spark=query.spark,
            sinks=self.sinks,
            columns=frame.schema,
            build=build,
            start=start,
            log=self.log_of(folder.location, query.spark),
            lease=self._lease(lease, folder.location, query.spark),
        )

    def _lease(self, lease: bool | str | Lease, location: str, spark: SparkSession) -> Lease:
        if isinstance(lease, str):
            return lease_at(open_store(lease, spark=spark))
        if not isinstance(lease, bool):
            return lease
        log = self.log_of(location, spark)
        if not isinstance(log, StoredLog):
            raise Misconfigured(f"{log.place} has no room for a lease", "standby='etcd://…/prefix'")
        return lease_at(log.store)


def require_spark(spark: SparkSession) -> None:
    """Refuse a Spark that can't run a pipeline, with the way out."""
    require_supported()
    if is_connect(spark):
        from epochal.spark.connect import require_server  # noqa: PLC0415  most need none

        require_server(spark)
    else:
        require_workers(spark)


def _is_speculating(spark: SparkSession) -> bool:
    return str(spark.conf.get("spark.speculation", "false")).lower() == "true"
