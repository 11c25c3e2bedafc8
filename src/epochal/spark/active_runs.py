"""
The runs of this process: which start of a pipeline works on which checkpoint, and how it ends.

A stopped query can leave its Python callback running (SPARK-39218), and a notebook's cell is run
again at once. So a run holds a lock while it is in an epoch, the process keeps one run per
checkpoint, and a new start ends the earlier run first, as Spark itself does with queries:

    query 1 runs      query.stop()        pipeline.start() again
    |--- epoch 5 ------------|               |
                callback goes on --------|   |
                                         lock: the new start waits here, then claims
"""

from __future__ import annotations

import atexit
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from epochal.coordinator import Coordinator, EpochFigures, SourceFigures, Stopped
from epochal.coordinator.idle_sweep import IdleSweep
from epochal.coordinator.journal import EpochLog
from epochal.errors import EpochalError, Fenced, Misconfigured
from epochal.protocol.admission import Start, require_same_pipeline
from epochal.protocol.state import Pause
from epochal.spark.epoch import EpochWriter
from epochal.spark.error_text import (
    StopSignal,
    as_epochal,
    end_of_remote,
    is_jvm_gone,
    message_first,
    stop_or_error,
)
from epochal.telemetry.history import figures_in, history_of
from epochal.telemetry.probes import Activity
from epochal.terms import EpochNumber, Generation, SinkName

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from epochal.spark.checkpoint import Checkpoint

logger = logging.getLogger("epochal")

CALLBACK_WAIT_MAX_S = 120.0
"""How long a start waits for an epoch that an earlier run of this process is still in."""
_EXIT_WAIT_MAX_S = 10.0
_STOP_WAIT_MAX_S = 5.0
_LOOK_EVERY_S = 0.01
_BEHIND = ("maxOffsetsBehindLatest", "numFilesOutstanding")
"""What Kafka's source, and platforms' file sources, call what is there and not read yet."""
_RESTARTS = "spark.sql.streaming.stopActiveRunOnRestart"
_ASKED_MAX = 3
"""How often Spark's JVM is asked before it is taken for gone: see `_await_answered`."""


