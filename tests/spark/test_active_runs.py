"""The runs of one process: starting, stopping and starting again, as at a notebook."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark import cloudpickle
from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming.query import StreamingQuery
from spark_stage import Source, ids, wait_for

from epochal.contract import Task
from epochal.coordinator import by_hand, idle_sweep
from epochal.errors import EpochalError, Fenced, Misconfigured, Refused, TaskFailed
from epochal.sinks.files import Files, read_epochs
from epochal.sinks.memory import Memory
from epochal.spark import active_runs
from epochal.spark.error_text import StopSignal
from epochal.spark.pipeline import Pipeline
from epochal.telemetry import probes
from epochal.telemetry.probes import Activity
from epochal.terms import Generation, Limits


@pytest.mark.compat
def test_a_cell_is_run_again_with_and_without_a_stop(source: Source, checkpoint: Path) -> None:
    source.add_numbers(epochs=1)
    sink = Memory()
    queries = []
    for is_stopped in (True, False, True):
        pipeline = Pipeline("cell", [sink])
        queries.append(pipeline.start(source.stream, checkpoint, processingTime="0 seconds"))
        queries[-1].processAllAvailable()
        if is_stopped:
            queries[-1].stop()
        source.add_numbers(epochs=1)
    assert [query.isActive for query in queries] == [False, False, False]
    assert [query.exception() for query in queries] == [None, None, None]
    assert ids(sink) == source.ids[:30]


def test_a_start_of_another_pipeline_on_the_checkpoint_is_refused_and_stops_nothing(
    source: Source, checkpoint: Path
) -> None:
    query = Pipeline("cell", [Memory()]).start(source.stream, checkpoint)
    with pytest.raises(Refused, match="belongs to the pipeline 'cell', not 'other'"):
        Pipeline("other", [Memory()]).start(source.stream, checkpoint)
    assert query.isActive
    query.stop()


def test_a_start_waits_for_the_callback_that_a_stop_left_running(
    source: Source, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.add_numbers(epochs=1)
    sink, entered, may_go_on = Memory(), threading.Event(), threading.Event()

    def slow_gate(epoch: Any) -> None:
        entered.set()
        may_go_on.wait(120)

    first = Pipeline("cell", [sink], gates=[slow_gate])
    query = first.start(source.stream, checkpoint)
    assert entered.wait(120)
    stopping = threading.Thread(target=query.stop, daemon=True)
    stopping.start()
    monkeypatch.setattr(active_runs.Run.end, "__defaults__", (0.5,))
    with pytest.raises(Misconfigured, match="is still being written after"):
        first._run.end()
    may_go_on.set()
    stopping.join(120)
    monkeypatch.undo()
    again = Pipeline("cell", [sink])
    again.start(source.stream, checkpoint, availableNow=True).awaitTermination()
    assert ids(sink) == source.ids


@pytest.mark.compat
def test_the_end_of_a_query_is_written_to_the_log(source: Source, checkpoint: Path) -> None:
    source.add_numbers(epochs=1)
    pipeline = Pipeline("ends", [Memory()])
    pipeline.start(source.stream, checkpoint, availableNow=True).awaitTermination()
    wait_for(lambda: pipeline._run.is_over)
    pipeline._run.end()
    assert pipeline._run.coordinator.state.is_stopped
    assert str(checkpoint) not in active_runs._runs
    wait_for(lambda: not [t for t in threading.enumerate() if t.name.startswith("epochal-end")])


_SCRIPT_THAT_ENDS = """
import atexit
from types import SimpleNamespace
from epochal.spark import active_runs

atexit.register(print, "connections closed", flush=True)
coordinator = SimpleNamespace(stop=lambda: print("stop written", flush=True))
for query in (SimpleNamespace(isActive=False), None):
    checkpoint = SimpleNamespace(location=f"chk of {query}")
    run = active_runs.Run(coordinator=coordinator, writer=None, checkpoint=checkpoint)
    run.query = query
    active_runs.add_run(run)
