"""Pipelines on Spark: what a user declares, and what becomes of it."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from spark_stage import Breaking, Rejecting, Source, cached, ids, run_to_end

from epochal.coordinator import Stopped
from epochal.errors import GateRefused, Misconfigured, RowRejected, TaskFailed, Unsettled
from epochal.kit.sink_base import cast_hint
from epochal.sinks.files import Files, read_epochs
from epochal.sinks.memory import Memory
from epochal.spark.active_runs import Run
from epochal.spark.error_text import stop_or_error
from epochal.spark.jobs import COMPILED
from epochal.spark.pipeline import Pipeline
from epochal.spark.projection import project
from epochal.spark.versions import UNIX_SOCKETS


@pytest.mark.compat
def test_several_sinks_take_their_parts_of_each_epoch_under_one_decision(
    source: Source, checkpoint: Path, tmp_path: Path
) -> None:
    source.add_numbers(epochs=3)
    everything = Memory(name="everything")
    odd = Memory(name="odd", where="id % 2 = 1", select=["id", "upper(v) AS v"])
    twice = Memory(name="twice", select=lambda df: df.selectExpr("id * 2 AS id"))
    files = Files(str(tmp_path / "files"))
    seen = []
    gates = [
        lambda epoch: epoch.rows("odd") * 2 == epoch.rows("everything"),
        lambda epoch: seen.append(epoch.frame.count()),
    ]
    pipeline = Pipeline("numbers", [everything, odd, twice, files], gates)
    run_to_end(pipeline, source.stream, checkpoint)
    assert ids(everything) == source.ids
    assert ids(odd) == [n for n in source.ids if n % 2]
    assert set(odd.rows().column("v").to_pylist()) == {f"V{n}" for n in source.ids if n % 2}
    assert ids(twice) == [n * 2 for n in source.ids]
    assert sorted(read_epochs(str(tmp_path / "files")).to_table()["id"].to_pylist()) == source.ids
    assert everything.epochs() == odd.epochs() == [0, 1, 2]
    assert seen == [10, 10, 10]
    assert [epoch.rows for epoch in pipeline.last_epochs()] == [35, 35, 35]
    assert pipeline.metrics().commits == 3
    assert pipeline.error is None


def test_garbage_collection_after_a_task_passes_over_what_the_worker_has_loaded(
    source: Source, checkpoint: Path
) -> None:
    def spared(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            counts = [gc.get_freeze_count()] * batch.num_rows
            yield pa.record_batch({"id": pa.array(counts, pa.int64())})

    source.add_numbers(epochs=2)
    run_to_end(Pipeline("numbers", [Memory()]), source.stream, checkpoint)
    # Spark takes the worker that was used last.
    (row,) = source.spark.range(1, numPartitions=1).mapInArrow(spared, "id long").collect()
    assert row.id > 10_000


def test_stages_are_cut_where_java_would_interpret_them_while_our_jobs_run(
    source: Source, checkpoint: Path
) -> None:
    (setting,) = COMPILED
    before = source.spark.conf.get(setting)
    assert before != COMPILED[setting]
    seen = []
    sink = Memory(select=lambda df: (seen.append(df.sparkSession.conf.get(setting)), df)[1])
    Pipeline("numbers", [sink]).write(source.spark.range(3), run="once", checkpoint=checkpoint)
    assert seen[-1] == COMPILED[setting]
    assert source.spark.conf.get(setting) == before


def test_nothing_stays_cached_after_an_epoch(source: Source, checkpoint: Path) -> None:
    before = cached(source)
    source.add_numbers(epochs=2)
    pipeline = Pipeline("numbers", [Memory(name="a"), Memory(name="b")])
    run_to_end(pipeline, source.stream, checkpoint)
    assert cached(source) <= before


def test_nothing_stays_cached_after_an_epoch_that_could_not_be_evaluated(
    source: Source, checkpoint: Path
) -> None:
    before = cached(source)
    source.add_numbers(epochs=1)
    broken = source.stream.selectExpr("id", "raise_error('no colour') AS v")
    pipeline = Pipeline("broken", [Memory(name="a"), Memory(name="b")])
    with pytest.raises(StreamingQueryException, match="no colour"):
        run_to_end(pipeline, broken, checkpoint)
    assert cached(source) <= before


def test_an_error_of_ours_that_cites_an_interrupt_is_not_taken_for_a_stop() -> None:
    error = Unsettled("epoch 3 is decided and not carried out: java.lang.InterruptedException")
    assert stop_or_error(error, "epoch 3") is error
    assert isinstance(
        stop_or_error(RuntimeError("java.lang.InterruptedException"), "epoch 3"), Stopped
    )


@pytest.mark.compat
def test_an_epoch_without_rows_is_decided_like_any_other(source: Source, checkpoint: Path) -> None:
    source.add_numbers(epochs=1)
    source.add([])
    source.add_numbers(epochs=1)
    nothing, sink = Memory(name="nothing", where="false"), Memory(name="all")
    run_to_end(Pipeline("empty", [sink, nothing]), source.stream, checkpoint)
    assert ids(sink) == source.ids
    assert nothing.epochs() == sink.epochs() == [0, 1, 2]


def test_a_gate_that_refuses_stops_the_query_and_shows_nothing(
    source: Source, checkpoint: Path
) -> None:
    source.add_numbers(epochs=2)
    a, b = Memory(name="a"), Memory(name="b")
    asked = []

    def few(epoch: Any) -> str | None:
        asked.append(epoch.number)
        return "too many rows" if epoch.number == 1 else None

    pipeline = Pipeline("gated", [a, b], gates=[few])
    with pytest.raises(StreamingQueryException) as stopped:
        run_to_end(pipeline, source.stream, checkpoint)
    assert isinstance(pipeline.error, GateRefused)
    assert "gate few refused: too many rows" in str(stopped.value).split("Traceback")[0]
    assert a.epochs() == b.epochs() == [0]
    pipeline._run.end()
    again = Pipeline("gated", [a, b])
    run_to_end(again, source.stream, checkpoint)
    assert ids(a) == ids(b) == source.ids


@pytest.mark.compat
def test_an_error_in_a_task_comes_first_with_its_hint_and_its_class(
    source: Source, checkpoint: Path
) -> None:
    source.add_numbers(epochs=1)
    pipeline = Pipeline("rejected", [Rejecting(name="picky"), Memory(name="other")])
    with pytest.raises(StreamingQueryException) as stopped:
        run_to_end(pipeline, source.stream, checkpoint)
    shown = str(stopped.value)
    first = shown.split("Traceback", maxsplit=1)[0]
    assert (
        "epochal.errors.RowRejected: id 7 is not a colour [row-rejected]\nhint: send colours"
        in first
    )
    assert "pyspark/worker.py" not in shown
    assert isinstance(pipeline.error, RowRejected)
    assert pipeline.error.hint == "send colours"


def test_an_error_that_is_not_ours_is_reported_by_its_shortest_reason(
    source: Source, checkpoint: Path
) -> None:
    source.add_numbers(epochs=1)
    pipeline = Pipeline("broken", [Breaking(name="fragile")])
    with pytest.raises(StreamingQueryException):
        run_to_end(pipeline, source.stream, checkpoint)
    assert isinstance(pipeline.error, TaskFailed)
    assert "ValueError: something in a library" in pipeline.error.message


def test_an_error_of_the_query_itself_is_reported_by_its_shortest_reason(
    source: Source, checkpoint: Path
) -> None:
    source.add_numbers(epochs=1)
    for sinks in ([Memory(name="one")], [Memory(name="one"), Memory(name="two")]):
        pipeline = Pipeline("broken", sinks)
        df = source.stream.selectExpr("raise_error('no such country') AS id")
        with pytest.raises(StreamingQueryException):
            run_to_end(pipeline, df, checkpoint.with_name(f"{len(sinks)}"))
        assert isinstance(pipeline.error, TaskFailed)
        assert "no such country" in pipeline.error.message
        assert "\n" not in pipeline.error.message


def test_check_asks_every_target_for_the_rows_it_would_get(source: Source, tmp_path: Path) -> None:
    files = Files(str(tmp_path / "f"), partition_by=["v"], select=["v", "id"])
    report = Pipeline("checked", [Memory(), files]).check(source.stream)
    assert set(report.abilities) == {"memory", files.name}
    assert "whole epochs" in str(report)
    assert report.advice == (), "this Spark was started as advised"
    conf = source.spark.sparkContext._conf
    conf.set(UNIX_SOCKETS, "false")
    try:
        report = str(Pipeline("checked", [Memory()]).check(source.stream))
    finally:
        conf.set(UNIX_SOCKETS, "true")
    assert f"faster: {UNIX_SOCKETS}=true" in report
    nowhere = Files(str(tmp_path / "f"), partition_by=["country"], name="nowhere")
    with pytest.raises(Misconfigured, match="country"):
        Pipeline("checked", [nowhere]).check(source.stream)


def test_options_of_a_query_may_be_given_as_spark_spells_them(
    source: Source, checkpoint: Path
) -> None:
    source.add_numbers(epochs=2)
    sink = Memory()
    query = Pipeline("spelled", [sink]).start(
        source.stream,
        checkpointLocation=checkpoint,
        outputMode="append",
        queryName="mine",
        trigger={"availableNow": True},
    )
    assert query.name == "mine"
    query.awaitTermination()
    assert ids(sink) == source.ids


def test_what_can_never_work_is_refused_before_anything_is_claimed(
    source: Source, checkpoint: Path, spark: SparkSession
) -> None:
    pipeline = Pipeline("refused", [Memory()])
    with pytest.raises(Misconfigured, match="continuous"):
        pipeline.start(source.stream, checkpoint, continuous="1 second")
    with pytest.raises(Misconfigured, match="real-time"):
        pipeline.start(source.stream, checkpoint, realTime="5 minutes")
    with pytest.raises(Misconfigured, match="can't use the trigger processingTime='soon'"):
        pipeline.start(source.stream, checkpoint, processingTime="soon")
    with pytest.raises(Misconfigured, match="can't use the trigger availableNow='yes'"):
        pipeline.start(source.stream, checkpoint, availableNow="yes")
    with pytest.raises(Misconfigured, match="does not know triggers="):
        pipeline.start(source.stream, checkpoint, triggers="1 second")
    with pytest.raises(Misconfigured, match="trigger='1 second'"):
        pipeline.start(source.stream, checkpoint, trigger="1 second")
    with pytest.raises(Misconfigured, match="continuous"):
        pipeline.start(source.stream, checkpoint, trigger={"continuous": "1 second"})
    with pytest.raises(Misconfigured, match="checkpointLocation='elsewhere' differ"):
        pipeline.start(source.stream, checkpoint, checkpointLocation="elsewhere")
    with pytest.raises(Misconfigured, match="is not a stream"):
        pipeline.start(spark.range(3), checkpoint)
    with pytest.raises(Misconfigured, match="complete"):
        pipeline.start(source.stream, checkpoint, outputMode="complete")
    twice = Memory(select=["id", "id"])
    with pytest.raises(Misconfigured, match="two columns named id"):
        Pipeline("refused", [twice]).start(source.stream, checkpoint)
    with pytest.raises(Misconfigured, match="share the name"):
        Pipeline("refused", [Memory(), Memory()])
    assert not checkpoint.exists()


def test_a_hint_casts_one_column_and_leaves_the_others_as_they_are(spark: SparkSession) -> None:
    frame = spark.range(1).selectExpr("map(id, id) AS m", "id")
    followed = Memory(**eval(f"dict({cast_hint('m', 'string')})"))
    assert project(followed, frame).schema.simpleString() == "struct<m:string,id:bigint>"


@pytest.mark.compat
def test_complete_mode_replaces_and_update_mode_appends_versions(
    source: Source, checkpoint: Path
) -> None:
    source.add_numbers(epochs=2)
    counted = source.stream.selectExpr("id % 2 AS id").groupBy("id").count()
    whole, changes = Memory(mode="complete"), Memory()
    run_to_end(Pipeline("whole", [whole]), counted, checkpoint / "w", outputMode="complete")
    run_to_end(Pipeline("changes", [changes]), counted, checkpoint / "c", outputMode="update")
    assert sorted(map(tuple, (r.values() for r in whole.rows().to_pylist()))) == [(0, 10), (1, 10)]
    assert sorted(changes.rows()["count"].to_pylist()) == [5, 5, 10, 10]


def test_any_type_that_arrow_carries_arrives_and_is_fingerprinted(
    source: Source, checkpoint: Path
) -> None:
    source.add_numbers(epochs=1, rows=2)
    source.spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    df = source.stream.selectExpr(
        "id",
        "map('a', id) AS m",
        "array(map('b', v)) AS nested",
        "timestamp'2026-01-02 03:04:05' AS t",
        "date'2026-01-02' AS d",
        "cast(1.5 AS decimal(10,2)) AS dec",
        "named_struct('x', v, 't', timestamp'2026-01-02 03:04:05') AS s",
        "cast(null AS string) AS n",
        "X'00ff' AS b",
        "map('k', array(timestamp'2026-01-02 03:04:05')) AS mt",
    )
    sink = Memory()
    prints = []
    gates = [lambda epoch: prints.append(epoch.receipts("memory")[0].fingerprint)]
    run_to_end(Pipeline("types", [sink], gates), df, checkpoint)
    row = sink.rows().to_pylist()[0]
    assert row["m"] == [("a", 0)]
    assert row["s"]["x"] == "v0"
    assert str(sink.rows().schema.field("t").type) == "timestamp[us, tz=UTC]"
    assert prints[0].rows == 2
    assert prints[0].hash_sum is not None
    prints.clear()
    run_to_end(Pipeline("t2", [Memory()], gates, fingerprint=False), df, checkpoint / "2")
    source.spark.conf.unset("spark.sql.session.timeZone")
    assert prints[0].hash_sum is None


def test_a_fingerprint_does_not_depend_on_order_or_partitions(
    spark: SparkSession, checkpoint: Path
) -> None:
    sums = []

    def note(epoch: Any) -> None:
        receipts = epoch.receipts("memory")
        sums.append(sum(r.fingerprint.hash_sum for r in receipts) % 2**64)

    df = spark.range(1000).selectExpr("id", "id * 2 AS b")
    for run, frame in {
        "a": df.repartition(1),
        "b": df.orderBy(df.id.desc()).repartition(3),
    }.items():
        Pipeline("sums", [Memory()], [note]).write(frame, run=run, checkpoint=checkpoint)
    Pipeline("sums", [Memory()], [note]).write(df.limit(999), run="c", checkpoint=checkpoint)
    assert sums[0] == sums[1] != sums[2]


def test_a_pipeline_reads_well_in_a_notebook(source: Source, checkpoint: Path) -> None:
    source.add_numbers(epochs=1)
    pipeline = Pipeline("notebook", [Memory(where="id < 5 AND v <> '<b>'")])
    assert "not started" in repr(pipeline)
    assert repr(pipeline.last_epochs()) == "no epochs yet"
    run_to_end(pipeline, source.stream, checkpoint)
    assert "epoch 0: committed, 5 rows" in repr(pipeline)
    assert repr(pipeline.last_epochs()).startswith("epoch 0: committed, 5 rows, ")
    assert "<td>memory: 5</td>" in pipeline.last_epochs()._repr_html_()
    assert "<td>committed</td>" in pipeline._repr_html_()
    assert "&lt;b&gt;" in pipeline._repr_html_()


def test_a_pipeline_is_shown_as_stopped_as_soon_as_its_query_has_ended(
    source: Source, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its run ends a moment later, here never."""
    monkeypatch.setattr(Run, "_await_end", lambda self, query: None)
    source.add_numbers(epochs=1)
    pipeline = Pipeline("notebook", [Memory()])
    query = pipeline.start(source.stream, checkpoint, availableNow=True)
    query.awaitTermination()
    assert not pipeline._run.is_over
    assert repr(pipeline).splitlines()[0] == "Pipeline 'notebook': stopped"
    pipeline.close()


def test_the_door_imports_without_pyspark() -> None:
    code = (
        "import sys; sys.modules['pyspark'] = None; sys.modules['py4j'] = None\n"
        "from epochal.spark.pipeline import Pipeline\n"
        "from epochal.sinks.memory import Memory\n"
        "print(Pipeline('p', [Memory()]).check())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "every target answered" in done.stdout