class Run:
    """One start of a pipeline on one checkpoint. After its end it writes no epoch any more."""

    def __init__(
        self,
        *,
        coordinator: Coordinator,
        writer: EpochWriter,
        checkpoint: Checkpoint,
        read_schemas: Callable[[DataFrame], Mapping[SinkName, pa.Schema]] | None = None,
        query_id: str | None = None,
    ) -> None:
        """
        `read_schemas`: for a start that did not know what rows will come. `query_id`: of the only
        query that calls this run, where its batches don't tell.
        """
        self.coordinator = coordinator
        self.checkpoint = checkpoint
        self.error: EpochalError | None = None
        self.query: StreamingQuery | None = None
        self._writer = writer
        self._read_schemas = read_schemas
        self._lock = threading.Lock()
        self._is_over = False
        self._has_query_failed = False
        self._resigned: str | None = None
        self._only_query_id = query_id
        self._query_id = query_id
        self._idle_sweep: IdleSweep | None = None

    @property
    def location(self) -> str:
        return self.checkpoint.location

    @property
    def is_over(self) -> bool:
        return self._is_over

    @property
    def query_id(self) -> str | None:
        """None before the first epoch, where nobody said it."""
        return self._query_id

    def activity(self) -> Activity:
        if self.error is not None or self._has_query_failed:
            return Activity.FAILED
        return Activity.STOPPED if self._is_over else Activity.WORKING

    def epoch(self, batch: DataFrame, epoch: int) -> None:
        """Write one micro-batch. Called by Spark, on the driver, for each of them."""
        number = EpochNumber(epoch)
        raising = raised_into_spark(f"epoch {epoch}", self._failed, self._is_stopped)
        with self._lock, raising:
            query_id = self._only_query_id or query_id_of(batch)
            self._require_own(query_id)
            self._require_may_go_on()
            if self._read_schemas is not None:
                # Only now: tables that are missing are created for these rows.
                self.coordinator.check(self._read_schemas(batch))
                self._read_schemas = None
            self._writer.write(
                batch,
                number,
                query_id=query_id,
                query=None if self._only_query_id else self.query,
                offsets=lambda: self.checkpoint.offsets(number),
                is_stopped=self._is_stopped,
            )

    def _is_stopped(self) -> bool:
        """Whether the query was stopped; also where it is not known here."""
        return self.query is None or not is_active(self.query)

    def _failed(self, error: EpochalError) -> None:
        self.coordinator.tracker.troubled(error)
        if isinstance(error, Stopped):
            self._stop_query(error.message)
        else:
            self.error = error

    def _require_may_go_on(self) -> None:
        if self.error is not None and self._only_query_id is not None:
            raise self.error
        pause = self.coordinator.state.pause
        if pause is not None:
            raise Stopped(_paused(pause))
        if self._resigned is not None:
            raise Stopped(self._resigned)

    def resign(self, because: str, wait_s: float = CALLBACK_WAIT_MAX_S) -> None:
        """Begin no further epoch; stop the query once the one that is being written has ended."""
        self._resigned = because
        if self._lock.acquire(timeout=wait_s):
            self._lock.release()
        if self.query is not None and is_active(self.query):
            logger.warning("%s: %s", self.location, because)
            stop_query(self.query)

    def _stop_query(self, because: str) -> None:
        """
        Stop the query where it is active yet: Ctrl-C cancels its jobs and leaves it to fail.

        From another thread, as `stop` waits for the end of this very epoch.
        """
        query = self.query
        if query is None or not is_active(query):
            return
        logger.warning("%s: %s", self.location, because)
        threading.Thread(target=stop_query, args=(query,), daemon=True).start()
        deadline = time.monotonic() + _STOP_WAIT_MAX_S
        while is_active(query) and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY_S)

    def end(self, wait_s: float = CALLBACK_WAIT_MAX_S) -> None:
        """Stop cleanly, once the epoch that is being written is done. May be repeated."""
        if self._idle_sweep is not None:
            self._idle_sweep.stop()
        if not self._lock.acquire(timeout=wait_s):
            raise Misconfigured(
                f"{self.location}: an epoch of the query that was stopped in this process is still "
                f"being written after {wait_s:.0f} s",
                "wait until its targets answer and start again; or restart this process, the next "
                "start finishes what is decided",
            )
        try:
            if not self._is_over:
                self._is_over = True
                self.coordinator.stop()
        finally:
            self._lock.release()
        _forget(self)

    def _fail(self, error: EpochalError) -> None:
        """End the query by an error that was found while no epoch came."""
        self.error = error
        logger.error("%s: %s", self.location, error)
        # On Spark Connect the next batch raises it: a query that is stopped has no error.
        if self.query is not None and self._only_query_id is None:
            stop_as_failed(self.query, error)

    def end_with(self, query: StreamingQuery) -> None:
        """End when the query does, however it does; sweep while it is idle."""
        self.follow(query)
        threading.Thread(
            target=self._await_end, args=(query,), name=f"epochal-end-{query.id}", daemon=True
        ).start()

    def follow(self, query: StreamingQuery) -> None:
        """Sweep while the query is idle, and report how far its sources are."""
        self.query = query
        self.coordinator.tracker.watch_sources(partial(source_figures, query))
        self._idle_sweep = IdleSweep(
            self.coordinator,
            self._lock,
            every_s=self._writer.limits.sweep_every_s,
            on_error=self._fail,
            on_pause=lambda pause: self._stop_query(_paused(pause)),
        )

    def _await_end(self, query: StreamingQuery) -> None:
        # A thread and not a listener: a listener would be called into Python at every progress.
        try:
            _await_answered(query)
        except Exception as error:  # the query itself reports how it ended
            logger.debug("%s: the query has ended", self.location, exc_info=error)
            why = stop_or_error(error, "the query", is_stopped=lambda: False)
            self._has_query_failed = not isinstance(why, Stopped)
            if self.error is None and is_jvm_gone(error):
                self._failed(as_epochal(error, "the query"))
        try:
            self.end(wait_s=threading.TIMEOUT_MAX)
        except Exception:
            logger.exception("%s: did not stop cleanly", self.location)

    def _require_own(self, running: str | None) -> None:
        if self._is_over:
            raise Fenced(
                f"{self.location}: this start of the pipeline is over, and its query still runs",
                "a later start of the same process has taken over: leave this query stopped",
            )
        if running != self._query_id:
            require_query_of(self.checkpoint, running)
            self._query_id = running


