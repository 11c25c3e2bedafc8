"""
The Spark jobs of one epoch: one per sink, in parallel; when one fails, all are cancelled.

A job hands the sink's rows to tasks in Python (`task`), or is one of Spark's own writer
(`engine_write`), where the sink's committer and the session have nothing against it, or collects
rows that are few for the driver itself (`driver_write`).
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

from epochal.contract import EngineWrites
from epochal.coordinator.gates import is_interrupt
from epochal.coordinator.targets import engine_choice
from epochal.errors import TaskFailed
from epochal.kit.row_layout import LaysOutRows
from epochal.protocol.receipts import receipt_in
from epochal.spark import engine_write
from epochal.spark.arrow_transfer import for_transfer, plainly_named
from epochal.spark.batch_plan import NOT_ADAPTIVE
from epochal.spark.driver_write import DriverWrite
from epochal.spark.engine_write import SessionWriter
from epochal.spark.error_text import stop_or_error
from epochal.spark.plan_analysis import is_narrow_above_batch
from epochal.spark.projection import arrow_schema, for_tasks, project
from epochal.spark.row_hash import is_hashed_alike, row_hash, with_row_hash
from epochal.spark.task import RECEIPT_COLUMN, PrepareTask
from epochal.spark.versions import is_connect
from epochal.terms import EpochNumber, Identity, Json, Receipt, SinkName

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from epochal.contract import Sink
    from epochal.terms import Limits

logger = logging.getLogger("epochal")

_DESCRIPTION = "spark.job.description"
_RELEASE_WAIT_MAX_S = 5.0
_LOOK_EVERY_S = 5.0
_NO_CALLS = "the epoch is tried again at the next start; the JVM's log on stderr has the reason"
COMPILED = {"spark.sql.codegen.hugeMethodLimit": "8000"}
"""
Of the session, while our jobs run. HotSpot compiles no larger method, and by default Spark makes
one of a whole stage up to eight times that: rows of a hundred columns would be laid out and hashed
by an interpreter.
"""
LAID_OUT = {"spark.sql.execution.arrow.maxBytesPerBatch": str(1 << 20)}
"""
The same where rows are laid out as bytes. By default Spark counts rows alone: batches of large ones
would leave the processor's cache at every copy on their way to Python. Older releases ignore it.
"""

Timing = Callable[[SinkName], AbstractContextManager[None]]
"""Measures the time that one sink takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One sink's part of an epoch."""

    sink: Sink
    identity: Identity
    handout: Json
    engine: EngineWrites | None = None
    """The committer, where Spark's own writer may prepare the rows."""
    job_number: int = 0
    """Given once by a driver: it names the job of Spark's own writer (I6)."""
    on_driver: DriverWrite | None = None
    """Where few rows are expected, which the driver may write itself."""
    writers_max: int | None = None
    """How many tasks may prepare: further partitions are put together."""


@dataclass(slots=True, kw_only=True)
class Prepared:
    """The receipts of the jobs that succeeded, and the first error if one did not."""

    receipts: dict[SinkName, Sequence[Receipt]] = field(default_factory=dict)
    error: BaseException | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Transfer:
    """A sink's rows in the form in which they are sent to its tasks."""

    rows: DataFrame
    is_hashed: bool = False
    hashes_here: bool = False
    is_packed: bool = False


