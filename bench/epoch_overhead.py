"""[epoch_overhead] The fixed cost of an epoch, against a bare foreachBatch of the same job."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from bench.harness import Comparison
from epochal.sinks.memory import Memory
from epochal.spark.local_session import local_builder, local_session
from epochal.spark.pipeline import Pipeline
from epochal.spark.versions import UNIX_SOCKETS

EPOCHS = 40
WARM_UP_EPOCHS = 200
"""Of each side, before anything counts: a query runs for days, and a JVM compiles for minutes."""
ROWS = 100
ROUNDS = 3
_FIRST_EPOCHS = 5
"""Of each measurement, which don't count: its query has just started."""
_PATIENCE_S = 120.0
_LOOK_EVERY_S = 0.25
"""Each look is calls to the JVM, at the cost of what is measured."""


def run() -> Comparison:
    """As `epochal run` starts Spark: rows cross to Python by Unix domain sockets."""
    return _compared("epoch_overhead", local_session("bench", threads=2))


def run_tcp() -> Comparison:
    """As Spark starts by default."""
    builder = local_builder("bench", threads=2).config(UNIX_SOCKETS, False)
    return _compared("epoch_overhead_tcp", builder.getOrCreate())


RUNS = {"epoch_overhead": run, "epoch_overhead_tcp": run_tcp}


def _compared(name: str, spark: Any) -> Comparison:
    comparison = Comparison(
        name=name,
        peer_name="foreachBatch with mapInArrow and collect",
        unit="ms/epoch",
        is_rate=False,
    )
    try:
        for side in (_ours, _bare):
            median_ms(spark, side, epochs=WARM_UP_EPOCHS)
        comparison.run(
            lambda: median_ms(spark, _ours), lambda: median_ms(spark, _bare), rounds=ROUNDS
        )

        comparison.beside = {
            "noop_sink_ms": round(median_ms(spark, _noop), 1),
            "replayed_epoch_ms": round(_replayed_ms(spark), 1),
            "plain_first_epoch_ms": round(_first_ms(spark), 1),
        }
    finally:
        spark.stop()
    return comparison


def _stream(spark: Any) -> Any:
    return (
        spark.readStream.format("rate-micro-batch")
        .option("rowsPerBatch", ROWS)
        .option("numPartitions", 2)
        .load()
    )


def _ours(stream: Any, checkpoint: str) -> Any:
    _use_workers("ours", stream.sparkSession)
    return _pipeline().start(stream, checkpoint=checkpoint)


def _pipeline() -> Pipeline:
    return Pipeline("bench", sinks=[Memory()])


def _bare(stream: Any, checkpoint: str) -> Any:
    def count(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = sum(batch.num_rows for batch in batches)
        yield pa.record_batch([pa.array([rows])], names=["rows"])

    def each(batch: Any, _epoch: int) -> None:
        batch.mapInArrow(count, "rows long").collect()

    _use_workers("bare", stream.sparkSession)
    return stream.writeStream.foreachBatch(each).option("checkpointLocation", checkpoint).start()


def _use_workers(whose: str, spark: Any) -> None:
    """Python workers of one's own: those of ours have more modules, and fewer to collect."""
    spark.sparkContext.environment["EPOCHAL_BENCH"] = whose


def _noop(stream: Any, checkpoint: str) -> Any:
    return stream.writeStream.format("noop").option("checkpointLocation", checkpoint).start()


def median_ms(
    spark: Any,
    start: Callable[[Any, str], Any],
    duration: str = "triggerExecution",
    *,
    epochs: int = EPOCHS,
) -> float:
    """The middle one of an epoch's durations, as Spark's progress names them."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        query = start(_stream(spark), folder)
        _wait_for(query, epochs)
        query.stop()
        return statistics.median(_durations_ms(query, duration)[_FIRST_EPOCHS:])


def _replayed_ms(spark: Any) -> float:
    """An epoch that is decided already: the driver died before Spark noted it as done."""
    return _first_after_restart_ms(spark, _forget_commit)


def _first_ms(spark: Any) -> float:
    """The first epoch after a restart, which a replayed one is to be compared with."""
    return _first_after_restart_ms(spark, lambda _checkpoint, _epoch: None)


def _first_after_restart_ms(spark: Any, meanwhile: Callable[[Path, int], None]) -> float:
    """`meanwhile` gets the checkpoint and the newest epoch that was decided."""
    decided: list[int] = []

    def watch(step: str, epoch: int | None) -> None:
        if step == "decided" and epoch is not None:
            decided.append(epoch)

    pipeline = Pipeline("bench", sinks=[Memory()], watch=watch)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        query = pipeline.start(_stream(spark), checkpoint=folder)
        _wait_for(query, EPOCHS)
        query.stop()
        meanwhile(Path(folder), decided[-1])
        return _first_of(pipeline.start(_stream(spark), checkpoint=folder))


def _first_of(query: Any) -> float:
    _wait_for(query, 1)
    query.stop()
    return _durations_ms(query)[0]


def _forget_commit(checkpoint: Path, epoch: int) -> None:
    """Spark goes on with this epoch: a stop may have ended it before Spark noted it, or after."""
    (checkpoint / "commits" / str(epoch)).unlink(missing_ok=True)
    (checkpoint / "commits" / f".{epoch}.crc").unlink(missing_ok=True)
    for later in (checkpoint / "offsets").iterdir():
        number = later.name.strip(".").removesuffix(".crc")
        if number.isdigit() and int(number) > epoch:
            later.unlink()


def _wait_for(query: Any, epochs: int) -> None:
    deadline_s = time.monotonic() + _PATIENCE_S
    while ((query.lastProgress or {}).get("batchId", -1)) < epochs:
        if not query.isActive:
            raise RuntimeError(f"the query ended: {query.exception()}")
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{epochs} epochs took longer than {_PATIENCE_S:.0f} s")
        time.sleep(_LOOK_EVERY_S)


def _durations_ms(query: Any, duration: str = "triggerExecution") -> list[float]:
    progress = [p if isinstance(p, dict) else json.loads(p.json) for p in query.recentProgress]
    return [float(one["durationMs"][duration]) for one in progress]
