"""The data source door: one sink, named by options, in processes that share only the log."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from spark_stage import Source, make_dying

from epochal.contract import Limits
from epochal.coordinator import Coordinator
from epochal.errors import Misconfigured
from epochal.logs import checkpoint_log
from epochal.protocol.admission import Start
from epochal.protocol.records import decode
from epochal.protocol.state import State
from epochal.sinks.files import Files, read_epochs
from epochal.spark import register
from epochal.spark.checkpoint import open_checkpoint
from epochal.spark.options import from_options
from epochal.spark.versions import DATA_SOURCE_OLDEST, require_supported
from epochal.telemetry.history import History, PastEpoch
from epochal.telemetry.places import history_place
from epochal.terms import Identity


def _run(source: Source, checkpoint: Path, path: Path, **options: Any) -> None:
    writer = source.stream.writeStream.format("epochal").option("pipeline", "orders")
    writer = writer.option("sink", "files").option("path", str(path)).options(**options)
    writer = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True)
    writer.start().awaitTermination()


def _ids(path: Path) -> list[int]:
    return sorted(read_epochs(str(path)).to_table()["id"].to_pylist())


def _state(checkpoint: Path) -> State:
    log = checkpoint_log(checkpoint)
    return decode(log.read(log.numbers()[-1]) or b"", "newest").state


def _history(checkpoint: Path, *, epochs_awaited: int) -> list[PastEpoch]:
    """What the committer's process writes right after each epoch, on a thread of its own."""
    history = History(place=history_place(checkpoint_log(checkpoint)))
    deadline_s = time.monotonic() + 120
    while len(told := list(history.all())) < epochs_awaited and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return told


def _left_behind(checkpoint: Path, path: Path) -> list[Any]:
    state = _state(checkpoint)
    sink = Files(str(path))
    who = Identity(pipeline="orders", uid=state.uid, sink=sink.name, generation=state.generation)
    return list(sink.committer(who, Limits()).in_doubt())


def test_each_epoch_is_written_once_also_over_restarts_and_empty_ones(
    source: Source, checkpoint: Path, tmp_path: Path
) -> None:
    register(source.spark)
    out = tmp_path / "out"
    source.add_numbers(epochs=2)
    source.add([])
    _run(source, checkpoint, out)
    source.add_numbers(epochs=1)
    _run(source, checkpoint, out, format="jsonl")
    assert _ids(out) == source.ids
    state = _state(checkpoint)
    assert state.generation == 2, "one claim for each run that declares something new"
    assert (state.last.epoch, state.unsettled) == (3, None)
    told = _history(checkpoint, epochs_awaited=4)
    assert [(one.epoch, one.generation, one.outcome, one.rows) for one in told] == [
        (0, 1, "committed", 10),
        (1, 1, "committed", 10),
        (2, 1, "committed", 0),
        (3, 2, "committed", 10),
    ]
    assert all(one.seconds["preparing"] > 0 for one in told if one.rows)
    assert History(place=history_place(checkpoint_log(checkpoint))).live() is None


