"""Stops on purpose, and what else may end a query: functions of the user, Ctrl-C, the JVM's end."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from py4j.clientserver import ClientServerConnection
from py4j.protocol import EMPTY_RESPONSE, ERROR_ON_SEND, Py4JError, Py4JNetworkError
from spark_stage import SlowWriter, Source, cached, ids, run_to_end, slowly, wait_for

from epochal.coordinator import EpochFigures, by_hand
from epochal.coordinator.environment import new_uid
from epochal.coordinator.journal import read_state
from epochal.errors import GateRefused, Misconfigured, Refused, TaskFailed
from epochal.sinks.files import Files, read_epochs
from epochal.sinks.memory import Memory
from epochal.spark import active_runs
from epochal.spark.engine_write import SessionWriter
from epochal.spark.jobs import COMPILED, Part, prepare_all
from epochal.spark.pipeline import Pipeline
from epochal.spark.progress import Progress
from epochal.terms import EpochNumber, Generation, Identity, Limits

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def _ends(error: BaseException) -> Callable[[Any], Any]:
    """A function that a user gives us, which ends what calls it; not where `start` tries it."""

    def ending(rows: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            raise error
        return rows

    return ending


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit("out")])
@pytest.mark.parametrize("place", ["gate", "select", "one of two selects"])
def test_whatever_a_function_of_the_user_raises_ends_the_epoch_and_frees_the_name(
    source: Source, checkpoint: Path, place: str, error: BaseException
) -> None:
    source.add_numbers(epochs=1)
    ending = _ends(error)
    sink = Memory(name="a", select=None if place == "gate" else ending)
    sinks = [sink] if place == "select" else [sink, Memory(name="b")]
    pipeline = Pipeline("ends", sinks, gates=[ending] if place == "gate" else [])
    query = pipeline.start(source.stream, checkpoint, processingTime="0 seconds")
    wait_for(lambda: not query.isActive)
    assert isinstance(pipeline.error, GateRefused if place == "gate" else TaskFailed)
    said = "gate ending failed" if place == "gate" else "sink 'a'"
    assert f"{said}: {type(error).__name__}" in pipeline.error.message
    assert pipeline.error.message in str(query.exception())
    pipeline.close()
    assert [epoch.phase.value for epoch in pipeline.last_epochs()] == ["aborted"]
    assert [sink.epochs() for sink in sinks] == [[]] * len(sinks)
    again = [Memory(name=sink.name) for sink in sinks]
    run_to_end(Pipeline("ends", again), source.stream, checkpoint)
    assert [ids(sink) for sink in again] == [source.ids] * len(sinks)


def test_whatever_a_step_of_a_start_raises_in_a_callback_ends_the_query(
    source: Source, checkpoint: Path
) -> None:
    source.add_numbers(epochs=1)
    sink = Memory()
    pipeline = Pipeline("wrapped", [sink], watch=lambda step, _: _ends(SystemExit(step))(None))
    each = pipeline.each_batch(checkpoint)
    pipeline.close()  # so that the first batch starts a run anew
    writer = source.stream.writeStream.foreachBatch(each)
    query = writer.option("checkpointLocation", str(checkpoint)).start()
    wait_for(lambda: not query.isActive)
    assert "SystemExit: claimed" in str(query.exception())


def test_a_report_that_fails_does_not_hang_the_listeners_of_spark(
    source: Source, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source.add_numbers(epochs=1)
    reports: list[Any] = []

    def report(progress: Any) -> None:
        reports.append(progress)
        sys.exit(3)

    pipeline = Pipeline("reported", [Memory()])
    listener = Progress(pipeline, report)
    source.spark.streams.addListener(listener)
    try:
        pipeline.start(source.stream, checkpoint, processingTime="0 seconds")
        wait_for(lambda: len(reports) == 1)
        source.add_numbers(epochs=1)
        wait_for(lambda: len(reports) == 2)
    finally:
        source.spark.streams.removeListener(listener)
    assert "report" in caplog.text
    assert "SystemExit: 3" in caplog.text


class Stopping:
    """A query that was stopped in the middle of its first epoch, in one of its jobs."""

    def __init__(self, source: Source, checkpoint: Path, place: str) -> None:
        source.add_numbers(epochs=1)
        self.spark = source.spark
        self.before = cached(source)
        df = source.stream
        if place == "evaluate":
            df = df.mapInArrow(slowly, df.schema)
        kind = SlowWriter if place == "prepare" else Memory
        gates = [self._gate] if place == "gate" else []
        self.sinks = [kind(name="a"), kind(name="b")]
        self.pipeline = Pipeline("stopped", self.sinks, gates)
        self.is_in_gate = threading.Event()
        self.query = self.pipeline.start(df, checkpoint)
        if place == "gate":
            assert self.is_in_gate.wait(60)
        jobs = source.spark.sparkContext.statusTracker()
        wait_for(lambda: _is_described(source, place) and jobs.getActiveStageIds())

    def _gate(self, epoch: Any) -> None:
        self.is_in_gate.set()
        epoch.frame.mapInArrow(slowly, epoch.frame.schema).collect()

    def epochs(self) -> list[EpochFigures]:
        self.pipeline.close()
        return list(self.pipeline.last_epochs())


def _is_described(source: Source, place: str) -> bool:
    """Whether a job of that kind runs: Spark's own reading of the source is one, too."""
    if place == "gate":
        return True
    tracker = source.spark.sparkContext._jsc.sc().statusStore()
    active = tracker.jobsList(None)
    described = [active.apply(at).description() for at in range(active.size())]
    running = [str(active.apply(at).status()) for at in range(active.size())]
    return any(
        one.isDefined() and str(one.get()).endswith(place) and status == "RUNNING"
        for one, status in zip(described, running, strict=True)
    )


