"""
The data source door: `df.writeStream.format("epochal")`, for one sink that options can name.

Spark spreads one epoch over three kinds of process, none of which is the driver's own:

    planner     `streamWriter()`, before each batch: claims where it must, carries out what is
                decided, and says what tasks are to do
    tasks       `write()`: prepare rows, or drain them where the epoch is decided already
    committer   `commit()` or `abort()`, after each batch: decides, under the planner's claim

They share nothing but the epoch log and what Spark carries: the registered class holds the driver's
key, the planner's writer is pickled to the tasks, their messages reach the committer. The number of
the newest record travels along: a decision is put right after what the planner read, or not at all.
SETTLED is put on record with each epoch, as the next planner has only the log to go by.

Spark plans the next epoch of a run only after `commit()` has returned. So a planner that finds its
epoch planned before, or the query declared otherwise, belongs to a new run, and claims: a committer
of the stopped run may still be at work, and only a claim keeps the two from deciding at a time, or
from aborting what the other one decides. All other planners go on under the claim and abort nothing
(`notes` tells them apart); what no decision names is swept by the committer, after its own record.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceStreamArrowWriter,
    DataSourceStreamWriter,
    WriterCommitMessage,
)

from epochal.contract import DEFAULT_LIMITS, EpochLog, Sink
from epochal.coordinator import Coordinator, this_driver
from epochal.coordinator.reading import read_state
from epochal.coordinator.starting import described
from epochal.coordinator.surroundings import fresh_nonce
from epochal.errors import EpochalError, Fenced, InvariantBroken, Misconfigured, Refused, Unsettled
from epochal.logs import checkpoint_log, open_log
from epochal.protocol.admission import Admission, Position, Start, Unfinished
from epochal.protocol.records import receipt_in, receipt_out
from epochal.protocol.state import RecordKind
from epochal.spark.checkpoint import Checkpoint, open_checkpoint
from epochal.spark.notes import Driver, Plan
from epochal.spark.options import SinkMaker, default_sinks, unfinished_from
from epochal.spark.selecting import arrow_schema
from epochal.spark.task import CarriedError, Preparing, prepare
from epochal.spark.telling import presented, typed
from epochal.telemetry.recording import lasting_tracker
from epochal.terms import EpochNumber, Offsets, Receipt

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

_OWN_OPTIONS = ("checkpointlocation", "log", "pipeline", "run", "sink", "unfinished")

logger = logging.getLogger("epochal")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the options say, the same in all processes."""

    driver: Driver
    pipeline: str
    checkpoint: str
    sink: Sink
    log: str | None
    run: str | None
    unfinished: Unfinished

    def coordinator(self) -> Coordinator:
        return Coordinator(log=self.open_log(), sinks=[self.sink])

    def recorded_coordinator(self) -> Coordinator:
        """In the process that sees epochs end: it keeps their history."""
        log = self.open_log()
        tracker = lasting_tracker(log, epochs_kept=DEFAULT_LIMITS.history_epochs_kept)
        return Coordinator(log=log, sinks=[self.sink], tracker=tracker)

    def open_log(self) -> EpochLog:
        return checkpoint_log(self.checkpoint) if self.log is None else open_log(self.log)

    def declared(self, schema: pa.Schema) -> str:
        """A digest of all that a start compares with the log and with the target."""
        told = [self.pipeline, self.run, self.log, self.sink.name, self.sink.describe()]
        text = json.dumps([*told, str(schema)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def start(self, folder: Checkpoint) -> Start:
        return Start(
            pipeline=self.pipeline,
            location=folder.location,
            sinks=described([self.sink]),
            driver=self.driver.key,
            query_id=folder.query_id,
            run=self.run,
            position=self._position(folder),
            unfinished=self.unfinished,
        )

    def _position(self, folder: Checkpoint) -> Position:
        """
        How far the checkpoint was before this query. By now Spark has planned a batch, and a first
        one looks like one that other code left unfinished; its age tells them apart.
        """
        found = folder.position
        if found.planned != 0 or found.finished is not None:
            return found
        planned_at = folder.planned_at(found.planned)
        is_own = planned_at is not None and planned_at >= self.driver.registered_at
        return Position() if is_own else found


@dataclass
class Message(WriterCommitMessage):
    """What a task hands to the committer."""

    receipt: str | None
    """None where the epoch is decided already and its rows were only drained."""
    record: int
    """The newest record of the log when the epoch was planned."""
    offsets: Offsets
    planned_at: float


@dataclass
class PlannedWriter(DataSourceStreamArrowWriter):
    """Made by the planner, pickled to every task of one epoch."""

    job: Preparing
    admission: Admission
    query_id: str
    record: int
    offsets: Offsets
    planned_at: float

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Message:
        from pyspark import TaskContext  # noqa: PLC0415  the worker's own

        context = TaskContext.get()
        if context is None:
            raise InvariantBroken("a writer runs outside of a Spark task")
        self._require_planned(
            context.getLocalProperty("sql.streaming.queryId"),
            context.getLocalProperty("streaming.sql.batchId"),
        )
        if self.admission is Admission.REPLAY:
            for _ in iterator:
                pass
            return self._message(None)
        partition, attempt = context.partitionId(), context.taskAttemptId()
        try:
            receipt = prepare(self.job, iterator, partition=partition, attempt=attempt)
        except CarriedError as error:
            shown = presented(typed(error, f"epoch {self.job.epoch}"))
            raise shown from shown.__cause__
        return self._message(json.dumps(receipt_out(receipt)))

    def _message(self, receipt: str | None) -> Message:
        return Message(receipt, self.record, self.offsets, self.planned_at)

    def _require_planned(self, query_id: str | None, epoch: str | None) -> None:
        if (query_id, epoch) != (self.query_id, str(self.job.epoch)):
            raise Refused(
                f"epoch {epoch} of query {query_id} runs, and the checkpoint that the option names "
                f"is at epoch {self.job.epoch} of query {self.query_id}",
                'option("checkpointLocation", …) must be the query\'s own',
            )

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        raise InvariantBroken(f"epoch {batchId}: a task's writer was asked to commit {messages}")

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Never called: what commits and aborts is made by the committer's own `streamWriter`."""


@dataclass
class DecidingWriter(DataSourceStreamArrowWriter):
    """Made by the committer, which decides epochs under the planner's claim."""

    settings: Settings

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Message:
        raise InvariantBroken(f"the committer's writer was given rows: {iterator}")

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        try:
            self._commit(
                [one for one in messages if isinstance(one, Message)], EpochNumber(batchId)
            )
        except EpochalError as error:
            shown = presented(error)
            raise shown from shown.__cause__

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Clear what the tasks that succeeded have prepared, and what else their targets list."""
        told = [one for one in messages if isinstance(one, Message)]
        folder, epoch = open_checkpoint(self.settings.checkpoint), EpochNumber(batchId)
        coordinator = self.settings.recorded_coordinator()
        try:
            coordinator.resume(self.settings.driver.key, record=_record(told))
            # A decision that was never answered can't come after this: what it named may go.
            coordinator.restate(RecordKind.PROGRESS)
            offsets = folder.offsets(epoch)
            admission = coordinator.take_up(
                epoch, query_id=folder.query_id, offsets=offsets, begun_at=_planned_at(told)
            )
            if admission is Admission.FRESH:
                coordinator.abort({self.settings.sink.name: _receipts(told)})
        finally:
            coordinator.leave()

    def _commit(self, told: Sequence[Message], epoch: EpochNumber) -> None:
        if any(message.receipt is None for message in told):
            return
        folder = open_checkpoint(self.settings.checkpoint)
        coordinator = self.settings.recorded_coordinator()
        try:
            coordinator.resume(self.settings.driver.key, record=_record(told))
            # Without a task there is no message: then nothing was prepared that could differ.
            offsets = told[0].offsets if told else folder.offsets(epoch)
            admission = coordinator.take_up(
                epoch, query_id=folder.query_id, offsets=offsets, begun_at=_planned_at(told)
            )
            if admission is Admission.REPLAY:
                return
            coordinator.conclude(
                {self.settings.sink.name: _receipts(told)},
                offsets=lambda: folder.offsets(epoch),
                began_with=offsets,
            )
            coordinator.restate()
            _sweep(coordinator)
        finally:
            coordinator.leave()


def _sweep(coordinator: Coordinator) -> None:
    """Right after a record of this process. What can't be cleared now is cleared later (I5)."""
    try:
        coordinator.recover()
    except (Fenced, InvariantBroken):
        raise
    except (EpochalError, OSError) as error:
        logger.warning("not all could be cleared yet: %s", error)


def _record(told: Sequence[Message]) -> int | None:
    return told[0].record if told else None


def _planned_at(told: Sequence[Message]) -> float | None:
    return told[0].planned_at if told else None


def _receipts(told: Sequence[Message]) -> tuple[Receipt, ...]:
    return tuple(receipt_in(json.loads(one.receipt)) for one in told if one.receipt is not None)


def _plan(settings: Settings, schema: StructType) -> PlannedWriter:
    """What the planner does before each batch, whose offsets Spark has written down by now."""
    folder = open_checkpoint(settings.checkpoint)
    position, query_id = folder.position, folder.query_id
    if position.planned is None or query_id is None:
        raise Refused(
            f"{folder.location} has no planned batch, and Spark is about to write one",
            'option("checkpointLocation", …) must be the query\'s own',
        )
    arrow = arrow_schema(settings.sink, schema)
    coordinator = settings.coordinator()
    try:
        plan = Plan(epoch=position.planned, declared=settings.declared(arrow))
        record = _claim_or_resume(settings, folder, coordinator, plan, arrow)
        offsets = folder.offsets(position.planned)
        admission = coordinator.begin(
            position.planned, query_id=query_id, offsets=offsets, is_sweeping=False
        )
        return PlannedWriter(
            job=Preparing(
                sink=settings.sink,
                identity=coordinator.identity(settings.sink.name),
                epoch=position.planned,
                schema=arrow,
                handout=coordinator.handout(settings.sink.name),
                limits=DEFAULT_LIMITS,
                is_hashed=False,
            ),
            admission=admission,
            query_id=query_id,
            record=record,
            offsets=offsets,
            planned_at=time.time(),
        )
    finally:
        coordinator.leave()


def _claim_or_resume(
    settings: Settings,
    folder: Checkpoint,
    coordinator: Coordinator,
    plan: Plan,
    schema: pa.Schema,
) -> int:
    """Returns the number of the newest record, which is this driver's own."""
    driver = settings.driver
    before = driver.last_plan(folder.location)
    if before is not None:
        _resume(coordinator, driver)
    elif not driver.remembers_all:
        _require_not_fenced(settings)
    is_same_run = (
        before is not None and before.declared == plan.declared and before.epoch < plan.epoch
    )
    if not is_same_run:
        coordinator.start(settings.start(folder), {settings.sink.name: schema})
    driver.note(folder.location, plan)
    if coordinator.lost:
        raise Unsettled(
            f"{settings.sink.name} threw prepared rows of a decided epoch away, and through the "
            "data source they carry no fingerprint by which they could be written again",
            "bring the rows back by hand, then give this sink of this epoch up with a note of "
            "where they are",
        )
    return coordinator.record


_TAKE_OVER = (
    "leave this driver stopped; to take over again on purpose, epochal.spark.register(spark) first"
)


def _resume(coordinator: Coordinator, driver: Driver) -> None:
    try:
        coordinator.resume(driver.key)
    except Fenced as error:
        raise Fenced(error.message, _TAKE_OVER) from None


def _require_not_fenced(settings: Settings) -> None:
    """Without its notes a driver can't know whether it has claimed: another one's claim stands."""
    log = settings.open_log()
    try:
        state = read_state(log)
    finally:
        log.close()
    if state is not None and state.driver != settings.driver.key:
        raise Fenced(
            f"{settings.checkpoint}: the newest claim is of {state.driver}, and this driver's "
            f"notes in {settings.driver.folder}, which would say who came first, were removed",
            _TAKE_OVER,
        )


def _settings(
    driver: Driver, sinks: Mapping[str, SinkMaker], options: Mapping[str, str]
) -> Settings:
    own = {name: options.get(name) for name in _OWN_OPTIONS}
    for name, example in {
        "sink": ", ".join(sorted(sinks)),
        "pipeline": "the name of this pipeline",
        "checkpointLocation": "the query's checkpoint",
    }.items():
        if not own[name.lower()]:
            raise Misconfigured(f'format("epochal") needs option {name!r}', f"it is {example}")
    make = sinks.get(str(own["sink"]))
    if make is None:
        raise Misconfigured(
            f"no sink is called {own['sink']!r} here", f"there are {', '.join(sorted(sinks))}"
        )
    rest = {name.lower(): text for name, text in options.items()}
    return Settings(
        driver=driver,
        pipeline=str(own["pipeline"]),
        checkpoint=str(own["checkpointlocation"]),
        sink=make({name: text for name, text in rest.items() if name not in _OWN_OPTIONS}),
        log=own["log"],
        run=own["run"],
        unfinished=unfinished_from(own["unfinished"] or "ask"),
    )


class EpochalSource(DataSource):
    """Made anew by the planner for each batch; the committer's was pickled at the start."""

    driver: Driver
    sinks: Mapping[str, SinkMaker]

    def __init__(self, options: Mapping[str, str]) -> None:
        self.options = dict(options)
        self._is_pickled = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._is_pickled = True

    @classmethod
    def name(cls) -> str:
        return "epochal"

    def streamWriter(  # noqa: N802  Spark's name
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamWriter:
        try:
            settings = _settings(self.driver, self.sinks, self.options)
            if self._is_pickled:
                return DecidingWriter(settings)
            _require_mode(settings.sink, overwrite=overwrite)
            return _plan(settings, schema)
        except EpochalError as error:
            shown = presented(error)
            raise shown from shown.__cause__


def _require_mode(sink: Sink, *, overwrite: bool) -> None:
    mode = "complete" if overwrite else "append"
    if mode not in sink.output_modes:
        raise Misconfigured(
            f"sink {sink.name!r} can't honour Spark's output mode {mode!r}",
            f"it takes {', '.join(sorted(sink.output_modes))}",
        )


def register_source(spark: SparkSession, sinks: Mapping[str, SinkMaker] | None) -> None:
    folder = tempfile.mkdtemp(prefix="epochal-driver-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    driver = Driver(
        key=f"{this_driver()} {fresh_nonce()}", folder=folder, registered_at=time.time()
    )
    driver.enter()
    # A class of its own: Spark pickles it by value, and so the driver's key reaches every process.
    known = {**default_sinks(), **(sinks or {})}
    spark.dataSource.register(
        type("Registered", (EpochalSource,), {"driver": driver, "sinks": known})
    )
