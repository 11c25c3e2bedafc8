"""A real query writes a history, serves metrics, and reports its figures with Spark's progress."""

from __future__ import annotations

import json
import time
import urllib.request
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from epochal import Files, Pipeline
from epochal.config.resolve_target import OpenedTarget
from epochal.reports.epochs import epochs
from epochal.reports.recover import plan_recovery
from epochal.reports.status import pipeline_status
from epochal.reports.verify import verify
from epochal.spark.active_runs import source_figures
from epochal.spark.progress import Progress
from epochal.telemetry import exporters, prometheus


@pytest.fixture(autouse=True)
def switched_off_again(monkeypatch):
    monkeypatch.setattr(exporters, "_meters", [])


def test_a_query_is_seen_by_operators_while_it_runs_and_afterwards(spark, tmp_path):
    checkpoint = tmp_path / "chk"
    source = tmp_path / "source"
    for _ in range(2):
        spark.range(5).coalesce(1).write.mode("append").json(str(source))
    pipeline = Pipeline(
        "watched",
        sinks=[
            Files(str(tmp_path / "all"), name="all"),
            Files(str(tmp_path / "few"), name="few", where="id < 2"),
        ],
        checkpoint=checkpoint,
        metrics_port=0,
    )
    reported = []
    listener = Progress(pipeline, reported.append)
    spark.streams.addListener(listener)
    try:
        stream = spark.readStream.schema("id BIGINT").option("maxFilesPerTrigger", 1)
        query = pipeline.start(
            stream.json(str(source)), availableNow=True, queryName="a name of its own"
        )
        assert query.awaitTermination(120)
        pipeline.close()
        deadline_s = time.monotonic() + 120
        while len(reported) < 2:
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
    finally:
        spark.streams.removeListener(listener)
    figures = reported[0]["epochal"]
    assert (figures["rows"], figures["sinks"]["few"]["rows"]) == (7, 2)
    assert {"preparing", "committing"} <= set(figures["sinks"]["all"]["seconds"])
    assert reported[0]["numInputRows"] >= 5

    log = pipeline.log_of()
    assert [one.outcome for one in epochs(log).epochs] == ["committed", "committed"]
    assert pipeline_status(log).driver.liveness.value == "stopped"
    assert pipeline_status(log).behind == {}, "Spark's file source does not tell"
    opened = OpenedTarget(target="x", log=log, pipeline="watched", sinks=pipeline.sinks)
    for one in verify(opened, spark=spark).sinks:
        assert (one.verdict, one.visible_hash) == ("agrees", one.decided_hash)
        assert one.decided_hash is not None
    assert plan_recovery(opened).steps[1:] == ["nothing is in doubt"]

    port = prometheus.serve(0)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    assert 'epochal_rows_total{pipeline="watched",sink="all"} 10.0' in text
    assert 'phase="preparing",pipeline="watched",sink="few"' in text

    file = next((tmp_path / "few").glob("epochal-*.parquet"))
    rows = pq.read_table(file).to_pylist()
    changed = [{**row, "id": row["id"] + 100} for row in rows]
    pq.write_table(pa.Table.from_pylist(changed, schema=pq.read_schema(file)), file)
    assert not verify(opened).differs
    (every, few) = verify(opened, spark=spark).sinks
    assert (every.verdict, few.verdict) == ("agrees", "differs")
    assert "rows were changed" in few.differences[0]


def test_how_far_sources_are_behind_is_read_from_sparks_progress():
    progress = {
        "inputRowsPerSecond": 12.5,
        "sources": [
            {"description": "KafkaV2[a]", "metrics": {"maxOffsetsBehindLatest": "41"}},
            {"description": "rate", "metrics": {}},
            {"description": "files", "metrics": {"numFilesOutstanding": "3"}},
        ],
    }
    query = SimpleNamespace(lastProgress=SimpleNamespace(json=json.dumps(progress)))
    found = source_figures(query)
    assert (found.rows_per_s, found.behind) == (12.5, {"KafkaV2[a]": 41, "files": 3})
    assert source_figures(SimpleNamespace(lastProgress=None)) is None
    assert source_figures(SimpleNamespace()) is None, "the JVM is gone"
