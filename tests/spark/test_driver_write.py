"""Few rows that the driver writes itself: the same rows, the same sums, and when tasks write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from spark_stage import FEW_ROWS_ARE_WRITTEN_BY, Killer, Source, ids, run_to_end

from epochal.contract import Task
from epochal.errors import TryAgain
from epochal.sinks.files import Files, read_epochs
from epochal.sinks.memory import Memory
from epochal.spark.driver_write import DRIVER_ATTEMPTS, DriverWrites
from epochal.spark.pipeline import Pipeline
from epochal.terms import Limits

FEW = Limits(driver_rows_max=20)


def failing(monkeypatch: pytest.MonkeyPatch, *errors: Exception) -> Memory:
    """Its writer raises these in this process, where no task runs."""
    left, writer = [*errors], Memory.writer

    def fail(sink: Memory, task: Task) -> Any:
        if left:
            raise left.pop()
        return writer(sink, task)

    monkeypatch.setattr(Memory, "writer", fail)
    return Memory()


def by_driver(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Per epoch, rows and whether the driver wrote them; filled while the pipeline runs."""
    noted = DriverWrites.note
    found: list[tuple[int, bool]] = []

    def note(writes: DriverWrites, receipts: Any) -> None:
        some = [one for each in receipts.values() for one in each]
        is_here = all(one.handle.attempt >= DRIVER_ATTEMPTS for one in some)
        found.append((sum(one.rows for one in some), is_here))
        noted(writes, receipts)

    monkeypatch.setattr(DriverWrites, "note", note)
    return found


@pytest.mark.compat
def test_the_driver_writes_few_rows_itself_and_tasks_write_many(
    source: Source, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rows in (10, 20, 21, 5, 7):
        source.add_numbers(epochs=1, rows=rows)
    sink = Memory()
    pipeline = Pipeline("numbers", [sink], limits=FEW)
    found = by_driver(monkeypatch)
    run_to_end(pipeline, source.stream, checkpoint)
    # The first of a run, one that has become too large, and the one after it go to tasks.
    has_few = FEW_ROWS_ARE_WRITTEN_BY == "the driver"
    assert found == [(10, False), (20, has_few), (21, False), (5, False), (7, has_few)]
    assert ("the driver writes few rows itself" in str(pipeline.check(source.stream))) != has_few
    assert ids(sink) == source.ids
    assert sink.epochs() == [0, 1, 2, 3, 4]


def test_rows_and_sums_are_those_of_tasks(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Types that change on their way to Python: decimals, times in another zone, nested nulls."""
    (tmp_path / "source").mkdir()
    source = Source(spark, tmp_path / "source")
    source.add_numbers(epochs=3)
    rows = source.stream.selectExpr(
        "id",
        "cast(id / 4 AS decimal(12, 2)) AS price",
        "timestamp_seconds(id) AS at",
        "if(id % 3 = 0, null, array(v, null)) AS tags",
        "named_struct('a.b', id, 'v', v) AS `odd name`",
    )
    zone = "spark.sql.session.timeZone"
    before = spark.conf.get(zone)
    spark.conf.set(zone, "Asia/Kathmandu")
    shown, sums = {}, {}
    try:
        for rows_max in (0, 20):
            sink = Files(tmp_path / f"out{rows_max}", name="f")
            limits = Limits(driver_rows_max=rows_max)
            pipeline = Pipeline(f"typed {rows_max}", [sink], limits=limits)
            with monkeypatch.context() as patch:
                found = by_driver(patch)
                run_to_end(pipeline, rows, tmp_path / f"checkpoint{rows_max}")
            assert [is_here for _, is_here in found] == [False] + [rows_max > 0] * 2
            table = read_epochs(tmp_path / f"out{rows_max}").to_table()
            shown[rows_max] = table.sort_by("id").to_pylist()
            sums[rows_max] = pipeline._run.coordinator.state.totals[sink.name].fingerprint
    finally:
        spark.conf.set(zone, before)
    assert shown[0] == shown[20]
    assert sums[0] == sums[20]


def test_an_attempt_of_the_driver_that_fails_is_made_again(
    source: Source, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.add_numbers(epochs=3)
    sink = failing(monkeypatch, TryAgain("the target is busy"))
    pipeline = Pipeline("numbers", [sink], limits=Limits(driver_rows_max=20, retry_backoff_ms=(1,)))
    found = by_driver(monkeypatch)
    run_to_end(pipeline, source.stream, checkpoint)
    assert [is_here for _, is_here in found] == [False, True, True]
    assert ids(sink) == source.ids


def test_an_error_of_the_driver_s_own_writer_ends_the_epoch_and_leaves_nothing(
    source: Source, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.add_numbers(epochs=3)
    sink = failing(monkeypatch, ValueError("no such colour"))
    pipeline = Pipeline("numbers", [sink], limits=FEW)
    with pytest.raises(StreamingQueryException, match="no such colour"):
        run_to_end(pipeline, source.stream, checkpoint)
    assert ids(sink) == source.ids[:10]
    assert not sink.committer(pipeline._run.coordinator.identity(sink.name), FEW).in_doubt()
    run_to_end(pipeline, source.stream, checkpoint)
    assert ids(sink) == source.ids


def test_a_crash_after_the_driver_has_prepared_shows_every_row_once(
    source: Source, checkpoint: Path, killer: Killer
) -> None:
    source.add_numbers(epochs=4)
    sink = Memory()
    pipeline = Pipeline("numbers", [sink], limits=FEW, watch=killer.watch)
    # Epochs 0, and 1 and 3 after a start, are those of tasks.
    for killer.at in (("prepared", 1), ("decided", 2)):
        assert killer.run(pipeline, source.stream, checkpoint)
    assert not killer.run(pipeline, source.stream, checkpoint)
    assert ids(sink) == source.ids


def test_a_sink_that_does_not_say_so_is_never_written_to_by_the_driver(
    source: Source, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Memory, "writes_on_driver", False)
    source.add_numbers(epochs=3)
    pipeline = Pipeline("numbers", [Memory()], limits=FEW)
    found = by_driver(monkeypatch)
    run_to_end(pipeline, source.stream, checkpoint)
    assert [is_here for _, is_here in found] == [False, False, False]


def test_rows_too_large_for_the_driver_go_to_tasks(
    source: Source, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyspark.sql.classic.dataframe import DataFrame  # PySpark 3.5 has none

    def refuse(frame: DataFrame) -> None:
        del frame
        raise RuntimeError(
            "Total size of serialized results of 1 tasks (51.8 MiB) is bigger than "
            "spark.driver.maxResultSize (1024.0 KiB)"
        )

    source.add_numbers(epochs=2)
    sink = Memory()
    found = by_driver(monkeypatch)
    monkeypatch.setattr(DataFrame, "_collect_as_arrow", refuse)
    run_to_end(Pipeline("numbers", [sink]), source.stream, checkpoint)
    assert found == [(10, False), (10, False)]
    assert ids(sink) == source.ids
