"""
A replay of decided epochs from their sources: what `epochal verify` compares receipts to, in sums,
and what `epochal repair` writes again.

The same query runs once more, in a temporary checkpoint of its own. It begins where Spark's real
checkpoint says that the first of these epochs began, and its only batch ends where the last of them
ended:

    offsets/0, commits/0    the end of the epoch before the first one, where there was one
    offsets/1               the end of the last one: planned already, so Spark runs exactly that
    sources/I/…             copied: where a Kafka source began, which files a file source took

`verify` writes no row. A query whose rows depend on more than its input (state, time, chance,
joined tables) can't be read again this way, and is refused with the reason.
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
from epochal.spark.checkpoint import Checkpoint
from epochal.spark.error_text import as_epochal
from epochal.spark.plan_analysis import is_row_by_row_above_batch, is_stateless, leaves
from epochal.spark.projection import project_unordered
from epochal.spark.row_hash import fingerprint_of
from epochal.terms import EpochNumber, Fingerprint, SinkName

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_CLOCK = re.compile(r"\b(current_date|current_time|current_timestamp|localtimestamp|now)\(")
_FIRST_COMMIT = b'v1\n{"nextBatchWatermarkMs":0}'
_LOOK_EVERY_S = 0.2
_FILES_SHOWN = 3


class NotReplayable(Exception):
    """Why a replay is impossible, or would prove nothing. A result, not a failure."""


Sums = Mapping[SinkName, "Fingerprint | NotReplayable"]


def replay(
    stream: DataFrame,
    checkpoint: Checkpoint,
    sinks: Sequence[Sink],
    *,
    since: EpochNumber,
    last: EpochNumber,
) -> Sums:
    """The rows that each sink would be given of these epochs now, or why that can't be found."""
    sums: dict[SinkName, Fingerprint | NotReplayable] = {}

    def count(batch: DataFrame) -> None:
        for sink in sinks:
            sums[sink.name] = _counted(sink, batch)

    replay_batch(stream, checkpoint, count, since=since, last=last)
    return sums


def replay_batch(
    stream: DataFrame,
    checkpoint: Checkpoint,
    take: Callable[[DataFrame], None],
    *,
    since: EpochNumber,
    last: EpochNumber,
) -> None:
    """Call `take` once with the rows of these epochs, as the query gives them now."""
    _require_input_only(stream)
    with tempfile.TemporaryDirectory(prefix="epochal-replay-") as name:
        folder = Path(name)
        planned = _set_up(folder, checkpoint, since, last)
        _require_files(stream.sparkSession, checkpoint, since, last)
        _run_one_batch(stream, folder, planned, take)


def _require_input_only(stream: DataFrame) -> None:
    if not is_stateless(stream):
        raise NotReplayable(
            "the query keeps state or a watermark: its rows depend on how epochs were cut"
        )
    if not all(leaf.isStreaming() for leaf in leaves(stream)):
        raise NotReplayable("the query joins rows from outside its streams: they may differ now")
    _require_repeatable(stream)


def _require_repeatable(frame: DataFrame) -> None:
    plan = frame._jdf.queryExecution().analyzed()
    if not plan.deterministic() or _CLOCK.search(plan.toString()):
        raise NotReplayable("the rows depend on time or chance: they differ each time")


def _counted(sink: Sink, batch: DataFrame) -> Fingerprint | NotReplayable:
    try:
        require_row_by_row(sink, batch)
    except NotReplayable as reason:
        return reason
    return fingerprint_of(project_unordered(sink, batch))


def require_row_by_row(sink: Sink, batch: DataFrame) -> None:
    """Raise where a sink's rows depend on how epochs were cut: one batch now stands for several."""
    _require_row_by_row(project_unordered(sink, batch))


def _require_row_by_row(taken: DataFrame) -> None:
    if not is_row_by_row_above_batch(taken):
        raise NotReplayable(
            "its select= does not handle each row by itself: its rows depend on how epochs were "
            "cut, or on other rows"
        )
    _require_repeatable(taken)


def _require_files(
    spark: SparkSession, checkpoint: Checkpoint, since: EpochNumber, last: EpochNumber
) -> None:
    """Spark skips files that are gone without an error."""
    from epochal.storage.hadoop import file_exists  # noqa: PLC0415  needs py4j, as Spark does

    files = checkpoint.files(since, last)
    gone = [file for file in files if not file_exists(spark, file)]
    if gone:
        shown = ", ".join(gone[:_FILES_SHOWN])
        raise NotReplayable(f"{len(gone)} of {len(files)} files of the source are gone: {shown}")


def _set_up(folder: Path, checkpoint: Checkpoint, since: EpochNumber, last: EpochNumber) -> int:
    """Write the temporary checkpoint; returns the number of the batch that it plans."""
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
        raise NotReplayable(
            f"{checkpoint.location} no longer has the end of epoch {epoch}: Spark keeps the last "
            "spark.sql.streaming.minBatchesToRetain of them"
        )
    return found


def _put(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def _run_one_batch(
    stream: DataFrame, folder: Path, planned: int, count: Callable[[DataFrame], None]
) -> None:
    failures: list[BaseException] = []

    def take(batch: DataFrame, number: int) -> None:
        # A later batch holds rows that came in since: none of these epochs.
        if number == planned:
            try:
                count(batch)
            except BaseException as error:  # noqa: BLE001  a result; raised, it would hang Spark
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


def _failed(error: BaseException) -> NotReplayable:
    return NotReplayable(as_epochal(error, "Spark can't read the source again").message)
