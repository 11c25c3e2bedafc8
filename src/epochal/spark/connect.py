"""
Spark Connect: a query is started by a client, and its epochs are written by a worker of the server.

The function of `foreachBatch` is pickled to a Python worker that runs beside Spark's driver. All
that decides is there: at its first batch the worker makes the coordinator, and goes on as any
driver does. The client claims before the query starts, so that the last start wins, and hands
over what it has claimed (`StartToken`):

    client                                 worker on the server            newest record
    claims, recovers, closes                                               4
    starts the query, with token 4 ──────► unpickles the function
                                           first batch: claims above 4     5
                                           writes, decides, commits        6 …
    query.stop() ────────────────────────► SIGTERM: aborts what is open
                                           writes STOP, exits              9

A client that does not reach the log claims nothing. Its worker may then claim a log without a
record, and no other: a worker that was left over from an earlier start can't be told from it. The
same holds where the client reaches a new log, and not the checkpoint: with which epoch the log
begins, only the worker can know.

A worker has no JVM, so that the checkpoint and the log have to be within its own reach: folders of
its machine, object stores, databases, etcd.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import FrameType
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from epochal.coordinator.journal import EpochLog, StartToken
from epochal.errors import EpochalError, InvariantBroken, Misconfigured
from epochal.protocol.admission import Position
from epochal.spark.active_runs import Run, query_id_of, raised_into_spark, require_query_of
from epochal.spark.checkpoint import Checkpoint, open_checkpoint
from epochal.spark.error_text import StopSignal, Terminated
from epochal.spark.plan_analysis import PlanFacts
from epochal.spark.query_options import StartOptions
from epochal.spark.task import CarriedError
from epochal.spark.versions import is_connect
from epochal.storage.urls import OBJECT_SCHEMES, absolute_path, local_path, scheme_of
from epochal.terms import EpochNumber, SinkName

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from epochal.spark.start import Starter

logger = logging.getLogger("epochal")

_LOCAL = (None, "file", "sqlite")
_EXIT_WAIT_MAX_S = 10.0
_WORKER_STARTS = 5
_TOO_SLOW = "Python worker failed to connect back"
_NO_MODULE = re.compile(r"No module named '(?P<module>[\w.]+)'")
_MODULE_MISSING = (
    "install it in the Python of Spark's driver and executors (a cluster library), or send it "
    'along before the start: spark.addArtifacts("package.zip", pyfile=True)'
)

_described: dict[str, str] = {}
"""What the tasks of a session run, by the id of the session."""


@dataclass(kw_only=True)
class WorkerEpochs:
    """
    The function of `foreachBatch` where it runs in another process than the one that made it.

    It is pickled with the pipeline's declaration. In the worker, it lives as long as the query.
    """

    starter: Starter
    checkpoint: str
    token: StartToken | None
    """None where the log could not be claimed by the process that starts the query."""
    plan: PlanFacts
    schemas: Mapping[SinkName, pa.Schema]
    asked: StartOptions
    release: str
    """Of the package in the process that starts the query."""
    _run: Run | None = field(default=None, init=False)
    _unpickled_at: float = field(default=0.0, init=False)
    _unpickled_in: SparkSession | None = field(default=None, init=False)
    """The session of the query. From Spark 4.3 on that of a batch is a clone, in a worker too."""
    _is_busy: bool = field(default=False, init=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_run": None, "_unpickled_in": None, "_is_busy": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        from pyspark.sql import SparkSession  # noqa: PLC0415  this package is importable without it

        vars(self).update(state)
        self._unpickled_at = time.time()
        self._unpickled_in = SparkSession.getActiveSession()

    def __call__(self, batch: DataFrame, epoch: int) -> None:
        """Write one micro-batch. Called by Spark, in the worker's main thread."""
        self._is_busy = True
        try:
            with _carried():
                if self._run is None:
                    with raised_into_spark(f"epoch {epoch}", _log):
                        self._run = self._start(batch, EpochNumber(epoch))
                self._run.epoch(batch, epoch)
        finally:
            self._is_busy = False

    def _start(self, batch: DataFrame, epoch: EpochNumber) -> Run:
        """Claim where the client has left off, and recover. Once per worker."""
        _require_same_release(self.release)
        spark = batch.sparkSession
        is_remote = is_connect(spark)
        sessions = [spark, self._unpickled_in, getattr(type(spark), "_instantiatedSession", None)]
        known = [one for one in sessions if one is not None]
        if is_remote:
            for one in known:
                _send_once(one)
            self._end_by_signal()
        folder = open_checkpoint(self.checkpoint, None if is_remote else spark)
        query_id = folder.query_id if is_remote else query_id_of(batch)
        require_query_of(folder, query_id)
        query = _running(query_id, known)
        if query is None and is_remote:
            raise _not_its_query(folder)
        run = self.starter.run_handed_over(self, spark, folder, self._position(folder, epoch))
        if is_remote and query is not None:
            run.follow(query)
        elif query is not None:
            run.end_with(query)  # this process outlives its queries
        atexit.register(_end, run, known if is_remote else [])
        return run

    def _position(self, folder: Checkpoint, epoch: EpochNumber) -> Position | None:
        """How far Spark was before this query; None where the client has compared it."""
        if self.token is not None:
            return None
        planned_at = folder.triggered_at(epoch)
        if planned_at is None or planned_at < self._unpickled_at:
            return folder.position
        before = None if epoch == 0 else EpochNumber(epoch - 1)
        return Position(planned=before, finished=before)

    def _end_by_signal(self) -> None:
        """
        Let SIGTERM, by which the server ends the worker of a query that has ended, abort the epoch
        that is being written. `atexit` then writes STOP.
        """

        def terminate(_number: int, _frame: FrameType | None) -> None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if self._is_busy:
                raise Terminated
            sys.exit(0)

        signal.signal(signal.SIGTERM, terminate)