"""


def test_a_script_that_ends_stops_its_runs_before_connections_are_closed() -> None:
    """Also the run of an `each_batch` that no query has called."""
    ended = subprocess.run(
        [sys.executable, "-c", _SCRIPT_THAT_ENDS], capture_output=True, text=True, check=True
    )
    assert ended.stdout.splitlines() == ["stop written", "stop written", "connections closed"]


@pytest.mark.compat
def test_an_idle_query_that_was_taken_over_ends_as_failed_with_our_message(
    source: Source, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle_sweep, "_EVERY_MIN_S", 0.1)
    source.add_numbers(epochs=1)
    sink, limits = Memory(), Limits(sweep_every_s=0.0)
    pipeline = Pipeline("idle", [sink], limits=limits)
    query = pipeline.start(source.stream, checkpoint)
    query.processAllAvailable()
    by_hand.take_over(pipeline.log_of(checkpoint), limits)
    with pytest.raises(StreamingQueryException, match="another driver has taken this pipeline"):
        query.awaitTermination(120)
    assert not query.isActive
    assert "another driver has taken this pipeline" in str(query.exception())
    assert isinstance(pipeline.error, Fenced)
    assert ids(sink) == source.ids


def test_probes_know_whether_a_query_works_was_stopped_or_has_failed(
    source: Source, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "_activities", {})
    source.add_numbers(epochs=1)
    pipeline = Pipeline("probed", [Memory()], gates=[lambda epoch: epoch.number == 0])
    query = pipeline.start(source.stream, checkpoint)
    query.processAllAvailable()
    assert probes.activities() == {"probed": Activity.WORKING}
    assert (probes.is_live(), probes.is_ready()) == (True, True)
    query.stop()
    pipeline.close()
    assert probes.activities() == {"probed": Activity.STOPPED}
    assert (probes.is_live(), probes.is_ready()) == (True, False)
    source.add_numbers(epochs=1)
    query = pipeline.start(source.stream, checkpoint)
    with pytest.raises(StreamingQueryException, match="gate"):
        query.awaitTermination()
    assert probes.activities() == {"probed": Activity.FAILED}
    assert (probes.is_live(), probes.is_ready()) == (False, False)


@pytest.mark.parametrize(
    ("error", "activity"),
    [
        ("Some data may have been lost: failOnDataLoss", Activity.FAILED),
        ("java.io.InterruptedIOException: timeout", Activity.FAILED),
        (
            "[SPARK_JOB_CANCELLED] Job 3 cancelled as part of cancellation of all jobs",
            Activity.STOPPED,
        ),
    ],
)
def test_probes_know_a_query_that_ends_by_an_error_of_its_source(
    error: str, activity: Activity
) -> None:
    def fail() -> None:
        raise RuntimeError(error)

    stub: Any = SimpleNamespace(location="chk", stop=lambda: None, awaitTermination=fail)
    run = active_runs.Run(coordinator=stub, writer=stub, checkpoint=stub)
    run._await_end(stub)
    assert run.activity() is activity


def test_what_a_zombie_prepares_goes_although_no_row_comes(
    source: Source, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle_sweep, "_EVERY_MIN_S", 0.1)
    source.add_numbers(epochs=1)
    sink = Memory()
    pipeline = Pipeline("idle", [sink], limits=Limits(sweep_every_s=0.0))
    query = pipeline.start(source.stream, checkpoint)
    query.processAllAvailable()
    coordinator = pipeline._run.coordinator
    zombie = replace(coordinator.identity(sink.name), generation=Generation(0))
    handle = zombie.handle(coordinator.state.expected, partition=0, attempt=1)
    sink.writer(Task(handle=handle, schema=sink.rows().schema)).prepare()
    wait_for(lambda: not sink._reference.store().in_doubt(zombie))
    query.stop()
    assert ids(sink) == source.ids


def test_existing_foreach_batch_code_is_wrapped_and_claims_again_for_each_run(
    source: Source, checkpoint: Path
) -> None:
    source.add_numbers(epochs=1)
    sink, refusing = Memory(), []
    pipeline = Pipeline("wrapped", [sink], gates=[lambda epoch: not refusing])
    each = pipeline.each_batch(checkpoint)

    def run() -> None:
        writer = source.stream.writeStream.foreachBatch(each).trigger(availableNow=True)
        writer.option("checkpointLocation", str(checkpoint)).start().awaitTermination()

    run()
    source.add_numbers(epochs=1)
    refusing.append(True)
    with pytest.raises(Exception, match="refused"):
        run()
    refusing.clear()
    run()
    assert ids(sink) == source.ids
    assert pipeline._run.coordinator.state.generation == 3


def test_a_pickled_each_batch_takes_over_from_the_one_it_was_made_of(
    source: Source, checkpoint: Path, tmp_path: Path
) -> None:
    """As where a platform sends functions to the process that runs the query."""
    source.add_numbers(epochs=2)
    pipeline = Pipeline("sent", [Files(str(tmp_path / "out"))], gates=[lambda epoch: None])
    here = pipeline.each_batch(checkpoint)
    sent = cloudpickle.loads(cloudpickle.dumps(here))

    def run(function: Any) -> None:
        writer = source.stream.writeStream.foreachBatch(function).trigger(availableNow=True)
        writer.option("checkpointLocation", str(checkpoint)).start().awaitTermination()

    run(sent)
    assert visible(tmp_path / "out") == source.ids
    source.add_numbers(epochs=1)
    with pytest.raises(Exception, match="has taken this pipeline over"):
        run(here)
    assert visible(tmp_path / "out") == source.ids[:20]
    run(pipeline.each_batch(checkpoint))
    assert visible(tmp_path / "out") == source.ids


def visible(folder: Path) -> list[int]:
    return sorted(read_epochs(folder).to_table().column("id").to_pylist())


def test_each_batch_on_another_checkpoint_than_the_querys_is_refused(
    source: Source, checkpoint: Path
) -> None:
    source.add_numbers(epochs=1)
    pipeline = Pipeline("wrapped", [Memory()])
    each = pipeline.each_batch(checkpoint / "mine")
    writer = source.stream.writeStream.foreachBatch(each).trigger(availableNow=True)
    query = writer.option("checkpointLocation", str(checkpoint / "other")).start()
    with pytest.raises(Exception, match="belongs to no query"):
        query.awaitTermination()


def test_each_batch_given_to_a_second_query_by_mistake_leaves_the_first_one_running(
    source: Source, checkpoint: Path
) -> None:
    sink = Memory()
    pipeline = Pipeline("wrapped", [sink])
    each = pipeline.each_batch(checkpoint / "mine")

    def start(place: str) -> StreamingQuery:
        writer = source.stream.writeStream.foreachBatch(each)
        return writer.option("checkpointLocation", str(checkpoint / place)).start()

    source.add_numbers(epochs=1)
    first = start("mine")
    wait_for(lambda: ids(sink) == source.ids)
    with pytest.raises(Exception, match="belongs to"):
        start("other").awaitTermination()
    source.add_numbers(epochs=1)
    wait_for(lambda: ids(sink) == source.ids)
    assert first.isActive
    assert pipeline.error is None
    assert pipeline._run.coordinator.state.generation == 1


def test_a_query_elsewhere_that_failed_by_an_interrupt_was_not_stopped() -> None:
    def error_of(failure: Exception | None) -> EpochalError | None:
        query: Any = SimpleNamespace(exception=lambda: failure)
        run = active_runs.RemoteRun(location="chk", query=query, log=None, generation=Generation(0))
        return run.error

    assert error_of(None) is None
    assert error_of(Exception(f"[FOREACH_BATCH_USER_FUNCTION_ERROR] … {StopSignal()}")) is None
    late = error_of(Exception("java.io.InterruptedIOException: timeout"))
    assert isinstance(late, TaskFailed)
    assert "timeout" in late.message


def test_a_load_beside_a_running_query_leaves_its_figures_alone(
    source: Source, checkpoint: Path
) -> None:
    sink = Memory()
    pipeline = Pipeline("beside", [sink])
    source.add_numbers(epochs=2)
    pipeline.start(source.stream, checkpoint)
    wait_for(lambda: pipeline.metrics().commits == 2)
    rows = source.spark.range(1000, 1005).selectExpr("id", "'jan' AS v")
    pipeline.write(rows, run="january", checkpoint=checkpoint)
    assert pipeline.metrics().commits == 2
