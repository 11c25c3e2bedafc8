"""
A driver that dies at any step of an epoch: what readers see in the end equals an undisturbed run.

Here the driver's death is played within one process (see `Killer`), so that many can be afforded;
`test_kills` does it with SIGKILL.

transformWithState needs protobuf in its Python workers, which PySpark does not bring along.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, functions
from spark_stage import Killer, Source, ids, run_to_end

from epochal.coordinator.environment import new_uid
from epochal.sinks.memory import Memory
from epochal.spark import epoch as runner
from epochal.spark.pipeline import Pipeline
from epochal.terms import Generation, Identity

STEPS = ("claimed", "begun", "prepared", "rehearsed", "gated", "decided", "settled")
STORES = {
    "default": "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider",
    "rocksdb": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
}
_STORE = "spark.sql.streaming.stateStore.providerClass"


@pytest.mark.compat
def test_a_driver_that_dies_at_any_step_leaves_every_row_visible_once(
    source: Source, checkpoint: Path, killer: Killer
) -> None:
    a, b = Memory(name="a"), Memory(name="b", where="id % 3 = 0")
    pipeline = Pipeline("plain", [a, b], gates=[lambda epoch: None], watch=killer.watch)
    deaths = [(step, None if step == "claimed" else at) for at, step in enumerate(STEPS)]
    deaths += [("committed a", len(STEPS)), ("committed b", len(STEPS) + 1)]
    source.add_numbers(epochs=len(deaths) + 2)
    for killer.at in deaths:
        assert killer.run(pipeline, source.stream, checkpoint), f"never reached {killer.at}"
    assert not killer.run(pipeline, source.stream, checkpoint)
    assert ids(a) == source.ids
    assert ids(b) == [n for n in source.ids if n % 3 == 0]
    for sink in (a, b):
        assert _left_behind(pipeline, sink) == []


def _left_behind(pipeline: Pipeline, sink: Any) -> list[Any]:
    identity = pipeline._run.coordinator.identity(sink.name)
    return list(sink.committer(identity, pipeline.limits).in_doubt())


def test_the_judge_of_leftovers_sees_one(source: Source, checkpoint: Path, killer: Killer) -> None:
    source.add_numbers(epochs=1)
    sink = Memory()
    pipeline = Pipeline("plain", [sink], watch=killer.watch)
    killer.at = ("prepared", 0)
    assert killer.run(pipeline, source.stream, checkpoint)
    assert _left_behind(pipeline, sink) != []
    stranger = Identity(pipeline="plain", uid=new_uid(), sink=sink.name, generation=Generation(1))
    assert not sink.committer(stranger, pipeline.limits).in_doubt()


def _timed(df: DataFrame) -> DataFrame:
    return df.selectExpr("id", "v", "timestamp_seconds(at) AS at").withWatermark("at", "5 seconds")


def _windows(df: DataFrame) -> DataFrame:
    counted = (
        _timed(df)
        .groupBy(functions.window("at", "10 seconds"))
        .agg(functions.count("*").alias("rows"))
    )
    return counted.selectExpr("unix_timestamp(window.start) AS id", "rows")


def _distinct(df: DataFrame) -> DataFrame:
    return _timed(df).dropDuplicatesWithinWatermark(["v"]).select("id", "v")


def _joined(df: DataFrame) -> DataFrame:
    left = _timed(df.where("id % 2 = 0")).alias("l")
    right = _timed(df.where("id % 2 = 1")).alias("r")
    on = functions.expr("l.v = r.v AND r.at BETWEEN l.at AND l.at + INTERVAL 10 SECONDS")
    return left.join(right, on, "leftOuter").selectExpr("l.id AS id", "r.id AS other")


def _transformed(df: DataFrame) -> DataFrame:
    """How often each `v` was seen so far, by a processor with a state of its own."""
    from pyspark.sql.streaming import StatefulProcessor

    class Counting(StatefulProcessor):
        def init(self, handle: Any) -> None:
            self.seen = handle.getValueState("seen", "rows bigint")

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:  # noqa: N802, N803
            before = self.seen.get()[0] if self.seen.exists() else 0
            after = before + sum(len(frame) for frame in rows)
            self.seen.update((after,))
            yield pd.DataFrame({"v": [key[0]], "rows": [after]})

        def close(self) -> None:
            """Nothing is kept open."""

    grouped = df.select("id", "v").groupBy("v")
    return grouped.transformWithStateInPandas(Counting(), "v string, rows bigint", "Update", "None")


def _timeline(source: Source) -> None:
    source.schema = "id bigint, v string, at bigint"
    for epoch in range(5):
        rows = [
            {"id": epoch * 10 + n, "v": f"v{epoch * 3 + n % 4}", "at": epoch * 12 + n}
            for n in range(10)
        ]
        late = {"id": epoch * 10 + 1000, "v": "late", "at": 1}
        source.add([*rows, late])


def _rows(sink: Memory) -> list[tuple[Any, ...]]:
    rows = (tuple(row.values()) for row in sink.rows().to_pylist())
    return sorted(rows, key=repr)


@pytest.mark.parametrize(
    ("query", "mode", "store"),
    [
        pytest.param(_windows, "append", "rocksdb", id="windows-append-rocksdb"),
        pytest.param(_windows, "update", "default", id="windows-update-default"),
        pytest.param(_distinct, "append", "rocksdb", id="distinct-rocksdb"),
        pytest.param(_joined, "append", "default", id="joined-default"),
        pytest.param(_transformed, "update", "rocksdb", id="transformed"),
    ],
)
def test_a_stateful_query_whose_driver_dies_ends_like_an_undisturbed_one(
    source: Source,
    checkpoint: Path,
    killer: Killer,
    *,
    query: Callable[[DataFrame], DataFrame],
    mode: str,
    store: str,
) -> None:
    _timeline(source)
    source.spark.conf.set(_STORE, STORES[store])
    try:
        calm, disturbed = Memory(name="calm"), Memory(name="disturbed")
        run_to_end(
            Pipeline("calm", [calm]), query(source.stream), checkpoint / "calm", outputMode=mode
        )
        pipeline = Pipeline("disturbed", [disturbed], watch=killer.watch)
        for killer.at in [("prepared", 1), ("decided", 2), ("settled", 3)]:
            assert killer.run(
                pipeline, query(source.stream), checkpoint / "disturbed", outputMode=mode
            )
        assert not killer.run(
            pipeline, query(source.stream), checkpoint / "disturbed", outputMode=mode
        )
    finally:
        source.spark.conf.unset(_STORE)
    assert _rows(disturbed) == _rows(calm)
    assert _rows(calm)


def test_the_judge_of_state_sees_a_replay_that_is_not_drained(
    source: Source, checkpoint: Path, killer: Killer, monkeypatch: pytest.MonkeyPatch
) -> None:
    _timeline(source)
    pipeline = Pipeline("undrained", [Memory()], watch=killer.watch)
    killer.at = ("settled", 1)
    assert killer.run(pipeline, _windows(source.stream), checkpoint)
    monkeypatch.setattr(runner, "drain", lambda *_: None)
    with pytest.raises(StreamingQueryException):
        run_to_end(pipeline, _windows(source.stream), checkpoint)


def test_a_selection_that_takes_nothing_does_not_keep_the_state_from_advancing(
    source: Source, checkpoint: Path
) -> None:
    _timeline(source)
    nothing, windows = Memory(name="nothing", where="false"), Memory(name="windows")
    only_nothing = Memory(name="only-nothing", where="1 = 0")
    run_to_end(Pipeline("one", [only_nothing]), _windows(source.stream), checkpoint / "one")
    assert only_nothing.epochs()[:5] == [0, 1, 2, 3, 4]
    run_to_end(Pipeline("two", [nothing, windows]), _windows(source.stream), checkpoint / "two")
    # The same checkpoint goes on with all rows: its state is what it would have been.
    run_to_end(Pipeline("calm", [calm := Memory()]), _windows(source.stream), checkpoint / "calm")
    assert _rows(windows) == _rows(calm) != []


def test_rows_that_a_target_lost_after_the_decision_are_written_again(
    source: Source, checkpoint: Path, killer: Killer
) -> None:
    source.add_numbers(epochs=3)
    safe, leaky = Memory(name="safe"), Memory(name="leaky")
    pipeline = Pipeline("lossy", [safe, leaky], watch=killer.watch)
    killer.at = ("decided", 1)
    assert killer.run(pipeline, source.stream, checkpoint)
    leaky._reference.store()._prepared.clear()
    assert not killer.run(pipeline, source.stream, checkpoint)
    assert ids(safe) == ids(leaky) == source.ids