class RemoteRun:
    """
    A run whose epochs are written in a Python worker of a Spark Connect server, as this process
    sees it: by its query, and by its epoch log where that is within reach.
    """

    def __init__(
        self,
        *,
        location: str,
        query: StreamingQuery,
        log: EpochLog | None,
        generation: Generation,
    ) -> None:
        """`generation`: the one that this process has claimed; its worker's is the next."""
        self.location = location
        self.query = query
        self._log = log
        self._generation = generation

    @property
    def is_over(self) -> bool:
        return not is_active(self.query)

    @property
    def query_id(self) -> str | None:
        return str(self.query.id)

    @property
    def error(self) -> EpochalError | None:
        """The error that ended the query, with the class, message and hint that it had there."""
        try:
            failure = self.query.exception()
        except Exception as error:
            logger.debug("%s: the query can't be asked", self.location, exc_info=error)
            return None
        why = None if failure is None else end_of_remote(failure)
        return None if isinstance(why, Stopped) else why

    def last_epochs(self, count: int) -> Sequence[EpochFigures]:
        """By the history beside the log, which is some seconds behind; none where out of reach."""
        history = None if self._log is None else history_of(self._log)
        if history is None:
            return ()
        found = history.page(limit=count).epochs
        return [figures_in(one) for one in reversed(found) if one.generation > self._generation]

    def end(self) -> None:
        """Stop the query. Its worker ends by itself, and writes its last record."""
        if is_active(self.query):
            stop_query(self.query)
        _forget(self)


def source_figures(query: StreamingQuery) -> SourceFigures | None:
    """By Spark's last progress: how far its sources are behind, and how many rows arrive."""
    try:
        progress = query.lastProgress
        read = None if progress is None else json.loads(progress.json)
    except Exception as error:
        logger.debug("no progress of the query", exc_info=error)
        return None
    if read is None:
        return None
    behind = {}
    for source in read.get("sources", ()):
        counted = source.get("metrics") or {}
        found = next((counted[name] for name in _BEHIND if name in counted), None)
        if found is not None:
            behind[str(source["description"])] = int(float(found))
    return SourceFigures(rows_per_s=float(read.get("inputRowsPerSecond") or 0.0), behind=behind)


def _paused(pause: Pause) -> str:
    return f"the query is stopped: the pipeline is {pause}"


class EachBatch:
    """The callback of `Pipeline.each_batch`. After a run has ended, the next batch starts one."""

    def __init__(
        self,
        spark: SparkSession,
        start_run: Callable[[], Run],
        hand_over: Callable[[Run], object],
    ) -> None:
        self._spark = spark
        self._start_run = start_run
        self._hand_over = hand_over
        self._run = start_run()
        self._query_run: str | None = None

    def __reduce__(self) -> tuple[Callable[[object], object], tuple[object]]:
        """Pickled, it is the function by which another process goes on in the place of this one."""
        return _as_it_is, (self._hand_over(self._run),)

    def __call__(self, batch: DataFrame, epoch: int) -> None:
        # Spark gives each run of a query a job group of its own.
        query_run = batch.sparkSession.sparkContext.getLocalProperty("spark.jobGroup.id")
        if self._query_run != query_run:
            # First of all: to claim for a query of another checkpoint stops this one's own.
            with raised_into_spark(f"epoch {epoch}", _ignore):
                require_query_of(self._run.checkpoint, query_id_of(batch))
        if self._run.is_over or (self._query_run is not None and self._query_run != query_run):
            with raised_into_spark(f"epoch {epoch}", self._not_started):
                self._run = self._start_run()
        if self._run.query is None:
            self._follow_end(batch)
        self._query_run = query_run
        self._run.epoch(batch, epoch)

    def _not_started(self, error: EpochalError) -> None:
        self._run.error = error

    def _follow_end(self, batch: DataFrame) -> None:
        query = self._spark.streams.get(query_id_of(batch) or "")
        if query is not None:
            self._run.end_with(query)


