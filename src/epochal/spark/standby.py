"""
Standby drivers: a session that is up and warm waits until the driver that works is gone.

    warm up    fork Python workers, which load what tasks load; again every 30 s, as Spark ends
               workers that are idle for a minute. Once: a small query, what the sinks select over
               an empty batch, an empty file
    wait       for the lease of the pipeline (`storage.leases`)
    work       build the DataFrame, claim, recover, run the query: as any start does
    wait       again, after the lease was lost, the log has fenced this driver, or a pause

The lease only says who tries. Two drivers that both believe to hold it claim one after the other,
and the log fences the first (I7):

    driver A                         driver B, a standby          epoch log
    works, holds the lease                                        claim of A
    stopped by SIGSTOP               gets the lease               claim of A
                                     claims, recovers, works      claim of A, claim of B
    goes on, decides epoch 7: the slot is taken, A is fenced and waits again

Where A is fenced and the lease is still its own, the other driver works without asking for it. A
then waits until that one has stopped or is silent, so that the two don't take the pipeline from
each other again and again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from importlib import import_module, util
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from epochal.contract import Sink
from epochal.coordinator.environment import this_driver
from epochal.coordinator.journal import EpochLog, newest_record
from epochal.errors import EpochalError, Fenced, Misconfigured, Refused, TaskFailed
from epochal.spark.active_runs import Run, is_active, stop_query
from epochal.spark.error_text import as_epochal, is_jvm_gone
from epochal.spark.projection import project
from epochal.spark.row_hash import with_row_hash
from epochal.storage.leases import KeptLease, Lease
from epochal.telemetry.exporters import watch_standby
from epochal.telemetry.history import history_of
from epochal.telemetry.probes import Activity, show_activity
from epochal.telemetry.standby import Presence, Role, members_of

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.types import StructType

logger = logging.getLogger("epochal")

WARM_EVERY_S = 30.0
SILENT_AFTER_S = 45.0
"""Three heartbeats of a driver whose log is far away."""
_LOOK_EVERY_S = 0.1
_PAUSE_LOOK_EVERY_S = 2.0
_STOP_WAIT_MAX_S = 120.0


class Standby:
    """
    What `Pipeline.start(…, standby=…)` returns: a driver that waits for its turn, and works then.

    `query` is the query that runs, None while it waits. `awaitTermination` and `stop` are as those
    of a query, over any number of turns.
    """

    def __init__(
        self,
        *,
        pipeline: str,
        spark: SparkSession,
        sinks: Sequence[Sink],
        columns: StructType,
        build: Callable[[], DataFrame],
        start: Callable[[DataFrame], Run],
        log: EpochLog,
        lease: Lease,
    ) -> None:
        self.query: StreamingQuery | None = None
        self.error: EpochalError | None = None
        """What ended it, if not `stop` or the end of its query."""
        self._pipeline = pipeline
        self._spark = spark
        self._sinks = sinks
        self._columns = columns
        self._build = build
        self._start = start
        self._log = log
        self._lease = lease
        self._presence = Presence(members_of(log), lease)
        self._is_stopping = threading.Event()
        self._has_ended = threading.Event()
        self._jvm_error: EpochalError | None = None
        self._doing(Activity.WARMING)
        self._unwatch = watch_standby(pipeline)
        self._thread = threading.Thread(target=self._run, name="epochal-standby", daemon=True)
        self._thread.start()

    @property
    def role(self) -> Role:
        """Whether it warms up, waits or works."""
        return self._presence.role

    @property
    def isActive(self) -> bool:  # noqa: N802  as Spark's queries call it
        return not self._has_ended.is_set()

    def awaitTermination(self, timeout: float | None = None) -> bool:  # noqa: N802  the same
        """Wait until it has ended; raises what ended it. False where the time was over before."""
        has_ended = self._has_ended.wait(timeout)
        if self.error is not None:
            raise self.error
        return has_ended

    def stop(self) -> None:
        """Stop the query if it works, let the lease go, and end."""
        self._is_stopping.set()
        self._has_ended.wait(_STOP_WAIT_MAX_S)

    # The turns

    def _run(self) -> None:
        try:
            warm_up(self._spark, self._sinks, self._columns)
            threading.Thread(target=self._keep_warm, name="epochal-warm", daemon=True).start()
            self._turn_to(Role.WAITING)
            with closing(self._turns()) as turns:
                for kept in turns:
                    self._turn_to(Role.WORKING)
                    is_over = self._work(kept)
                    self._turn_to(Role.WAITING)
                    if is_over:
                        return
        except BaseException as error:  # noqa: BLE001  reported by awaitTermination
            self.error = as_epochal(error, "a standby driver")
            logger.error("%s: %s", self._pipeline, self.error)  # noqa: TRY400  it has its own text
        finally:
            self._end()

    def _end(self) -> None:
        self._doing(Activity.FAILED if self.error is not None else Activity.STOPPED)
        self._unwatch()
        self._presence.close()
        for close in (self._lease.close, self._log.close):
            try:
                close()
            except (EpochalError, OSError) as error:
                logger.warning("%s: %s", self._pipeline, error)
        self._has_ended.set()

    def _turn_to(self, role: Role) -> None:
        self._presence.role = role
        self._doing(Activity.WORKING if role is Role.WORKING else Activity.WAITING)

    def _doing(self, activity: Activity) -> None:
        show_activity(self._pipeline, lambda: activity)

    def _turns(self) -> Generator[KeptLease]:
        """The lease, each time that it is this driver's turn."""
        is_silent = False
        while not self._is_stopping.wait(self._lease.look_every_s):
            if self._jvm_error is not None:
                raise self._jvm_error
            try:
                is_turn = self._lease.acquire(this_driver())
                if is_turn and self._is_paused():
                    self._lease.release()
                    self._is_stopping.wait(_PAUSE_LOOK_EVERY_S)
                    continue
                is_silent = False
            except Misconfigured:
                raise
            except (EpochalError, OSError) as error:
                if not is_silent:
                    logger.warning("%s: still waiting: %s", self._pipeline, error)
                is_silent = True
                continue
            if is_turn:
                kept = KeptLease(self._lease, this_driver())
                try:
                    yield kept
                finally:
                    kept.release()

    def _is_paused(self) -> bool:
        newest = newest_record(self._log)
        return newest is not None and newest.record.state.pause is not None

    def _work(self, kept: KeptLease) -> bool:
        """Start, and follow the query to its end. True: this driver has nothing left to do."""
        try:
            # Anew: what a static table in a join lists is as old as its DataFrame.
            run = self._start(self._build())
        except Fenced as error:
            self._fenced(error, kept)
            return False
        except Refused:
            if self._is_paused():
                return False
            raise
        self._doing(Activity.WORKING)  # not the run's own: its end is not that of the standby
        self.query = run.query
        try:
            self._follow(run, kept)
        finally:
            self.query = None
        if self._is_stopping.is_set():
            return True
        if isinstance(run.error, Fenced):
            self._fenced(run.error, kept)
            return False
        if run.error is not None:
            raise run.error
        if kept.is_lost.is_set() or self._is_paused():
            return False
        _raise_error_of(run.query)
        return True

    def _follow(self, run: Run, kept: KeptLease) -> None:
        while run.query is not None and is_active(run.query):
            if self._is_stopping.wait(_LOOK_EVERY_S):
                stop_query(run.query)
            elif kept.is_lost.is_set():
                run.resign("the query is stopped: another driver has the lease of the pipeline")
        run.end()

    def _fenced(self, error: Fenced, kept: KeptLease) -> None:
        logger.warning("%s: waits again: %s", self._pipeline, error.message)
        self._turn_to(Role.WAITING)
        if kept.is_lost.is_set() or not self._still_holds():
            return
        kept.release()
        for is_at_work in _signs_of_life(self._log):
            if not is_at_work or self._is_stopping.wait(_PAUSE_LOOK_EVERY_S):
                return

    def _still_holds(self) -> bool:
        try:
            return self._lease.renew()
        except (EpochalError, OSError):
            return True

    def _keep_warm(self) -> None:
        while not self._is_stopping.wait(WARM_EVERY_S) and self.isActive:
            if self.role is not Role.WAITING:
                continue
            try:
                warm(self._spark, self._sinks)
            except Exception as error:  # noqa: BLE001  a cold takeover is one too
                if is_jvm_gone(error):
                    self._jvm_error = as_epochal(error, "a standby driver")
                    return
                logger.warning("%s: could not warm up: %s", self._pipeline, error)