def prepare_all(
    batch: DataFrame,
    epoch: EpochNumber,
    parts: Sequence[Part],
    *,
    writer: SessionWriter,
    limits: Limits,
    fingerprint: bool,
    is_narrow: bool,
    is_opened: bool = False,
    timing: Timing,
    known_settings: dict[str, str | None] | None = None,
) -> Prepared:
    """
    Prepare the batch at every sink. Only receipts of a job that succeeded count (I6).

    `is_narrow`: see `PlanFacts.is_narrow`, here of the batch. `is_opened`: see `batch_plan.opened`.
    `known_settings`: see `session_settings`.
    """
    outcome = Prepared()
    spark = batch.sparkSession
    # By them the jobs of others are cancelled where one fails; on Spark Connect also one's own.
    is_tagged = len(parts) > 1 or is_connect(spark)
    tags = {part.identity.sink: _tag(part, epoch) for part in parts if is_tagged}

    def run(part: Part) -> None:
        sink = part.identity.sink
        try:
            with timing(sink), described(spark, _title(part, epoch), tag=tags.get(sink, "")):
                outcome.receipts[sink] = _prepare(
                    batch,
                    part,
                    epoch,
                    writer=writer,
                    limits=limits,
                    fingerprint=fingerprint,
                    is_narrow=is_narrow,
                )
        except BaseException as error:
            if is_interrupt(error):
                raise
            if outcome.error is None:
                outcome.error = stop_or_error(error, f"epoch {epoch}, sink {sink!r}")
                cancel()

    def cancel() -> None:
        # Best effort: of a JVM that has exited, the jobs are gone as well.
        with suppress(Exception):
            for tag in tags.values():
                cancel_tagged(spark, tag)

    try:
        settings = _settings_for(spark, parts, is_opened=is_opened)
        with session_settings(spark, settings, known_settings):
            if len(parts) == 1:
                run(parts[0])
            else:
                _in_parallel(run, parts, cancel, spark)
    except Exception as error:  # noqa: BLE001  of the settings, by a JVM that has exited
        outcome.error = outcome.error or stop_or_error(error, f"epoch {epoch}")
    return outcome


def _settings_for(
    spark: SparkSession, parts: Sequence[Part], *, is_opened: bool
) -> Mapping[str, str]:
    settings = engine_write.SETTINGS if any(part.engine is not None for part in parts) else {}
    if is_connect(spark):
        return settings  # its session is shared with its client, and other queries
    is_laid_out = any(isinstance(part.sink, LaysOutRows) for part in parts)
    return {
        **settings,
        **COMPILED,
        **(LAID_OUT if is_laid_out else {}),
        **(NOT_ADAPTIVE if is_opened else {}),
    }


_settings: dict[tuple[str, str], tuple[int, str | None]] = {}
"""
By session and name: how many jobs of ours need a setting as it is, and what it was before; None
where it was never set: it may be one that this release does not know.
"""
_settings_lock = threading.Lock()


@contextmanager
def session_settings(
    spark: SparkSession, wanted: Mapping[str, str], known: dict[str, str | None] | None = None
) -> Iterator[None]:
    """
    Settings of a session, for as long as our jobs run: with some of them Spark would plan other
    parts of a query otherwise, too. One that others use, as that of a once-only load, gets back
    what it had when the last of the loads has ended that run in it at the same time.

    `known`: what a session that nobody else uses, as that of a streaming query, has without our
    jobs. It is asked for once, as each call into the JVM counts in a small epoch.
    """
    with ExitStack() as settings:
        for name, value in wanted.items():
            settings.enter_context(
                _setting(spark, name, value)
                if known is None
                else _known_setting(spark, name, value, known)
            )
        yield


@contextmanager
def _known_setting(
    spark: SparkSession, name: str, value: str, known: dict[str, str | None]
) -> Iterator[None]:
    if name not in known:
        known[name] = spark.conf.get(name, None)
    before = known[name]
    if before == value:
        yield
        return
    spark.conf.set(name, value)
    try:
        yield
    finally:
        # A JVM that has exited must not hide the error by which that became known.
        with suppress(Exception):
            _put_back(spark, name, before)


@contextmanager
def _setting(spark: SparkSession, name: str, value: str) -> Iterator[None]:
    session: Any = spark
    key = str(session._jsparkSession.sessionUUID()), name
    with _settings_lock:
        users, before = _settings.get(key) or (0, spark.conf.get(name, None))
        if not users and before != value:
            spark.conf.set(name, value)
        _settings[key] = users + 1, before
    try:
        yield
    finally:
        with _settings_lock:
            users, before = _settings.pop(key)
            if users > 1:
                _settings[key] = users - 1, before
            elif before != value:
                # A JVM that has exited must not hide the error by which that became known.
                with suppress(Exception):
                    _put_back(spark, name, before)


def _put_back(spark: SparkSession, name: str, before: str | None) -> None:
    if before is None:
        spark.conf.unset(name)
    else:
        spark.conf.set(name, before)