def _end(run: Run, sessions: Sequence[SparkSession]) -> None:
    try:
        run.end(_EXIT_WAIT_MAX_S)
    finally:
        # PySpark 4.3 does so once its threads stand still, and may wait for one of them for ever.
        for session in sessions:
            client: Any = session.client
            client.close()


def _running(query_id: str | None, sessions: Sequence[SparkSession]) -> StreamingQuery | None:
    """
    The query, where its session can be found. That of a batch is a clone, which may not know it;
    the one that has started it most often is the first of the process.
    """
    if query_id is None:
        return None
    found = (one.streams.get(query_id) for one in sessions)
    return next((query for query in found if query is not None), None)


def _log(error: EpochalError) -> None:
    logger.error("the pipeline is not started: %s", error)


@contextmanager
def _carried() -> Iterator[None]:
    """Raise our errors with a line by which the client finds their class, message and hint."""
    try:
        yield
    except StopSignal:
        raise
    except EpochalError as error:
        # Without frames: the message and hint come first in the text of the query's failure.
        raise CarriedError(error.to_line()) from type(error)(*error.args)


def _send_once(spark: SparkSession) -> None:
    """
    Let no request of this worker be sent again by itself.

    A plan that the client library sends again runs again, with tasks whose attempts count from
    zero: two of them would take themselves for the first (`Task.is_first`). And when the server is
    gone, the worker would ask for it for ten minutes.
    """
    client: Any = spark.client
    client.disable_reattachable_execute()
    client.set_retry_policies([])


def _not_its_query(folder: Checkpoint) -> Misconfigured:
    return Misconfigured(
        f"the query that calls this pipeline does not run on the checkpoint {folder.location}",
        "give each_batch(checkpoint=…) and option('checkpointLocation', …) the same folder",
    )


def _require_same_release(client: str) -> None:
    from epochal import __version__ as here  # noqa: PLC0415  the root imports this package

    if here != client:
        raise Misconfigured(
            f"the server has epochal {here}, and the query was started by epochal {client}",
            f"install epochal {client} on the server, or {here} in the client",
        )


# The client's side


def require_server(spark: SparkSession) -> None:
    """
    Refuse a server before Spark 4.0, and one whose tasks have no epochal, or another one. Asked
    once per session.
    """
    from epochal import __version__ as here  # noqa: PLC0415  the root imports this package

    session = str(getattr(spark, "session_id", id(spark)))
    if _described.get(session) == here:
        return
    if spark.version.startswith("3."):
        raise Misconfigured(
            f"Spark Connect of {spark.version} can't evaluate a batch once for several readers",
            "a server and a client of 4.0 or newer; or Spark's classic mode",
        )
    try:
        rows = spark.range(1, numPartitions=1).mapInArrow(_describing_worker(), "found string")
        found = json.loads(rows.collect()[0][0])
    except Exception as error:
        missing = _NO_MODULE.search(str(error))
        if missing is not None:
            raise _missing(missing["module"]) from None
        raise
    if found["epochal"] != here:
        has = f"epochal {found['epochal']}" if found["epochal"] else "no epochal"
        raise Misconfigured(
            f"Spark's workers run {found['python']}, which has {has}; this client has "
            f"epochal {here}",
            _MODULE_MISSING,
        )
    _described[session] = here