def _signs_of_life(log: EpochLog) -> Iterator[bool]:
    """Whether the newest driver seems to work, each time that it is asked for."""
    history = history_of(log)
    seen: object = None
    changed_s = time.monotonic()
    while True:
        try:
            newest = newest_record(log)
            live = None if history is None else history.live()
        except (EpochalError, OSError):
            yield True  # who can't ask does not take over
            continue
        if newest is None or newest.record.state.is_stopped:
            yield False
            continue
        found = (newest.number, None if live is None else live.at)
        if found != seen:
            seen, changed_s = found, time.monotonic()
        yield time.monotonic() - changed_s < SILENT_AFTER_S


def _raise_error_of(query: StreamingQuery | None) -> None:
    failure = None if query is None else query.exception()
    if failure is not None:
        raise TaskFailed(f"the query stopped: {failure}")


# Warming up


@dataclass(frozen=True, slots=True)
class WarmTask:
    """Loads in a worker what the tasks of these sinks load. Connects to nothing."""

    packages: tuple[str, ...]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from epochal.spark.task import spare_modules_from_collection  # noqa: PLC0415  in workers

        for package in self.packages:
            name = f"{package}.writer"
            if util.find_spec(name) is not None:
                import_module(name)
        yield from batches
        spare_modules_from_collection()


