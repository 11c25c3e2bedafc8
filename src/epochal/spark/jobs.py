"""The Spark jobs of one epoch: one a sink, at the same time; when one fails, all end."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from epochal.protocol.records import receipt_in
from epochal.spark.arrow_transfer import for_crossing
from epochal.spark.error_text import told
from epochal.spark.plan_analysis import is_narrow_above_batch
from epochal.spark.projection import arrow_schema, for_tasks, row_hash, taken_by, with_row_hash
from epochal.spark.task import RECEIPT_SCHEMA, Preparing
from epochal.terms import EpochNumber, Identity, Json, Receipt, SinkName

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark import SparkContext
    from pyspark.sql import DataFrame

    from epochal.contract import Limits, Sink

logger = logging.getLogger("epochal")

_DESCRIPTION = "spark.job.description"


Timing = Callable[[SinkName], AbstractContextManager[None]]
"""Measures what one sink takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One sink's part of an epoch."""

    sink: Sink
    identity: Identity
    handout: Json


@dataclass(slots=True, kw_only=True)
class Prepared:
    """What came back: receipts of the jobs that succeeded, and the first error if one did not."""

    receipts: dict[SinkName, Sequence[Receipt]] = field(default_factory=dict)
    error: BaseException | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Crossing:
    """A sink's rows in the form in which they cross to its tasks."""

    rows: DataFrame
    is_hashed: bool
    is_packed: bool


def prepare_all(
    batch: DataFrame,
    epoch: EpochNumber,
    parts: Sequence[Part],
    *,
    limits: Limits,
    fingerprint: bool,
    is_narrow: bool,
    timing: Timing,
) -> Prepared:
    """
    Prepare the batch at every sink. Only receipts of a job that succeeded count (I6).

    `is_narrow` says of the batch what `is_narrow` of a plan says.
    """
    outcome = Prepared()
    context = batch.sparkSession.sparkContext
    tags = {part.identity.sink: _tag(part, epoch) for part in parts}

    def run(part: Part) -> None:
        title, tag = _title(part, epoch), tags[part.identity.sink]
        with timing(part.identity.sink), described(context, title, tag=tag):
            try:
                frame, job = _job(
                    batch,
                    part,
                    epoch,
                    limits=limits,
                    fingerprint=fingerprint,
                    is_narrow=is_narrow,
                )
                collected = frame.mapInArrow(job, RECEIPT_SCHEMA).collect()
                receipts = tuple(receipt_in(json.loads(row[0])) for row in collected)
                outcome.receipts[part.identity.sink] = receipts
            except Exception as error:  # noqa: BLE001  whatever it is, it ends the epoch
                if outcome.error is None:
                    outcome.error = told(error, f"epoch {epoch}, sink {part.identity.sink!r}")
                    for tag in tags.values():
                        context.cancelJobsWithTag(tag)

    if len(parts) == 1:
        run(parts[0])
    else:
        _at_once(run, parts)
    return outcome


def _at_once(run: Callable[[Part], None], parts: Sequence[Part]) -> None:
    """In threads that carry the query's job group along, so that stopping it cancels every job."""
    from pyspark import InheritableThread  # noqa: PLC0415  this package is importable without it

    threads: list[threading.Thread] = [
        InheritableThread(
            target=run, args=(part,), name=f"epochal-{part.identity.sink}", daemon=True
        )
        for part in parts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _job(
    batch: DataFrame,
    part: Part,
    epoch: EpochNumber,
    *,
    limits: Limits,
    fingerprint: bool,
    is_narrow: bool,
) -> tuple[DataFrame, Preparing]:
    frame = taken_by(part.sink, batch)
    schema = arrow_schema(part.sink, frame.schema)
    crossing = _crossing(frame, part, schema, fingerprint=fingerprint)
    job = Preparing(
        sink=for_tasks(part.sink),
        identity=part.identity,
        epoch=epoch,
        schema=schema,
        handout=part.handout,
        limits=limits,
        # Asked only for sinks that hand something out: the question costs a few calls to the JVM.
        is_narrow=is_narrow and part.handout is not None and is_narrow_above_batch(frame),
        is_hashed=crossing.is_hashed,
        is_packed=crossing.is_packed,
    )
    return crossing.rows, job


def _crossing(frame: DataFrame, part: Part, schema: pa.Schema, *, fingerprint: bool) -> _Crossing:
    from epochal.spark.row_layout import packed  # noqa: PLC0415  needs pyspark

    beside = row_hash(frame.schema) if fingerprint else None
    as_bytes = packed(frame, part.sink, schema, part.handout, beside=beside)
    if as_bytes is not None:
        return _Crossing(rows=as_bytes, is_hashed=fingerprint, is_packed=True)
    hashed = with_row_hash(frame) if fingerprint else None
    rows = for_crossing(frame if hashed is None else hashed, frame.schema)
    return _Crossing(rows=rows, is_hashed=hashed is not None, is_packed=False)


@contextmanager
def described(context: SparkContext, text: str, tag: str = "") -> Iterator[None]:
    """Tell Spark's UI what jobs are for. The job group stays Spark's: it is how a query stops."""
    before = context.getLocalProperty(_DESCRIPTION)
    context.setJobDescription(text)
    if tag:
        context.addJobTag(tag)
    try:
        yield
    finally:
        if tag:
            context.removeJobTag(tag)
        context.setLocalProperty(_DESCRIPTION, cast("str", before))  # None takes it away again


def drain(batch: DataFrame, pipeline: str, epoch: EpochNumber) -> None:
    """Evaluate a batch and write nothing: state stores and watermarks advance."""
    with described(batch.sparkSession.sparkContext, f"epochal {pipeline} · epoch {epoch} · drain"):
        batch.write.format("noop").mode("overwrite").save()


@contextmanager
def evaluated(batch: DataFrame, pipeline: str, epoch: EpochNumber) -> Iterator[DataFrame]:
    """
    The batch, computed once for all who read it.

    Not persisted: a persisted block that is lost is computed again, and may then differ between
    sinks. A lost block of a local checkpoint fails the epoch, which is tried again whole.
    """
    context = batch.sparkSession.sparkContext
    with described(context, f"epochal {pipeline} · epoch {epoch} · evaluate"):
        # Not eager, which would leave the blocks of a failed evaluation to nobody.
        frame = batch.localCheckpoint(eager=False)
        try:
            _rdd(frame).count()
        except BaseException:
            _release(frame)
            raise
    try:
        yield frame
    finally:
        _release(frame)


def _rdd(frame: DataFrame) -> Any:
    """What a checkpointed frame reads."""
    return frame._jdf.queryExecution().logical().rdd()


def _release(frame: DataFrame) -> None:
    """Give the blocks back now: Spark would wait until its own garbage is collected."""
    from py4j.protocol import Py4JError  # noqa: PLC0415  comes with Spark

    try:
        frame.sparkSession.sparkContext._jsc.sc().unpersistRDD(_rdd(frame).id(), False)
    except Py4JError as error:
        logger.warning("blocks of an evaluated batch are left to Spark's cleaner: %s", error)


def _title(part: Part, epoch: EpochNumber) -> str:
    identity = part.identity
    return f"epochal {identity.pipeline} · epoch {epoch} · {identity.sink} · prepare"


def _tag(part: Part, epoch: EpochNumber) -> str:
    identity = part.identity
    return f"epochal-{identity.uid}-g{identity.generation}-e{epoch}-s{identity.tag}"