def _in_parallel(
    run: Callable[[Part], None],
    parts: Sequence[Part],
    cancel: Callable[[], None],
    spark: SparkSession,
) -> None:
    started: list[threading.Thread | _JvmThread] = []
    try:
        with sent_once(spark):
            for part in parts:
                thread = _thread(spark, partial(run, part), f"epochal-{part.identity.sink}")
                thread.start()
                started.append(thread)
        _join(started)
    except BaseException:
        # Ctrl-C: when the epoch is aborted, no job of it may still prepare.
        cancel()
        _join(started)
        raise


def _join(threads: Sequence[threading.Thread | _JvmThread]) -> None:
    for thread in threads:
        thread.join()


def _thread(
    spark: SparkSession, function: Callable[[], None], name: str
) -> threading.Thread | _JvmThread:
    if is_connect(spark):  # tags are each thread's own there
        return threading.Thread(target=function, name=name, daemon=True)
    return _JvmThread(spark, function, name)


class _JvmThread:
    """
    A thread of the JVM, which calls a function: Ctrl-C in a call to Spark closes the connections
    that Python has opened to the JVM, those of all threads, and not those of such calls.

    It has the local properties of this thread, so that a stop of the query cancels its jobs.
    """

    def __init__(self, spark: SparkSession, function: Callable[[], None], name: str) -> None:
        context: Any = spark.sparkContext
        self._properties = context._jsc.sc().getLocalProperties().clone()
        self._context, self._function, self._name = context, function, name
        self._has_ended = threading.Event()
        self._future: Any = None

    def start(self) -> None:
        self._future = _jvm_threads(self._context._gateway).submit(self)

    def run(self) -> None:
        """Called by the JVM."""
        threading.current_thread().name = self._name
        try:
            self._context._jsc.sc().setLocalProperties(self._properties)
            self._function()
        finally:
            # The JVM lets go of this object only when it collects its garbage.
            del self._function, self._properties
            self._has_ended.set()

    def join(self) -> None:
        while not self._has_ended.wait(_LOOK_EVERY_S):
            if self._future.isDone() and not self._has_ended.is_set():
                raise TaskFailed("Spark's JVM could not call Python", _NO_CALLS)

    class Java:
        implements: ClassVar = ["java.lang.Runnable"]


@lru_cache(maxsize=1)
def _jvm_threads(gateway: Any) -> Any:
    """Kept for some time, with their connections."""
    from pyspark import java_gateway  # noqa: PLC0415  this package is importable without it

    cast("Any", java_gateway).ensure_callback_server_started(gateway)
    return gateway.jvm.org.apache.spark.util.ThreadUtils.newDaemonCachedThreadPool("epochal")


def _prepare(
    batch: DataFrame,
    part: Part,
    epoch: EpochNumber,
    *,
    writer: SessionWriter,
    limits: Limits,
    fingerprint: bool,
    is_narrow: bool,
) -> Sequence[Receipt]:
    """Run the job of one sink."""
    frame = project(part.sink, batch)
    schema = arrow_schema(part.sink, frame.schema)
    job_of = partial(_job_of, frame, schema, part, epoch, limits=limits, is_narrow=is_narrow)
    if part.on_driver is not None:
        few = _few(frame, part, schema, fingerprint=fingerprint)
        receipt = part.on_driver.prepare(*job_of(few, is_narrow=False))
        if receipt is not None:
            return (receipt,)
    if part.engine is not None:
        could_write = partial(writer.ability, schema=frame.schema)
        form, ability = engine_choice(part.engine, schema, could_write)
        if ability.granted:
            handle = part.identity.job_handle(epoch, part.job_number)
            asked = part.engine.engine_write(handle, schema, form)
            with sent_once(batch.sparkSession):
                written = engine_write.write(frame, asked, schema, fingerprint=fingerprint)
            return (part.engine.gather(written),)
    rows, job = job_of(_transfer(frame, part, schema, fingerprint=fingerprint))
    if part.writers_max is not None:
        rows = rows.coalesce(part.writers_max)
    with sent_once(batch.sparkSession):
        collected = rows.mapInArrow(job, _receipt_schema()).collect()
    return tuple(receipt_in(json.loads(row[0])) for row in collected)