@pytest.mark.parametrize("place", ["evaluate", "prepare", "gate"])
@pytest.mark.parametrize("by", ["query.stop()", "Ctrl-C"])
def test_a_stop_in_the_middle_of_an_epoch_is_quiet_and_leaves_nothing_cached(
    source: Source, checkpoint: Path, caplog: pytest.LogCaptureFixture, place: str, by: str
) -> None:
    stopping = Stopping(source, checkpoint, place)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        if by == "Ctrl-C":
            # What PySpark does on Ctrl-C, before it interrupts the main thread.
            source.spark.sparkContext.cancelAllJobs()
            wait_for(lambda: not stopping.query.isActive)
        else:
            stopping.query.stop()
        (epoch,) = stopping.epochs()
    assert stopping.query.exception() is None
    assert stopping.pipeline.error is None
    assert cached(source) <= stopping.before
    assert (epoch.phase.value, epoch.trouble.code) == ("aborted", "stopped")
    assert epoch.trouble.message == "the query was stopped"
    loud = [one for one in caplog.records if one.levelno > logging.INFO]
    assert not [one for one in loud if one.exc_info or "\n" in one.getMessage()]
    assert len(loud) == (1 if by == "Ctrl-C" else 0), [one.getMessage() for one in loud]
    state = stopping.pipeline._run.coordinator.state
    # Tasks that were preparing when they were cancelled may go on for a while.
    assert (state.is_stopped, state.is_clear) == (True, place != "prepare")
    run_to_end(Pipeline("stopped", stopping.sinks), source.stream, checkpoint)
    assert [ids(sink) for sink in stopping.sinks] == [source.ids] * 2


@pytest.mark.parametrize("count", [1, 2])
def test_an_interrupt_that_no_stop_has_caused_is_an_error(
    source: Source, checkpoint: Path, count: int
) -> None:
    """As clients of stores raise it when an answer takes too long."""
    late = "raise_error('java.io.InterruptedIOException: timeout')"
    sinks = [Memory(name=f"{number}") for number in range(count)]
    pipeline = Pipeline("late", sinks)
    query = pipeline.start(source.stream.selectExpr("id", f"{late} AS v"), checkpoint)
    source.add_numbers(epochs=1)
    wait_for(lambda: not query.isActive)
    assert isinstance(pipeline.error, TaskFailed)
    assert "InterruptedIOException: timeout" in pipeline.error.message
    assert pipeline.error.message in str(query.exception())
    pipeline.close()
    (epoch,) = pipeline.last_epochs()
    assert (epoch.phase.value, epoch.trouble.code) == ("aborted", "task-failed")