def test_a_driver_that_died_before_spark_took_note_drains_the_epoch_again(
    source: Source, checkpoint: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    source.add_numbers(epochs=2)
    register(source.spark)
    _run(source, checkpoint, out)
    # What a kill between our commit and Spark's own leaves behind.
    for file in (checkpoint / "commits").glob("*1*"):
        file.unlink()
    source.add_numbers(epochs=1)
    register(source.spark)
    _run(source, checkpoint, out)
    assert _ids(out) == source.ids
    assert _state(checkpoint).generation == 2, "another driver claims"


def test_a_batch_that_other_code_may_have_written_is_asked_about(
    source: Source, checkpoint: Path, tmp_path: Path
) -> None:
    def other_code(batch: Any, epoch: int) -> None:
        raise RuntimeError("killed")

    source.add_numbers(epochs=1)
    writer = source.stream.writeStream.foreachBatch(other_code).trigger(availableNow=True)
    with pytest.raises(Exception, match="killed"):
        writer.option("checkpointLocation", str(checkpoint)).start().awaitTermination()
    register(source.spark)
    with pytest.raises(Exception, match="batch 0 was planned by code other than epochal"):
        _run(source, checkpoint, tmp_path / "out")
    _run(source, checkpoint, tmp_path / "out", unfinished="redo")
    assert _ids(tmp_path / "out") == source.ids


@pytest.mark.parametrize("step", ["rehearse", "commit", "committed"])
def test_a_committer_killed_at_any_step_leaves_every_row_visible_once(
    source: Source, checkpoint: Path, tmp_path: Path, step: str
) -> None:
    out, note = tmp_path / "out", tmp_path / "die"
    register(source.spark, {"files": make_dying(note)})
    source.add_numbers(epochs=1)
    _run(source, checkpoint, out)
    note.write_text(step)
    source.add_numbers(epochs=2)
    with pytest.raises(Exception, match=r"."):
        _run(source, checkpoint, out)
    assert not note.exists(), "it was never reached"
    _run(source, checkpoint, out)
    assert _ids(out) == source.ids
    assert _left_behind(checkpoint, out) == []


def test_a_driver_that_was_fenced_does_not_claim_back(
    source: Source, checkpoint: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    source.add_numbers(epochs=1)
    register(source.spark)
    _run(source, checkpoint, out)
    _claim_as_another_driver(checkpoint, out)
    source.add_numbers(epochs=1)
    for _ in range(2):
        with pytest.raises(Exception, match="record 4 is not what this driver left there"):
            _run(source, checkpoint, out)
    assert _state(checkpoint).generation == 2
    register(source.spark)
    _run(source, checkpoint, out)
    assert _ids(out) == source.ids
    assert _state(checkpoint).generation == 3


def _claim_as_another_driver(checkpoint: Path, path: Path) -> None:
    folder, sink = open_checkpoint(checkpoint), Files(str(path))
    other = Coordinator(log=checkpoint_log(checkpoint), sinks=[sink])
    start = Start(
        pipeline="orders",
        location=folder.location,
        sinks={sink.name: sink.describe()},
        driver="another driver",
        query_id=folder.query_id,
        position=folder.position,
    )
    other.start(start)
    other.leave()


def test_an_error_in_the_options_is_told_and_nothing_is_claimed(
    source: Source, checkpoint: Path, tmp_path: Path
) -> None:
    register(source.spark)
    source.add_numbers(epochs=1)
    with pytest.raises(Exception, match=r"Files has no option 'colour' .misconfigured."):
        _run(source, checkpoint / "a", tmp_path / "out", colour="red")
    with pytest.raises(Exception, match="takes the rows as they come"):
        _run(source, checkpoint / "b", tmp_path / "out", where="id > 3")
    with pytest.raises(Exception, match="there are files"):
        _run(source, checkpoint / "c", tmp_path / "out", sink="paper")
    assert not (checkpoint / "a" / "epochal").exists()


def test_options_become_values_by_the_types_of_a_sink() -> None:
    made = from_options(
        Files,
        {"path": "/x", "max_file_bytes": "5", "partition_by": "a, b", "spark_metadata": "true"},
    )
    assert made == Files("/x", max_file_bytes=5, partition_by=("a", "b"), spark_metadata=True)
    with pytest.raises(Misconfigured, match="max_file_bytes"):
        from_options(Files, {"path": "/x", "max_file_bytes": "many"})
    with pytest.raises(Misconfigured, match="path"):
        from_options(Files, {})


@pytest.mark.parametrize("version", ["3.5.1", "4.4.0", "5.0.0.dev1"])
def test_other_sparks_are_refused_by_name(version: str) -> None:
    with pytest.raises(Misconfigured, match=f"PySpark {version} is not supported"):
        require_supported(version)
    with pytest.raises(Misconfigured, match=r"4\.1 to 4\.3"):
        require_supported("4.0.2", oldest=DATA_SOURCE_OLDEST)