def warm(spark: SparkSession, sinks: Sequence[Sink]) -> None:
    """Let every core fork a Python worker and load the writers of the sinks; nothing is written."""
    cores = spark.sparkContext.defaultParallelism
    packages = tuple(sorted({type(sink).__module__.rpartition(".")[0] for sink in sinks}))
    frame = spark.range(0, cores, numPartitions=cores)
    frame.mapInArrow(WarmTask(packages), frame.schema).collect()


def warm_up(spark: SparkSession, sinks: Sequence[Sink], columns: StructType) -> None:
    """
    The first time: also what the first query of a session, the first batch of these columns and the
    first file load and compile. What fails here only makes the takeover slower.
    """
    warm(spark, sinks)
    for step in (_run_query, partial(_select_nothing, sinks, columns), _write_file):
        try:
            step(spark)
        except Exception as error:
            if is_jvm_gone(error):
                raise
            logger.debug("a step of the warm-up failed", exc_info=error)


def _run_query(spark: SparkSession) -> None:
    """
    One micro-batch of nothing. In a session of its own: a checkpoint location that is set for all
    queries would keep it, and the next warm-up would read the rows of all the time since.
    """

    def touch(batch: DataFrame, _: int) -> None:
        batch.collect()

    session = spark.newSession()
    session.conf.unset("spark.sql.streaming.checkpointLocation")
    rows = session.readStream.format("rate").option("rowsPerSecond", 1).load()
    writer = rows.writeStream.foreachBatch(touch).trigger(once=True)
    writer.queryName("epochal warm-up").start().awaitTermination()


def _select_nothing(sinks: Sequence[Sink], columns: StructType, spark: SparkSession) -> None:
    """What each sink selects, and the hash of its rows, over a batch of which no row is left."""
    from pyspark.sql import functions  # noqa: PLC0415  this package is importable without it

    cores = spark.sparkContext.defaultParallelism
    rows = spark.range(0, cores, numPartitions=cores).select(
        *(functions.lit(None).cast(one.dataType).alias(one.name) for one in columns.fields)
    )
    # Not a constant, by which the optimizer would know that nothing is to be done.
    nothing = rows.where("rand() < 0")
    for sink in sinks:
        selected = project(sink, nothing)
        hashed = with_row_hash(selected)
        (selected if hashed is None else hashed).write.format("noop").mode("overwrite").save()


def _write_file(spark: SparkSession) -> None:
    """An empty Parquet file; only where executors are on this machine, and find the folder."""
    if not str(spark.sparkContext.master).startswith("local"):
        return
    with TemporaryDirectory(prefix="epochal-warm-up-") as folder:
        spark.range(1).where("rand() < 0").write.mode("overwrite").parquet(f"file://{folder}/out")