def _missing(module: str) -> Misconfigured:
    return Misconfigured(f"the Spark Connect server has no module {module}", _MODULE_MISSING)


def _describing_worker() -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    # A function inside of a function is sent as code; of any other the worker imports the module.
    def describe(_: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import json  # noqa: PLC0415  runs on a worker
        import sys  # noqa: PLC0415  the same

        import pyarrow as pa  # noqa: PLC0415  the same

        try:
            import epochal  # noqa: PLC0415  the same

            release = epochal.__version__
        except ImportError:
            release = ""
        text = json.dumps({"python": sys.executable, "epochal": release})
        yield pa.RecordBatch.from_pydict({"found": [text]})

    return describe


def spark_location(checkpoint: str | os.PathLike[str]) -> str:
    """The checkpoint as the server is given it: a folder by its whole path."""
    text = os.fspath(checkpoint)
    return absolute_path(text) if scheme_of(text) is None else text


def reached_checkpoint(spark: SparkSession, checkpoint: str) -> Checkpoint | None:
    """The checkpoint, where this process sees the one that the server will use; else None."""
    scheme = scheme_of(checkpoint)
    if scheme not in (*_LOCAL, *OBJECT_SCHEMES):
        raise Misconfigured(
            f"the checkpoint {checkpoint} can only be read through Spark's own file system, which "
            "a worker of Spark Connect does not reach",
            "keep it in a folder that the server's driver sees, or in an object store: "
            + ", ".join(f"{known}://…" for known in sorted(OBJECT_SCHEMES)),
        )
    if not _is_same_place(spark, checkpoint):
        return None
    found = open_checkpoint(checkpoint)
    try:
        found.position  # noqa: B018  asked for, to see whether it can be read
    except (EpochalError, OSError) as error:
        logger.debug("%s is out of reach here", checkpoint, exc_info=error)
        return None
    return found


def is_reached(spark: SparkSession, log: EpochLog) -> bool:
    """Whether this process sees the epoch log that the server will use."""
    if not _is_same_place(spark, log.place):
        return False
    try:
        log.numbers()
    except (EpochalError, OSError) as error:
        logger.debug("%s is out of reach here", log.place, exc_info=error)
        return False
    return True


def _is_same_place(spark: SparkSession, url: str) -> bool:
    """
    Whether a name means the same here and on the machine of Spark's driver. That of a folder does
    where the driver sees a file that is made here, in the nearest folder that is there already.
    """
    from pyspark.errors import PySparkException  # noqa: PLC0415  importable without pyspark

    scheme = scheme_of(url)
    if scheme not in _LOCAL:
        return True
    folder = Path(local_path(url))
    while not folder.is_dir():
        folder = folder.parent
    try:
        with NamedTemporaryFile(dir=folder, prefix="epochal-probe-") as probe:
            # Without a scheme as Spark reads it: on a cluster that may be HDFS.
            seen = probe.name if scheme is None else f"file://{probe.name}"
            return bool(spark.read.text(seen).columns)
    except (OSError, PySparkException) as error:
        logger.debug("%s is not shared with the server", folder, exc_info=error)
        return False


def started_query(writer: DataStreamWriter) -> StreamingQuery:
    """
    Start a query; a module that the server lacks is named with the way out.

    Spark starts the worker first, and gives it ten seconds. On a busy machine that may be too
    little for its imports: then there is no query yet, and it is tried again.
    """
    for attempts_left in reversed(range(_WORKER_STARTS)):
        try:
            return writer.start()
        except Exception as error:
            missing = _NO_MODULE.search(str(error))
            if missing is not None:
                raise _missing(missing["module"]) from None
            if not attempts_left or _TOO_SLOW not in str(error):
                raise
            logger.warning("a Python worker of the server was too slow, and is started again")
    raise InvariantBroken("a query was neither started nor refused")