def _job_of(
    frame: DataFrame,
    schema: pa.Schema,
    part: Part,
    epoch: EpochNumber,
    transfer: _Transfer,
    *,
    limits: Limits,
    is_narrow: bool,
) -> tuple[DataFrame, PrepareTask]:
    job = PrepareTask(
        sink=for_tasks(part.sink),
        identity=part.identity,
        epoch=epoch,
        schema=schema,
        handout=part.handout,
        limits=limits,
        # Only for sinks with a handout: the analysis costs a few calls to the JVM.
        is_narrow=is_narrow and part.handout is not None and is_narrow_above_batch(frame),
        is_hashed=transfer.is_hashed,
        hashes_here=transfer.hashes_here,
        is_packed=transfer.is_packed,
    )
    return transfer.rows, job


def _few(frame: DataFrame, part: Part, schema: pa.Schema, *, fingerprint: bool) -> _Transfer:
    """For the driver: to have Spark plan another form of few rows costs more than it saves."""
    if fingerprint and not is_hashed_alike(frame.schema):
        return _transfer(frame, part, schema, fingerprint=fingerprint)
    return _Transfer(rows=plainly_named(frame, frame.schema), hashes_here=fingerprint)


def _transfer(frame: DataFrame, part: Part, schema: pa.Schema, *, fingerprint: bool) -> _Transfer:
    if isinstance(part.sink, LaysOutRows):
        from epochal.spark.row_layout import packed  # noqa: PLC0415  needs pyspark

        hash_column = row_hash(frame) if fingerprint else None
        as_bytes = packed(frame, part.sink, schema, part.handout, extra_column=hash_column)
        if as_bytes is not None:
            return _Transfer(rows=as_bytes, is_hashed=hash_column is not None, is_packed=True)
    hashed = with_row_hash(frame) if fingerprint else None
    rows = for_transfer(frame if hashed is None else hashed, frame.schema)
    return _Transfer(rows=rows, is_hashed=hashed is not None, is_packed=False)


_job = threading.local()
"""Whether calls to the JVM by this thread run a job of ours."""


@contextmanager
def sent_once(spark: SparkSession) -> Iterator[None]:
    """
    Let no call of a job be sent to the JVM again: the job would run twice at the same time, with
    tasks that each take themselves for the first (`Task.is_first`), and writers in one folder.

    py4j does so where an answer does not come, as to a load in one thread when Ctrl-C in a call to
    Spark of another closes the connections of both. Such a job fails, and its late tasks are known.
    """
    if is_connect(spark):
        yield  # see `connect`, which lets nothing be sent again
        return
    context: Any = spark.sparkContext
    _ask_before_resending(context._gateway._gateway_client)
    _job.is_sent = True
    try:
        yield
    finally:
        _job.is_sent = False


@lru_cache(maxsize=1)
def _ask_before_resending(client: Any) -> None:
    from py4j.protocol import ERROR_ON_SEND  # noqa: PLC0415  importable without pyspark

    should_retry = client._should_retry

    def asked(retry: bool, connection: Any, error: Any = None) -> bool:
        is_lost = error is not None and error.when != ERROR_ON_SEND
        if is_lost and getattr(_job, "is_sent", False):
            return False
        return bool(should_retry(retry, connection, error))

    client._should_retry = asked


@contextmanager
def described(spark: SparkSession, text: str, tag: str = "") -> Iterator[None]:
    """Describe jobs in Spark's UI. The job group stays Spark's own: it cancels a stopped query."""
    if is_connect(spark):
        with _tagged(spark, tag or text.replace(",", " ")):  # Spark takes no tag with a comma
            yield
        return
    context = spark.sparkContext
    before = context.getLocalProperty(_DESCRIPTION)
    context.setJobDescription(text)
    if tag:
        context.addJobTag(tag)
    try:
        yield
    finally:
        # A JVM that has exited must not hide the error by which that became known.
        with suppress(Exception):
            if tag:
                context.removeJobTag(tag)
            context.setLocalProperty(_DESCRIPTION, cast("str", before))  # None removes it


