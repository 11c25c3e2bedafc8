"""
Few rows, written by the driver itself: a job of the JVM collects them, and no Python worker runs.

A job with a Python worker costs several times what so few rows do. Whether they are few is known
only once they are there, and they are not computed twice for it: the epoch before has to have had
few, and the job stops at a limit in each partition. Where that is reached, tasks write the rows.

    epoch    by                        rows
    6        tasks                     120      few: the next ones may be collected
    7        the driver                 90
    8        the driver, up to a limit  2,001   too many: thrown away, and tasks write all 500,000
    9        tasks                     300,000
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, cast

from epochal.coordinator import Coordinator
from epochal.errors import EpochalError, TaskFailed
from epochal.spark.task import PrepareTask, prepared
from epochal.terms import DRIVER_ATTEMPTS, JOB_PARTITION, Receipt, SinkName

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

    from epochal.contract import Sink

logger = logging.getLogger("epochal")

_BYTES_MAX = 1 << 20
"""Of the rows that are expected, as far as earlier ones of the sink tell."""
_PARTITIONS_MAX = 32
"""More of them could bring many times the limit, and run on many executors at the same time."""
_ONLY_PARTITION = 0
_RESULT_BYTES_MAX = "spark.driver.maxResultSize"
"""Named by the error of a job whose rows are few and larger than the driver may collect."""


@dataclass(slots=True)
class _Size:
    """How much a sink was given in its last epoch."""

    rows: int
    partitions: int | None
    """None where Spark's own writer wrote them, by a job that does not say."""
    row_bytes: float = 0.0


@dataclass(slots=True)
class DriverWrites:
    """Which sinks of a run the driver writes to itself."""

    coordinator: Coordinator
    rows_max: int
    attempts: Iterator[int] = field(default_factory=lambda: count(DRIVER_ATTEMPTS))
    _sizes: dict[SinkName, _Size] = field(default_factory=dict)

    def expected(self, sink: Sink, batch: DataFrame) -> DriverWrite | None:
        """How the driver writes this batch to a sink; None where tasks do."""
        size = self._sizes.get(sink.name)
        if size is None or not getattr(sink, "writes_on_driver", False):
            return None
        if size.rows > self.rows_max or size.rows * size.row_bytes > _BYTES_MAX:
            return None
        if size.partitions is None:
            size.partitions = _partitions(batch)
        return DriverWrite(self) if size.partitions <= _PARTITIONS_MAX else None

    def note(self, receipts: Mapping[SinkName, Sequence[Receipt]]) -> None:
        """Take the size of an epoch that is prepared."""
        for sink, some in receipts.items():
            size = self._sizes.setdefault(sink, _Size(rows=0, partitions=None))
            size.rows = sum(one.rows for one in some)
            if any(one.handle.partition == JOB_PARTITION for one in some):
                size.partitions = None
            elif all(one.handle.attempt < DRIVER_ATTEMPTS for one in some):
                size.partitions = len(some)

    def note_bytes(self, sink: SinkName, batches: Sequence[pa.RecordBatch]) -> None:
        rows = _rows(batches)
        if rows:
            self._sizes[sink].row_bytes = sum(one.nbytes for one in batches) / rows


@dataclass(frozen=True, slots=True)
class DriverWrite:
    """One sink's rows of one epoch."""

    of: DriverWrites

    def prepare(self, frame: DataFrame, job: PrepareTask) -> Receipt | None:
        """Collect the rows and prepare them; None where there are too many."""
        batches = _collected(frame, self.of.rows_max)
        if batches is None:
            return None
        sink = job.identity.sink
        self.of.note_bytes(sink, batches)

        def prepare(is_first: bool) -> Receipt:
            return prepared(
                job,
                batches,
                partition=_ONLY_PARTITION,
                attempt=next(self.of.attempts),
                is_first=is_first,
            )

        try:
            return self.of.coordinator.prepare_here(prepare)
        except (EpochalError, OSError):
            raise
        except Exception as error:
            raise TaskFailed(f"sink {sink!r}: {type(error).__name__}: {error}") from error


def _partitions(batch: DataFrame) -> int:
    try:
        return int(batch._jdf.queryExecution().logical().rdd().getNumPartitions())
    except Exception as error:
        logger.debug("the partitions of a batch can't be counted", exc_info=error)
        return _PARTITIONS_MAX + 1


def _rows(batches: Sequence[pa.RecordBatch]) -> int:
    return sum(one.num_rows for one in batches)


def _collected(frame: DataFrame, rows_max: int) -> Sequence[pa.RecordBatch] | None:
    """The rows as Arrow; None where there are more, or where this Spark can't collect them so."""
    from epochal.spark.jvm_expressions import UNAVAILABLE, limited  # noqa: PLC0415  needs pyspark

    try:
        # As a task gets them: `toArrow` asks the JVM for settings and the schema once more.
        collect = cast("Any", limited(frame, rows_max + 1))._collect_as_arrow
    except UNAVAILABLE as error:
        logger.debug("rows are not collected on the driver: %s", error)
        return None
    try:
        batches: Sequence[pa.RecordBatch] = collect()
    except Exception as error:
        if _RESULT_BYTES_MAX not in str(error):
            raise
        logger.debug("rows are too large to be collected on the driver", exc_info=error)
        return None
    # Each partition stops at one row more than the limit: not above it, none was cut.
    return batches if _rows(batches) <= rows_max else None