def _as_it_is(unpickled: object) -> object:
    return unpickled


@contextmanager
def raised_into_spark(
    doing: str,
    note: Callable[[EpochalError], None],
    is_stopped: Callable[[], bool] = lambda: True,
) -> Iterator[None]:
    """
    Raise whatever ends the block as Spark needs it: a stop, or one of our errors (see
    `stop_or_error`).

    Nothing else may leave a callback: after what is no Exception, as `sys.exit()` raises, the
    gateway answers nothing, and the query would wait for ever.
    """
    try:
        yield
    except BaseException as error:  # noqa: BLE001  see above
        why = stop_or_error(error, doing, is_stopped)
        note(why)
        if isinstance(why, Stopped):
            raise StopSignal from None
        shown = message_first(why)
        raise shown from shown.__cause__


def _ignore(error: EpochalError) -> None:
    """A query that is not this pipeline's own leaves no trace in it."""


def stop_as_failed(query: StreamingQuery, error: EpochalError) -> None:
    """
    Stop a query so that `awaitTermination` and `exception` raise what is in `error`.

    Spark asks Python for nothing while a source is idle, so the cause is set in the query's own
    object, before the stop that would otherwise count as one that was asked for. Where a version of
    Spark keeps it elsewhere, the query only stops, and `Pipeline.error` has the error.
    """
    from py4j.protocol import Py4JError  # noqa: PLC0415  comes with Spark

    try:
        execution = query._jsq.streamingQuery()
        _set_death_cause(execution, str(error))
    except (Py4JError, TypeError) as unknown:
        logger.warning("the query is stopped without its error: %s", unknown)
    query.stop()


def _set_death_cause(execution: Any, message: str) -> None:
    from py4j.protocol import Py4JError  # noqa: PLC0415  comes with Spark
    from pyspark import SparkContext  # noqa: PLC0415  this package is importable without it

    jvm: Any = SparkContext._jvm
    cause = jvm.java.lang.RuntimeException(message)
    no_parameters = jvm.org.apache.spark.api.python.PythonUtils.toScalaMap(jvm.java.util.HashMap())
    arguments = ("", message, cause, "", "", None, no_parameters)
    made = jvm.org.apache.spark.sql.streaming.StreamingQueryException
    try:
        failure = made(*arguments, jvm.scala.Option.empty())
    except (Py4JError, TypeError):
        failure = made(*arguments)  # before 4.2
    getattr(execution, "streamDeathCause_$eq")(failure)


def query_id_of(batch: DataFrame) -> str | None:
    return batch.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")


def require_query_of(checkpoint: Checkpoint, running: str | None) -> None:
    """Refuse a query that runs on another checkpoint than the pipeline's."""
    mine = checkpoint.query_id
    if running is not None and mine != running:
        raise Misconfigured(
            f"query {running} calls this pipeline, but the checkpoint {checkpoint.location} "
            f"belongs to {'no query' if mine is None else mine}",
            "give each_batch(checkpoint=…) and option('checkpointLocation', …) the same folder; "
            "each query needs an each_batch(…) of its own",
        )


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """False of a stop: the gateway logs whatever a callback raises, with its stack trace."""
    return not (record.exc_info and isinstance(record.exc_info[1], StopSignal))


for _name in ("py4j.clientserver", "py4j.java_gateway"):
    logging.getLogger(_name).addFilter(_is_worth_logging)


_runs: dict[str, Run | RemoteRun] = {}
_guard = threading.Lock()


def require_free_name(spark: SparkSession, name: str, location: str) -> None:
    """
    Refuse a name under which a query of this session runs on another checkpoint, and wait for the
    end of one that is stopping. Spark itself refuses both, when the pipeline is claimed already.
    """
    for query in spark.streams.active:
        where = _location_of(query)
        if query.name != name or where == location:
            continue
        if is_active(query):
            raise Misconfigured(
                f"a query named {name!r} runs in this Spark session already"
                + ("" if where is None else f", on the checkpoint {where}"),
                'stop it first; or give this one another name: start(…, queryName="…")',
            )
        _await_end_of(query)