@contextmanager
def _tagged(spark: SparkSession, tag: str) -> Iterator[None]:
    """
    On Spark Connect a tag is all that names a job. No stop of the query cancels these jobs: they
    are not in its job group, so a thread that is interrupted cancels its own.
    """
    spark.addTag(tag)
    try:
        yield
    except BaseException as error:
        if is_interrupt(error):
            with suppress(Exception):
                spark.interruptTag(tag)
        raise
    finally:
        spark.removeTag(tag)


def cancel_tagged(spark: SparkSession, tag: str) -> None:
    if is_connect(spark):
        spark.interruptTag(tag)
    else:
        spark.sparkContext.cancelJobsWithTag(tag)


def drain(batch: DataFrame, pipeline: str, epoch: EpochNumber) -> None:
    """Evaluate a batch and write nothing: state stores and watermarks advance."""
    with described(batch.sparkSession, f"epochal {pipeline} · epoch {epoch} · drain"):
        batch.write.format("noop").mode("overwrite").save()


@contextmanager
def evaluated(batch: DataFrame, pipeline: str, epoch: EpochNumber) -> Iterator[DataFrame]:
    """The batch, computed once for all sinks and gates that read it."""
    title = f"epochal {pipeline} · epoch {epoch} · evaluate"
    if is_connect(batch.sparkSession):
        with described(batch.sparkSession, title):
            checkpointed = batch.localCheckpoint(eager=True)
        # Its blocks are released by Spark, once no frame refers to them.
        yield checkpointed
        return
    with ExitStack() as stack:
        with described(batch.sparkSession, title):
            frame, _ = stack.enter_context(computed_once(batch))
        yield frame


@contextmanager
def computed_once(frame: DataFrame) -> Iterator[tuple[DataFrame, int]]:
    """
    The rows of a frame and their number, for jobs that read them more than once.

    Not persisted: a persisted block that is lost is computed again, and may then differ between
    readers. A lost block of a local checkpoint fails the epoch, which is tried again whole.
    """
    # Not eager: the blocks of a failed evaluation could then not be released.
    fixed = frame.localCheckpoint(eager=False)
    try:
        yield fixed, int(_rdd(fixed).count())
    finally:
        _release(fixed)


def _rdd(frame: DataFrame) -> Any:
    """The RDD that a checkpointed frame reads."""
    return frame._jdf.queryExecution().logical().rdd()


def _release(frame: DataFrame) -> None:
    """
    Free the blocks now: Spark would wait for a garbage collection.

    A stop of the query interrupts the JVM's side of this thread, where Spark then waits for no
    answer any more; that of another thread is not interrupted.
    """
    try:
        _unpersist(frame)
    except Exception:  # noqa: BLE001  see above; and a JVM that has exited keeps no blocks
        other = threading.Thread(target=_unpersist_or_log, args=(frame,), daemon=True)
        other.start()
        other.join(_RELEASE_WAIT_MAX_S)


def _unpersist_or_log(frame: DataFrame) -> None:
    try:
        _unpersist(frame)
    except Exception as error:
        logger.debug("blocks of an evaluated batch are left to Spark's cleaner", exc_info=error)


def _unpersist(frame: DataFrame) -> None:
    frame.sparkSession.sparkContext._jsc.sc().unpersistRDD(_rdd(frame).id(), False)


@cache
def _receipt_schema() -> StructType:
    """As an object: a text would be parsed by the JVM, for every sink of every epoch."""
    from pyspark.sql.types import StringType, StructField, StructType  # noqa: PLC0415

    return StructType([StructField(RECEIPT_COLUMN, StringType())])


def _title(part: Part, epoch: EpochNumber) -> str:
    identity = part.identity
    return f"epochal {identity.pipeline} · epoch {epoch} · {identity.sink} · prepare"


def _tag(part: Part, epoch: EpochNumber) -> str:
    identity = part.identity
    return f"epochal-{identity.uid}-g{identity.generation}-e{epoch}-s{identity.tag}"
