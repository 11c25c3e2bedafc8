"""
The decided epochs of a stream, read again from its sources: what an audit holds receipts against.

The same query runs once more, in a checkpoint of its own that is thrown away afterwards. It begins
where Spark's real checkpoint says that the first of these epochs began, and its only batch ends
where the last of them ended:

    offsets/0, commits/0    the end of the epoch before the first one, where there was one
    offsets/1               the end of the last one: planned already, so Spark runs exactly that
    sources/I/…             copied: where a Kafka source began, which files a file source took

Nothing is written but sums. It says nothing of a query whose rows hang on more than the rows that
came in: on state, on time or chance, on tables that it joins.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from epochal.contract import Sink
from epochal.logs.gateway import hadoop_conf, jvm_of
from epochal.spark.checkpoint import Checkpoint
from epochal.spark.error_text import typed
from epochal.spark.plan_analysis import is_row_by_row_above_batch, is_stateless, leaves
from epochal.spark.projection import columns_taken_by, fingerprint_of
from epochal.terms import EpochNumber, Fingerprint, SinkName

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_OF_THE_MOMENT = re.compile(r"\b(current_date|current_time|current_timestamp|localtimestamp|now)\(")
_FIRST_COMMIT = b'v1\n{"nextBatchWatermarkMs":0}'
_LOOK_EVERY_S = 0.2
_FILES_SHOWN = 3


class NotRereadable(Exception):
    """Why what the sources gave can't be had once more, or would say nothing: an answer."""


Sums = Mapping[SinkName, "Fingerprint | NotRereadable"]


def reread(
    stream: DataFrame,
    checkpoint: Checkpoint,
    sinks: Sequence[Sink],
    *,
    since: EpochNumber,
    last: EpochNumber,
) -> Sums:
    """What each sink would be given now of these epochs, or why that can't be told."""
    _require_of_its_rows_alone(stream)
    sums: dict[SinkName, Fingerprint | NotRereadable] = {}

    def count(batch: DataFrame) -> None:
        for sink in sinks:
            sums[sink.name] = _counted(sink, batch)

    with tempfile.TemporaryDirectory(prefix="epochal-reread-") as name:
        folder = Path(name)
        planned = _set_up(folder, checkpoint, since, last)
        _require_files(stream.sparkSession, checkpoint, since, last)
        _run_one_batch(stream, folder, planned, count)
    return sums


def _require_of_its_rows_alone(stream: DataFrame) -> None:
    if not is_stateless(stream):
        raise NotRereadable(
            "the query keeps state or a watermark: what it gave hangs on how epochs were cut"
        )
    if not all(leaf.isStreaming() for leaf in leaves(stream)):
        raise NotRereadable("the query joins rows that are not of its streams: they may differ now")
    _require_repeatable(stream)


def _require_repeatable(frame: DataFrame) -> None:
    plan = frame._jdf.queryExecution().analyzed()
    if not plan.deterministic() or _OF_THE_MOMENT.search(plan.toString()):
        raise NotRereadable("time or chance is in the rows: they come out otherwise each time")


def _counted(sink: Sink, batch: DataFrame) -> Fingerprint | NotRereadable:
    taken = columns_taken_by(sink, batch)
    try:
        _require_of_the_batch(taken)
    except NotRereadable as reason:
        return reason
    return fingerprint_of(taken)


def _require_of_the_batch(taken: DataFrame) -> None:
    if not is_row_by_row_above_batch(taken):
        raise NotRereadable(
            "its select= does not take each row by itself: what it gave hangs on how epochs were "
            "cut, or on rows of others"
        )
    _require_repeatable(taken)


def _require_files(
    spark: SparkSession, checkpoint: Checkpoint, since: EpochNumber, last: EpochNumber
) -> None:
    """Spark passes over files that are gone without a word."""
    files = checkpoint.files(since, last)
    gone = [file for file in files if not _is_there(spark, file)]
    if gone:
        shown = ", ".join(gone[:_FILES_SHOWN])
        raise NotRereadable(
            f"{len(gone)} of {len(files)} files of the source are no longer there: {shown}"
        )


def _is_there(spark: SparkSession, file: str) -> bool:
    path = jvm_of(spark).org.apache.hadoop.fs.Path(jvm_of(spark).java.net.URI(file))
    return bool(path.getFileSystem(hadoop_conf(spark)).exists(path))


def _set_up(folder: Path, checkpoint: Checkpoint, since: EpochNumber, last: EpochNumber) -> int:
    """Lay the checkpoint out; the number of the batch that Spark will find planned."""
    before = EpochNumber(since - 1)
    planned = 0
    if since > 0:
        _put(folder / "offsets" / "0", _offsets(checkpoint, before))
        _put(folder / "commits" / "0", checkpoint.read(f"commits/{before}") or _FIRST_COMMIT)
        planned = 1
    _put(folder / "offsets" / str(planned), _offsets(checkpoint, last))
    # A query of its own: the real one may be running, and Spark runs no query id twice.
    _put(folder / "metadata", json.dumps({"id": str(uuid.uuid4())}).encode())
    for name in checkpoint.source_files():
        _put(folder / name, checkpoint.read(name) or b"")
    return planned


def _offsets(checkpoint: Checkpoint, epoch: EpochNumber) -> bytes:
    found = checkpoint.read(f"offsets/{epoch}")
    if found is None:
        raise NotRereadable(
            f"{checkpoint.location} no longer says where epoch {epoch} ended: Spark keeps the last "
            "spark.sql.streaming.minBatchesToRetain of them"
        )
    return found


def _put(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def _run_one_batch(
    stream: DataFrame, folder: Path, planned: int, count: Callable[[DataFrame], None]
) -> None:
    failures: list[Exception] = []

    def take(batch: DataFrame, number: int) -> None:
        # What has come in since is none of these epochs.
        if number == planned:
            try:
                count(batch)
            except Exception as error:  # noqa: BLE001  whatever it is, it is the answer
                failures.append(error)

    query = _started(stream, folder, take)
    is_over = folder / "commits" / str(planned)
    try:
        while query.isActive and not is_over.exists():
            time.sleep(_LOOK_EVERY_S)
    finally:
        query.stop()
    if not is_over.exists():
        failures.append(query.exception() or RuntimeError("the query was stopped"))
    if failures:
        raise _failed(failures[0])


def _started(
    stream: DataFrame, folder: Path, take: Callable[[DataFrame, int], None]
) -> StreamingQuery:
    from pyspark.errors import PySparkException  # noqa: PLC0415  importable without pyspark

    writer = stream.writeStream.queryName("epochal verify").foreachBatch(take)
    try:
        return writer.option("checkpointLocation", folder.as_uri()).start()
    except PySparkException as error:
        raise _failed(error) from None


def _failed(error: Exception) -> NotRereadable:
    return NotRereadable(typed(error, "Spark can't read the source again").message)