def test_a_process_that_ends_stops_its_queries_cleanly(
    source: Source, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(active_runs, "_EXIT_WAIT_MAX_S", 60.0)  # a busy machine takes its time
    source.add_numbers(epochs=1)
    sink = Memory()
    pipeline = Pipeline("left", [sink])
    query = pipeline.start(source.stream, checkpoint, processingTime="0 seconds")
    wait_for(lambda: ids(sink) == source.ids)
    active_runs._end_runs()
    assert not query.isActive
    assert query.exception() is None
    assert pipeline._run.coordinator.state.is_stopped


class Blocked:
    """A gate that waits until it may go on."""

    def __init__(self) -> None:
        self.entered, self.may_go_on = threading.Event(), threading.Event()

    def __call__(self, epoch: Any) -> None:
        self.entered.set()
        assert self.may_go_on.wait(60)


def test_a_start_waits_for_a_query_of_its_name_that_is_still_ending(
    source: Source, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.add_numbers(epochs=1)
    sink, gate = Memory(), Blocked()
    query = Pipeline("name", [Memory()], [gate]).start(source.stream, checkpoint / "first")
    assert gate.entered.wait(60)
    stopping = threading.Thread(target=query.stop, daemon=True)
    stopping.start()
    wait_for(lambda: not query.isActive)
    wait = active_runs._await_end_of

    def let_it_end(ending: Any) -> None:
        gate.may_go_on.set()
        wait(ending)

    monkeypatch.setattr(active_runs, "_await_end_of", let_it_end)
    run_to_end(Pipeline("name", [sink]), source.stream, checkpoint / "second")
    assert ids(sink) == source.ids
    stopping.join(60)


def test_a_name_that_another_query_has_is_refused_before_the_pipeline_is_claimed(
    source: Source, checkpoint: Path
) -> None:
    source.add_numbers(epochs=1)
    first, second = Memory(), Memory()
    pipeline = Pipeline("name", [first])
    query = pipeline.start(source.stream, checkpoint / "first", processingTime="0 seconds")
    twin = Pipeline("name", [second])
    with pytest.raises(Misconfigured, match=rf"'name' runs .* {checkpoint / 'first'}") as refused:
        twin.start(source.stream, checkpoint / "second")
    assert "queryName=" in refused.value.hint
    assert not (checkpoint / "second").exists()
    run_to_end(twin, source.stream, checkpoint / "second", queryName="twin")
    wait_for(lambda: ids(first) == ids(second) == source.ids)
    assert query.isActive


SCRIPT = Path(__file__).with_name("interrupted.py")


@pytest.fixture
def interrupted(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A script with a Spark of its own, waiting for its query: see there."""
    with (tmp_path / "stderr.txt").open("w") as stderr:
        script = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    yield script
    script.kill()
    script.communicate()


def _said(script: subprocess.Popen[str]) -> Any:
    assert script.stdout is not None
    line = script.stdout.readline()
    assert line, "the script has ended"
    return json.loads(line)


@pytest.mark.parametrize(
    ("form", "call"),
    [("parquet", "commandExecuted"), ("jsonl", "collectToPython"), ("parquet", "submit")],
)
def test_a_load_whose_answer_is_lost_is_not_run_again_beside_itself(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, call: str
) -> None:
    """py4j sends again what was not answered, as when Ctrl-C closes connections of all threads."""
    really_send = ClientServerConnection.send_command
    sent: list[str] = []

    def lose_answer(connection: ClientServerConnection, command: str) -> str:
        answer = really_send(connection, command)
        if f"\n{call}\n" in command:
            sent.append(command)
            raise Py4JNetworkError("Answer from Java side is empty", when=EMPTY_RESPONSE)
        return cast("str", answer)

    # Maps with other keys than texts are written as JSON by tasks only.
    rows = spark.range(100).selectExpr("id", "map(id, id) AS pairs")
    names = ["out", "other"] if call == "submit" else ["out"]  # of several sinks, threads are begun
    pipeline = Pipeline("lost", [Files(tmp_path / name, format=form, name=name) for name in names])
    with monkeypatch.context() as patched:
        patched.setattr(ClientServerConnection, "send_command", lose_answer)
        with pytest.raises(TaskFailed):
            pipeline.write(rows, run="first", checkpoint=tmp_path / "chk")
    assert len(sent) == 1
    pipeline.write(rows, run="first", checkpoint=tmp_path / "chk")
    for name in names:
        found = read_epochs(tmp_path / name).to_table(columns=["id"])["id"].to_pylist()
        assert sorted(found) == list(range(100))


@pytest.mark.compat
def test_a_query_goes_on_after_ctrl_c_in_calls_to_spark(
    source: Source, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by the stop button of a notebook: py4j closes all connections that Python has opened."""
    really_send = ClientServerConnection.send_command

    def interrupt(connection: ClientServerConnection, command: str) -> str:
        is_main = threading.current_thread() is threading.main_thread()
        if not (is_main and "\nawaitTermination\n" in command):
            return cast("str", really_send(connection, command))
        try:
            connection.socket.sendall(command.encode())
        except OSError as error:
            raise Py4JNetworkError("Error while sending", error, ERROR_ON_SEND) from error
        time.sleep(0.2)
        raise KeyboardInterrupt

    monkeypatch.setattr(ClientServerConnection, "send_command", interrupt)
    sinks = [Files(checkpoint.parent / name, name=name) for name in ("a", "b")]
    pipeline = Pipeline("on", sinks)
    query = pipeline.start(source.stream, checkpoint, processingTime="0 seconds")
    for _ in range(20):
        source.add_numbers(epochs=1)
        # The others are raised by what py4j does about the first.
        with pytest.raises((KeyboardInterrupt, Py4JError, OSError)):
            query.awaitTermination()
    wait_for(lambda: pipeline.error or pipeline.metrics().commits == 20)
    assert (active_runs.is_active(query), pipeline.error) == (True, None)
    active_runs.stop_query(query)
    pipeline.close()
    for sink in sinks:
        found = read_epochs(checkpoint.parent / sink.name).to_table(columns=["id"])
        assert sorted(found["id"].to_pylist()) == source.ids


@pytest.mark.timeout(600)
def test_a_script_survives_ctrl_c_and_reports_the_end_of_its_jvm(
    interrupted: subprocess.Popen[str], tmp_path: Path
) -> None:
    assert _said(interrupted) == "is in an epoch"
    os.kill(interrupted.pid, signal.SIGINT)
    assert _said(interrupted) == {"active": False, "exception": None, "error": None}
    stderr = (tmp_path / "stderr.txt").read_text()
    assert "Traceback" not in stderr
    assert "\tat " not in stderr, "a stack trace of Java"
    assert _said(interrupted) == "is in an epoch again"
    killed = _said(interrupted)
    assert killed["class"] == TaskFailed.__name__
    assert "Spark's JVM has exited" in killed["message"]
    assert killed["hint"]
    assert interrupted.wait(60) == 0


def test_a_paused_pipeline_ends_its_epoch_stops_and_starts_only_once_resumed(
    source: Source, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source.add_numbers(epochs=1)
    sink = Memory()
    limits = Limits(sweep_every_s=1.0)
    pipeline = Pipeline("paused", [sink], limits=limits)
    query = pipeline.start(source.stream, checkpoint, processingTime="0 seconds")
    wait_for(lambda: ids(sink) == source.ids)
    log = pipeline.log_of(checkpoint)
    by_hand.pause(log, by="ann", because="an upgrade")
    assert query.awaitTermination(60)
    pipeline.close()
    assert query.exception() is None
    assert pipeline.error is None
    assert [epoch.phase.value for epoch in pipeline.last_epochs()] == ["committed"]
    assert "paused by ann" in caplog.text
    source.add_numbers(epochs=2)
    with pytest.raises(Refused, match=r"paused by ann at .* UTC: an upgrade"):
        pipeline.start(source.stream, checkpoint, availableNow=True)
    assert read_state(log).is_stopped
    by_hand.resume(log, by="ann")
    run_to_end(pipeline, source.stream, checkpoint)
    assert ids(sink) == source.ids


class GoneContext:
    """Spark's context once its JVM has exited."""

    def __getattr__(self, name: str) -> Any:
        raise ConnectionRefusedError("Connection refused")


def test_a_jvm_that_exits_between_two_jobs_is_an_error_of_every_sink() -> None:
    sinks = [Memory(name="a"), Memory(name="b")]
    identities = [
        Identity(pipeline="p", uid=new_uid(), sink=sink.name, generation=Generation(1))
        for sink in sinks
    ]
    parts = [
        Part(sink=sink, identity=identity, handout=None)
        for sink, identity in zip(sinks, identities, strict=True)
    ]
    gone = GoneContext()
    for some, conf in product((parts[:1], parts), (dict(COMPILED), gone)):
        named = SimpleNamespace(sessionUUID=lambda: "a session")
        session = SimpleNamespace(sparkContext=gone, _jsparkSession=named, conf=conf)
        batch = SimpleNamespace(sparkSession=session)
        prepared = prepare_all(
            cast("Any", batch),
            EpochNumber(0),
            some,
            writer=SessionWriter(cast("Any", batch).sparkSession),
            limits=Limits(),
            fingerprint=True,
            is_narrow=False,
            timing=lambda _sink: nullcontext(),
        )
        assert isinstance(prepared.error, TaskFailed)
        assert "Spark's JVM has exited" in prepared.error.message
        assert prepared.receipts == {}
