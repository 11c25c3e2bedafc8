"""
Pipelines on Spark Connect: the query is started here, and its epochs are written by a Python worker
of a real server.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import psycopg
import pytest
import victim
from kill_stage import PARTITIONS, expected, judge, read_topic, running_targets
from pyspark import cloudpickle
from servers.connect import ConnectServer
from servers.ports import free_port
from spark_stage import Source, slowly, wait_for

from epochal.clock import SystemClock
from epochal.coordinator import by_hand
from epochal.coordinator.journal import kept_records
from epochal.errors import GateRefused, Misconfigured, Refused, TaskFailed
from epochal.kafka.client import Client
from epochal.kafka.messages.list_transactions import ListTransactionsRequest
from epochal.logs import checkpoint_log
from epochal.protocol.state import RecordKind
from epochal.sinks.files import Files, read_epochs
from epochal.sinks.kafka import Kafka
from epochal.sinks.postgres import Postgres
from epochal.spark import active_runs, connect
from epochal.spark.pipeline import Pipeline
from epochal.terms import Limits, SinkName

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DEATHS = (
    *("plain claimed", "windows begun", "joined prepared", "plain prepared", "windows rehearsed"),
    *("joined gated", "plain decided", "windows decided", "joined committed table"),
    *("plain committed topic", "windows settled", "joined settled"),
)
"""Pipelines, and the step at which their worker is killed."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConnectServer]:
    server = ConnectServer(tmp_path_factory.mktemp("connect"))
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def session(server: ConnectServer) -> Iterator[SparkSession]:
    yield from _session(server)


def _session(server: ConnectServer) -> Iterator[SparkSession]:
    """A client, without what would turn a classic session of this process into one as well."""
    from pyspark.sql.connect.session import SparkSession as Remote

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARK_CONNECT_MODE_ENABLED", "1")
        spark: Any = Remote.builder.remote(server.url).create()
        yield spark
        spark.client.set_retry_policies([])
        spark.stop()


@pytest.fixture
def source(session: SparkSession, tmp_path: Path) -> Source:
    (tmp_path / "source").mkdir()
    return Source(session, tmp_path / "source")


def _ids(folder: Path) -> list[int]:
    return sorted(read_epochs(str(folder)).to_table().column("id").to_pylist())


def _kinds(checkpoint: Path) -> list[RecordKind]:
    return [one.record.kind for one in kept_records(checkpoint_log(checkpoint))]


def _workers(server: ConnectServer) -> list[psutil.Process]:
    """The workers of foreachBatch: children of the server that are no daemon of tasks."""
    return [one for one in psutil.Process(server.pid).children() if _is_worker(one)]


def _is_worker(process: psutil.Process) -> bool:
    try:
        return any("foreach_batch_worker" in part for part in process.cmdline())
    except psutil.NoSuchProcess:  # it has ended meanwhile
        return False


def _kill_at(step: str, note: Path) -> Callable[[str, int | None], None]:
    """SIGKILL of the process that comes to a step, once, if it is not the one of the tests."""
    client = os.getpid()

    def watch(at: str, epoch: int | None) -> None:
        if at == step and os.getpid() != client and not note.exists():
            note.write_text(f"{at} {epoch}")
            os.kill(os.getpid(), signal.SIGKILL)

    return watch


def _run(pipeline: Pipeline, source: Source, checkpoint: Path, **options: Any) -> None:
    pipeline.start(source.stream, checkpoint, availableNow=True, **options).awaitTermination()


def test_every_row_arrives_once_and_the_client_reads_how_it_went(
    source: Source, server: ConnectServer, tmp_path: Path
) -> None:
    source.add_numbers(epochs=3)
    pipeline = Pipeline("orders", [Files(str(tmp_path / "out"), name="files")])
    _run(pipeline, source, tmp_path / "chk")
    assert _ids(tmp_path / "out") == source.ids
    assert pipeline.error is None
    # The client claims before the query starts; the worker claims above it, and stops cleanly.
    wait_for(lambda: _kinds(tmp_path / "chk")[-1] is RecordKind.STOP)
    assert _kinds(tmp_path / "chk") == [
        *(RecordKind.CLAIM, RecordKind.CLAIM),
        *(RecordKind.COMMIT, RecordKind.COMMIT, RecordKind.COMMIT, RecordKind.STOP),
    ]
    wait_for(lambda: not _workers(server))
    assert [one.rows for one in pipeline.last_epochs()] == [10, 10, 10]
    assert (pipeline.metrics().commits, pipeline.metrics().rows) == (3, 30)
    # Nothing is written again by another start, and what came since arrives.
    source.add_numbers(epochs=1)
    _run(pipeline, source, tmp_path / "chk")
    assert _ids(tmp_path / "out") == source.ids