def end_earlier_run(start: Start) -> None:
    """
    Stop the query that this process runs on the checkpoint of a start, if any, and end its run.

    A start that names the checkpoint of another pipeline by mistake is refused, and stops nothing.
    """
    with _guard:
        run = _runs.get(start.location)
    if run is None:
        return
    if isinstance(run, Run) and not run.is_over:
        require_same_pipeline(run.coordinator.state, start)
    query = run.query
    if query is not None and is_active(query):
        if not _may_restart():
            raise Misconfigured(
                f"{run.location}: query {query.id} runs in this process, and {_RESTARTS} is false",
                "query.stop() first",
            )
        query.stop()
    run.end()
    if query is not None:
        _await_end_of(query)


def add_run(run: Run | RemoteRun) -> None:
    """Note that a run now works on its checkpoint."""
    with _guard:
        _runs[run.location] = run
    if isinstance(run, RemoteRun):
        return
    # The handler that was registered last is called first: before those that close connections,
    # which a run needs to end.
    atexit.unregister(_end_runs)
    atexit.register(_end_runs)


def _may_restart() -> bool:
    from pyspark.sql import SparkSession  # noqa: PLC0415  this package is importable without it

    spark = SparkSession.getActiveSession()
    return spark is None or str(spark.conf.get(_RESTARTS, "true")).lower() == "true"


def _location_of(query: StreamingQuery) -> str | None:
    """The checkpoint of a query that a run of this process belongs to."""
    with _guard:
        runs = list(_runs.values())
    return next((run.location for run in runs if run.query and run.query.id == query.id), None)


def _await_end_of(query: StreamingQuery) -> None:
    """A query that was stopped is not active, and keeps its name until its thread has ended."""
    try:
        is_over = query.awaitTermination(int(CALLBACK_WAIT_MAX_S))
    except Exception as error:  # it has failed, and so has ended
        logger.debug("a query has ended", exc_info=error)
        return
    if not is_over:
        raise Misconfigured(
            f"query {query.name!r} was stopped, and has not ended after {CALLBACK_WAIT_MAX_S:.0f} "
            "s: an epoch of it is still being written",
            "wait until its targets answer and start again; or restart this process",
        )


def _await_answered(query: StreamingQuery) -> None:
    """
    Wait for the end of a query. Ctrl-C in a call to Spark of another thread closes the connection
    of this one, too: then the query goes on, and is waited for again.
    """
    while True:
        try:
            query.awaitTermination()
        except Exception as error:
            if is_jvm_gone(error) and is_active(query):
                continue
            raise
        return


def is_active(query: StreamingQuery) -> bool:
    """Whether a query is neither stopped nor failed; False where Spark's JVM has exited."""
    for _ in range(_ASKED_MAX):
        try:
            return query.isActive
        except Exception as error:  # noqa: BLE001  whatever a dead gateway raises
            if not is_jvm_gone(error):
                return False
    return False


def _forget(run: Run | RemoteRun) -> None:
    with _guard:
        if _runs.get(run.location) is run:
            del _runs[run.location]


def _end_runs() -> None:
    """
    Stop the queries that this process still runs, and let every run write its last record.

    Spark's JVM ends with the process, in the middle of an epoch: after Ctrl-C, or a script that
    does not wait for its query. What that leaves prepared would wait for the next start.
    """
    deadline = time.monotonic() + _EXIT_WAIT_MAX_S
    with _guard:
        # Those on a Connect server outlive this process.
        runs = [run for run in _runs.values() if isinstance(run, Run)]
    stopping = [
        threading.Thread(target=stop_query, args=(run.query,), daemon=True)
        for run in runs
        if run.query is not None
    ]
    for thread in stopping:
        thread.start()
    for thread in stopping:
        thread.join(max(0.0, deadline - time.monotonic()))
    for run in runs:
        try:
            run.end(wait_s=max(0.0, deadline - time.monotonic()))
        except Exception as error:  # noqa: BLE001  the process is ending
            logger.warning("%s: did not stop cleanly: %s", run.location, error)


def stop_query(query: StreamingQuery) -> None:
    """Stop a query, if Spark's JVM lives."""
    try:
        query.stop()
    except Exception as error:
        logger.debug("query could not be stopped", exc_info=error)