def test_an_error_of_the_worker_reaches_the_client_with_its_class_and_hint(
    source: Source, tmp_path: Path
) -> None:
    source.add_numbers(epochs=1)

    def too_many(epoch: Any) -> str | None:
        return "too many rows" if epoch.rows("files") > 5 else None

    pipeline = Pipeline("orders", [Files(str(tmp_path / "out"), name="files")], [too_many])
    with pytest.raises(Exception, match="too many rows"):
        _run(pipeline, source, tmp_path / "chk")
    assert isinstance(pipeline.error, GateRefused)
    assert "too many rows" in pipeline.error.message
    assert pipeline.error.hint
    assert not list((tmp_path / "out").glob("**/*.parquet"))


def test_metrics_and_probes_are_served_by_the_worker_on_the_machine_of_the_client(
    source: Source, tmp_path: Path
) -> None:
    source.add_numbers(epochs=1)
    port = free_port()
    out = Files(str(tmp_path / "out"), name=SinkName("files"))
    pipeline = Pipeline("served", [out], metrics_port=port)
    query = pipeline.start(source.stream, tmp_path / "chk")
    wait_for(lambda: RecordKind.COMMIT in _kinds(tmp_path / "chk"))

    def answer(path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as found:
            return str(found.read().decode())

    assert answer("/ready") == '{"served": "working"}'
    wait_for(
        lambda: 'epochal_rows_total{pipeline="served",sink="files"} 10.0' in answer("/metrics")
    )
    query.stop()
    assert pipeline.error is None


def test_a_worker_killed_after_the_decision_is_taken_up_by_the_next_start(
    source: Source, tmp_path: Path
) -> None:
    source.add_numbers(epochs=2)
    note = tmp_path / "died"
    pipeline = Pipeline("orders", [Files(str(tmp_path / "out"))], watch=_kill_at("decided", note))
    with pytest.raises(Exception, match="worker exited unexpectedly"):
        _run(pipeline, source, tmp_path / "chk")
    assert note.read_text() == "decided 0"
    assert isinstance(pipeline.error, TaskFailed)
    _run(pipeline, source, tmp_path / "chk")
    assert _ids(tmp_path / "out") == source.ids


def _endlessly(note: Path) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """A query whose first task does not end by itself while its note is there."""

    def wait(batches: Iterator[Any]) -> Iterator[Any]:
        begun = note / str(os.getpid())
        for batch in batches:
            if note.is_dir():
                begun.touch()
                for _ in range(6000):
                    time.sleep(0.1)
            yield batch

    return wait


@pytest.mark.parametrize("sinks", [1, pytest.param(2, marks=pytest.mark.proof)])
def test_a_stop_in_the_middle_of_a_task_cancels_its_job_and_leaves_no_row(
    source: Source, tmp_path: Path, sinks: int
) -> None:
    """No job of a worker is in the query's job group: a stop would leave it running."""
    source.add_numbers(epochs=1)
    note = tmp_path / "begun"
    note.mkdir()
    slow = source.stream.mapInArrow(_endlessly(note), source.schema)
    out = [tmp_path / f"out{number}" for number in range(sinks)]
    pipeline = Pipeline("orders", [Files(str(one), name=SinkName(one.name)) for one in out])
    query = pipeline.start(slow, tmp_path / "chk")
    wait_for(lambda: any(note.iterdir()))
    tasks = [psutil.Process(int(one.name)) for one in note.iterdir()]
    query.stop()
    assert pipeline.error is None
    # Spark ends the Python of a task that was cancelled; the others would sleep for ten minutes.
    wait_for(lambda: not any(_is_running(one) for one in tasks))
    wait_for(lambda: _kinds(tmp_path / "chk")[-1] is RecordKind.STOP)
    assert not list(tmp_path.glob("out*/**/*.parquet"))
    shutil.rmtree(note)
    _run(pipeline, source, tmp_path / "chk")
    assert all(_ids(one) == source.ids for one in out)


def _is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it has ended meanwhile
        return False


def test_a_function_of_an_earlier_start_does_not_push_a_newer_one_aside(
    source: Source, session: SparkSession, tmp_path: Path
) -> None:
    source.add_numbers(epochs=1)
    pipeline = Pipeline("orders", [Files(str(tmp_path / "out"))])
    old = pipeline.each_batch(tmp_path / "chk", spark=session)
    new = pipeline.each_batch(tmp_path / "chk", spark=session)
    with pytest.raises(Exception, match="another driver has taken this pipeline over"):
        _start(source, old, tmp_path / "chk").awaitTermination()
    _start(source, new, tmp_path / "chk").awaitTermination()
    assert _ids(tmp_path / "out") == source.ids


def _start(source: Source, function: Any, checkpoint: Path) -> Any:
    """As code of one's own starts it; on a busy machine again, as `Pipeline.start` does."""
    writer = source.stream.writeStream.foreachBatch(function).trigger(availableNow=True)
    return connect.started_query(writer.option("checkpointLocation", str(checkpoint)))


@pytest.fixture
def targets(tmp_path: Path) -> Iterator[Path]:
    with running_targets(tmp_path) as folder:
        yield folder


def _pipeline(root: Path, name: str, watch: Callable[[str, int | None], None]) -> Pipeline:
    sinks = victim.sinks_of(root, name)
    return Pipeline(name, sinks, gates=[victim._are_equal(sinks)], watch=watch)


def _stream(session: SparkSession, root: Path, name: str) -> Any:
    reader = session.readStream.schema("id bigint, at bigint").option("maxFilesPerTrigger", 1)
    return victim.QUERIES[name](reader.json(str(root / "in")))


def _live(session: SparkSession, root: Path, death: str) -> None:
    """One start of a pipeline: its worker is killed at a step, or writes all that there is."""
    name, _, step = death.partition(" ")
    note = root / victim.DIED
    note.unlink(missing_ok=True)
    pipeline = _pipeline(root, name, _kill_at(step, note))
    query = pipeline.start(_stream(session, root, name), root / name, availableNow=True)
    if not step:
        query.awaitTermination()
        return
    with pytest.raises(Exception, match="worker exited unexpectedly"):
        query.awaitTermination()
    assert note.read_text().startswith(step)


@pytest.mark.proof
@pytest.mark.timeout(1800)
def test_a_worker_killed_at_any_step_loses_no_row_and_repeats_none(
    session: SparkSession, targets: Path
) -> None:
    """Files, a table and a topic under one decision, of three queries, two of them with state."""
    for epoch, death in enumerate(DEATHS):
        victim.add_epoch(targets, epoch)
        _live(session, targets, death)
    victim.add_epoch(targets, len(DEATHS))
    for name, rows in expected(range((len(DEATHS) + 1) * victim.ROWS)).items():
        _live(session, targets, name)
        wait_for(lambda: _kinds(targets / name)[-1] is RecordKind.STOP)  # noqa: B023  called at once
        judge(targets, name, rows)


@pytest.mark.proof
def test_a_worker_that_wakes_behind_its_successor_decides_nothing(
    session: SparkSession, server: ConnectServer, targets: Path
) -> None:
    """It is frozen before its decision, and after it; a new start does the work meanwhile."""
    for epoch, step in enumerate(("gated", "decided")):
        victim.add_epoch(targets, epoch)
        note = targets / step
        first = _pipeline(targets, "plain", _freeze_at(step, note))
        stream = _stream(session, targets, "plain")
        first.start(stream, targets / "plain", availableNow=True)
        wait_for(note.exists)
        (frozen,) = _workers(server)
        wait_for(lambda: frozen.status() == psutil.STATUS_STOPPED)  # noqa: B023  called at once
        _live(session, targets, "plain")
        judge(targets, "plain", expected(range((epoch + 1) * victim.ROWS))["plain"])
        frozen.resume()
        frozen.wait(60)
        judge(targets, "plain", expected(range((epoch + 1) * victim.ROWS))["plain"])


def _freeze_at(step: str, note: Path) -> Callable[[str, int | None], None]:
    client = os.getpid()

    def watch(at: str, epoch: int | None) -> None:
        if at == step and os.getpid() != client:
            note.touch()
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(1)  # it takes effect a moment later

    return watch


@pytest.mark.proof
def test_a_client_that_comes_back_takes_over_from_the_query_that_went_on_without_it(
    source: Source, session: SparkSession, server: ConnectServer, tmp_path: Path
) -> None:
    source.add_numbers(epochs=1)
    gone = Pipeline("orders", [Files(str(tmp_path / "out"))])
    gone.start(source.stream, tmp_path / "chk")
    wait_for(lambda: RecordKind.COMMIT in _kinds(tmp_path / "chk"))
    # As in a new process: nothing here knows of the query.
    active_runs._forget(gone._run)
    source.add_numbers(epochs=1)
    wait_for(lambda: _kinds(tmp_path / "chk").count(RecordKind.COMMIT) == 2)
    with contextmanager(_session)(server) as back:
        source.spark = back
        source.add_numbers(epochs=1)
        _run(Pipeline("orders", [Files(str(tmp_path / "out"))]), source, tmp_path / "chk")
    assert _ids(tmp_path / "out") == source.ids
    wait_for(lambda: not _workers(server))


@pytest.mark.proof
def test_a_server_that_is_killed_and_started_again_loses_no_row(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    server = ConnectServer(tmp_path_factory.mktemp("killed"))
    (tmp_path / "source").mkdir()
    begun = tmp_path / "begun"

    def watch(at: str, epoch: int | None) -> None:
        if (at, epoch) == ("begun", 1):
            begun.touch()

    pipeline = Pipeline("orders", [Files(str(tmp_path / "out"))], watch=watch)
    server.start()
    try:
        with contextmanager(_session)(server) as session:
            source = Source(session, tmp_path / "source")
            source.add_numbers(epochs=2)
            slow = source.stream.mapInArrow(slowly, source.schema)
            pipeline.start(slow, tmp_path / "chk", availableNow=True)
            wait_for(begun.exists)
            workers = _workers(server)
            server.kill()
            for worker in workers:
                worker.wait(60)
        server.start()
        with contextmanager(_session)(server) as session:
            source.spark = session
            _run(pipeline, source, tmp_path / "chk")
    finally:
        server.stop()
    assert _ids(tmp_path / "out") == source.ids


@pytest.mark.proof
def test_a_pause_stops_the_query_and_its_worker(
    source: Source, server: ConnectServer, tmp_path: Path
) -> None:
    source.add_numbers(epochs=1)
    out = Files(str(tmp_path / "out"))
    pipeline = Pipeline("orders", [out], limits=Limits(sweep_every_s=1))
    query = pipeline.start(source.stream, tmp_path / "chk")
    wait_for(lambda: RecordKind.COMMIT in _kinds(tmp_path / "chk"))
    by_hand.pause(checkpoint_log(tmp_path / "chk"), by="a person", because="maintenance")
    wait_for(lambda: not query.isActive)
    wait_for(lambda: _kinds(tmp_path / "chk")[-1] is RecordKind.STOP)
    assert pipeline.error is None
    with pytest.raises(Refused, match="paused by a person"):
        _run(pipeline, source, tmp_path / "chk")
    wait_for(lambda: not _workers(server))


@pytest.mark.proof
def test_rows_that_a_target_rejects_go_where_they_are_sent(
    source: Source, targets: Path, tmp_path: Path
) -> None:
    at = victim.Targets.load(targets).postgres
    with psycopg.connect(at, autocommit=True) as connection:
        connection.execute("CREATE TABLE few (id bigint CHECK (id % 7 > 0), v text)")
    source.add_numbers(epochs=2)
    bad = Files(str(tmp_path / "bad"), name="bad")
    _run(Pipeline("few", [Postgres(at, table="few", on_reject=bad)]), source, tmp_path / "chk")
    with psycopg.connect(at) as connection:
        taken = [row[0] for row in connection.execute("SELECT id FROM few ORDER BY 1")]
    assert taken == [n for n in source.ids if n % 7]
    rejected = read_epochs(str(tmp_path / "bad")).to_table().num_rows
    assert len(taken) + rejected == len(source.ids)


@pytest.mark.proof
def test_a_client_that_does_not_reach_the_log_starts_a_new_pipeline_and_no_other(
    source: Source, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(connect, "_is_same_place", lambda spark, url: False)
    source.add_numbers(epochs=2)
    pipeline = Pipeline("orders", [Files(str(tmp_path / "out"))])
    _run(pipeline, source, tmp_path / "chk")
    assert _ids(tmp_path / "out") == source.ids
    source.add_numbers(epochs=1)
    with pytest.raises(Exception, match="could not be claimed where the query was started"):
        _run(pipeline, source, tmp_path / "chk")
    assert isinstance(pipeline.error, Refused)
    assert "log=" in pipeline.error.hint


@pytest.mark.proof
def test_a_client_that_reaches_the_log_and_not_the_checkpoint_starts_again(
    source: Source, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(connect, "reached_checkpoint", lambda spark, checkpoint: None)
    pipeline = Pipeline("orders", [Files(str(tmp_path / "out"))], log=tmp_path / "log")
    for _ in range(3):
        source.add_numbers(epochs=1)
        _run(pipeline, source, tmp_path / "chk")
        assert _ids(tmp_path / "out") == source.ids
    shutil.rmtree(tmp_path / "chk")
    with pytest.raises(Exception, match="it was reset or replaced"):
        _run(pipeline, source, tmp_path / "chk")
    assert _ids(tmp_path / "out") == source.ids


@pytest.mark.proof
def test_a_start_waits_for_a_worker_that_is_slow_and_a_rerun_cell_takes_over(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark gives up on a worker that has not connected after ten seconds."""
    late = tmp_path / "late"
    (tmp_path / "python").mkdir()
    (tmp_path / "python" / "sitecustomize.py").write_text(_SLOW_ONCE.format(late=str(late)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "python"))
    server = ConnectServer(tmp_path_factory.mktemp("slow"))
    server.start()
    (tmp_path / "source").mkdir()
    try:
        with contextmanager(_session)(server) as session:
            source = Source(session, tmp_path / "source")
            source.add_numbers(epochs=1)
            pipeline = Pipeline("orders", [Files(str(tmp_path / "out"))])
            first = pipeline.start(source.stream, tmp_path / "chk")
            assert late.exists()
            wait_for(lambda: RecordKind.COMMIT in _kinds(tmp_path / "chk"))
            source.add_numbers(epochs=1)
            second = pipeline.start(source.stream, tmp_path / "chk")
            assert not first.isActive
            wait_for(lambda: _kinds(tmp_path / "chk").count(RecordKind.COMMIT) == 2)
            second.stop()
    finally:
        server.stop()
    assert _ids(tmp_path / "out") == source.ids


_SLOW_ONCE = """
import pathlib, sys, time

late = pathlib.Path({late!r})
if any("foreach_batch_worker" in part for part in sys.orig_argv) and not late.exists():
    late.touch()
    time.sleep(13)
"""


@pytest.mark.proof
def test_ids_of_kafka_are_used_again_from_epoch_to_epoch(
    session: SparkSession, targets: Path
) -> None:
    at = victim.Targets.load(targets).kafka
    for epoch in range(6):
        victim.add_epoch(targets, epoch)
    pipeline = Pipeline("plain", [Kafka(at, topic="plain", name=SinkName("topic"))])
    stream = _stream(session, targets, "plain")
    pipeline.start(stream, targets / "plain", availableNow=True).awaitTermination()
    assert read_topic(targets, "plain") == expected(range(6 * victim.ROWS))["plain"]
    with Client(at, clock=SystemClock()) as client:
        listed = [client.ask(ListTransactionsRequest(), node) for node in client.nodes()]
    used = [one.transactional_id for answer in listed for one in answer.transaction_states]
    # The first epoch does not know how many tasks there are: they take ids of their own, once.
    assert len(used) <= 2 * PARTITIONS, used


@pytest.mark.proof
def test_a_function_for_another_checkpoint_is_refused(
    source: Source, session: SparkSession, tmp_path: Path
) -> None:
    source.add_numbers(epochs=1)
    pipeline = Pipeline("orders", [Files(str(tmp_path / "out"))])
    each = pipeline.each_batch(tmp_path / "chk", spark=session)
    with pytest.raises(Exception, match="does not run on the checkpoint"):
        _start(source, each, tmp_path / "other").awaitTermination()
    assert not list((tmp_path / "out").glob("**/*.parquet"))


@pytest.mark.proof
def test_a_batch_is_loaded_once_by_the_client(
    source: Source, session: SparkSession, tmp_path: Path
) -> None:
    source.add_numbers(epochs=1)
    pipeline = Pipeline("load", [Files(str(tmp_path / "out"))])
    batch = session.read.schema(source.schema).json(str(source.folder))
    for is_repeat in (False, True):
        written = pipeline.write(batch, run="once", checkpoint=tmp_path / "chk")
        assert written.is_repeat is is_repeat
    assert _ids(tmp_path / "out") == source.ids


@pytest.mark.proof
def test_what_needs_a_jvm_is_refused_with_the_reason(
    source: Source, session: SparkSession, tmp_path: Path
) -> None:
    pipeline = Pipeline("orders", [Files(str(tmp_path / "out"))])
    with pytest.raises(Misconfigured, match="a standby needs Spark's JVM"):
        pipeline.start(source.stream, tmp_path / "chk", standby=True)
    with pytest.raises(Misconfigured, match="does not reach"):
        pipeline.start(source.stream, "hdfs://name/chk")
    only_spark = Pipeline("orders", [Files(str(tmp_path / "out"), format="orc")])
    with pytest.raises(Misconfigured, match="Spark Connect gives no access"):
        only_spark.start(source.stream, tmp_path / "chk")
    advice = pipeline.check(source.stream).advice
    assert any("column by column" in one for one in advice)


# Workers can't import this file: what they need of it travels with them.
for _module in (sys.modules[__name__], victim):
    cloudpickle.register_pickle_by_value(_module)
