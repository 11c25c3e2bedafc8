"""Identity of a pipeline on Spark: taking over, leaving, moving, copying, resetting."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from spark_stage import Killer, Source, copy_folder, ids, run_to_end, wait_for

from epochal.errors import Fenced, Misconfigured, Refused
from epochal.sinks.files import Files, read_epochs
from epochal.sinks.memory import Memory
from epochal.sinks.memory.sink import MemoryCommitter
from epochal.spark import active_runs
from epochal.spark.pipeline import Pipeline
from epochal.spark.query_options import StartOptions


class Plain:
    """What other code does with foreachBatch: at least once, to nowhere in particular."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.dies_at: int | None = None

    def __call__(self, batch: Any, epoch: int) -> None:
        self.ids += [row.id for row in batch.collect()]
        if epoch == self.dies_at:
            raise RuntimeError("killed")

    def run(self, source: Source, checkpoint: Path) -> None:
        writer = source.stream.writeStream.foreachBatch(self).trigger(availableNow=True)
        writer.option("checkpointLocation", str(checkpoint)).start().awaitTermination()


@pytest.mark.compat
def test_a_checkpoint_of_plain_foreach_batch_is_taken_over_and_left_again(
    source: Source, checkpoint: Path
) -> None:
    before, sink, after = Plain(), Memory(), Plain()
    source.add_numbers(epochs=2)
    before.run(source, checkpoint)
    source.add_numbers(epochs=2)
    run_to_end(Pipeline("guest", [sink]), source.stream, checkpoint)
    source.add_numbers(epochs=1)
    after.run(source, checkpoint)
    assert sink.epochs() == [2, 3]
    assert [*sorted(before.ids), *ids(sink), *sorted(after.ids)] == source.ids


def test_going_on_after_other_code_ran_needs_adopt(source: Source, checkpoint: Path) -> None:
    sink = Memory()
    pipeline = Pipeline("guest", [sink])
    source.add_numbers(epochs=1)
    run_to_end(pipeline, source.stream, checkpoint)
    source.add_numbers(epochs=2)
    Plain().run(source, checkpoint)
    source.add_numbers(epochs=1)
    with pytest.raises(Refused, match="other code ran the epochs between"):
        run_to_end(pipeline, source.stream, checkpoint)
    pipeline.adopt(checkpoint)
    run_to_end(pipeline, source.stream, checkpoint)
    assert sink.epochs() == [0, 3]


@pytest.mark.parametrize(("choice", "epochs"), [("redo", [1, 2]), ("skip", [2])])
def test_a_batch_that_other_code_left_unfinished_is_asked_about(
    source: Source, checkpoint: Path, choice: str, epochs: list[int]
) -> None:
    source.add_numbers(epochs=2)
    plain = Plain()
    plain.dies_at = 1
    with pytest.raises(Exception, match="killed"):
        plain.run(source, checkpoint)
    source.add_numbers(epochs=1)
    sink = Memory()
    with pytest.raises(Refused, match="batch 1 was planned by code other than epochal"):
        run_to_end(Pipeline("guest", [sink]), source.stream, checkpoint)
    run_to_end(Pipeline("guest", [sink]), source.stream, checkpoint, unfinished=choice)
    assert sink.epochs() == epochs


@pytest.fixture
def used(source: Source, checkpoint: Path) -> Memory:
    """A checkpoint on which the pipeline `orders` has run two epochs."""
    sink = Memory()
    source.add_numbers(epochs=2)
    run_to_end(Pipeline("orders", [sink]), source.stream, checkpoint)
    source.add_numbers(epochs=1)
    return sink


def test_a_copied_checkpoint_is_refused_until_it_is_forked(
    source: Source, checkpoint: Path, used: Memory
) -> None:
    copy = copy_folder(checkpoint, checkpoint.with_name("copy"))
    copied = Pipeline("orders", [used])
    with pytest.raises(Refused, match="was copied or moved"):
        run_to_end(copied, source.stream, copy)
    copied.fork(copy)
    run_to_end(copied, source.stream, copy)
    run_to_end(Pipeline("orders", [used]), source.stream, checkpoint)
    assert used.epochs() == [0, 1, 2, 2], "two pipelines, each with its own epoch 2"


def test_a_checkpoint_is_the_same_one_through_a_symbolic_link(
    source: Source, checkpoint: Path, used: Memory
) -> None:
    link = checkpoint.with_name("link")
    link.symlink_to(checkpoint)
    run_to_end(Pipeline("orders", [used]), source.stream, link)
    source.add_numbers(epochs=1)
    run_to_end(Pipeline("orders", [used]), source.stream, f"file:{checkpoint}/x/../")
    assert ids(used) == source.ids


def test_a_moved_checkpoint_goes_on_once_it_is_adopted(
    source: Source, checkpoint: Path, used: Memory
) -> None:
    moved = Path(shutil.move(checkpoint, checkpoint.with_name("moved")))
    pipeline = Pipeline("orders", [used])
    with pytest.raises(Refused, match="epochal adopt"):
        run_to_end(pipeline, source.stream, moved)
    pipeline.adopt(moved)
    run_to_end(pipeline, source.stream, moved)
    assert ids(used) == source.ids


def test_a_checkpoint_of_another_pipeline_is_refused(
    source: Source, checkpoint: Path, used: Memory
) -> None:
    with pytest.raises(Refused, match="belongs to the pipeline 'orders'"):
        run_to_end(Pipeline("invoices", [used]), source.stream, checkpoint)


def test_a_pipeline_goes_on_under_another_name_once_it_is_renamed(
    source: Source, checkpoint: Path, used: Memory
) -> None:
    renamed = Pipeline("sales", [used])
    renamed.rename(checkpoint)
    run_to_end(renamed, source.stream, checkpoint)
    assert ids(used) == source.ids


def test_a_checkpoint_that_was_reset_is_refused_whether_or_not_the_log_is_left(
    source: Source, checkpoint: Path, used: Memory
) -> None:
    for folder in ("offsets", "commits", "sources", "metadata"):
        path = checkpoint / folder
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(Refused, match="reset or replaced"):
        run_to_end(Pipeline("orders", [used]), source.stream, checkpoint)
    shutil.rmtree(checkpoint)
    with pytest.raises(Refused, match="under another uid"):
        run_to_end(Pipeline("orders", [used]), source.stream, checkpoint)
    run_to_end(Pipeline("orders", [used]), source.stream, checkpoint.with_name("new"), run="again")
    assert ids(used) == sorted([*source.ids, *range(20)])


def test_a_restored_checkpoint_is_refused(source: Source, checkpoint: Path, used: Memory) -> None:
    backup = copy_folder(checkpoint, checkpoint.with_name("backup"))
    source.add_numbers(epochs=2)
    run_to_end(Pipeline("orders", [used]), source.stream, checkpoint)
    copy_folder(backup, checkpoint)
    with pytest.raises(Refused, match="the log is older than the target"):
        run_to_end(Pipeline("orders", [used]), source.stream, checkpoint)


def test_a_restored_checkpoint_under_a_newer_log_is_refused(
    source: Source, checkpoint: Path, used: Memory
) -> None:
    backup = copy_folder(checkpoint, checkpoint.with_name("backup"))
    source.add_numbers(epochs=2)
    run_to_end(Pipeline("orders", [used]), source.stream, checkpoint)
    for folder in ("offsets", "commits", "sources"):
        copy_folder(backup / folder, checkpoint / folder)
    with pytest.raises(Refused, match="the checkpoint is older than the log"):
        run_to_end(Pipeline("orders", [used]), source.stream, checkpoint)


def test_a_replayed_epoch_with_other_files_is_refused(
    source: Source, checkpoint: Path, killer: Killer
) -> None:
    source.add_numbers(epochs=1)
    sink = Memory()
    pipeline = Pipeline("orders", [sink], watch=killer.watch)
    killer.at = ("settled", 0)
    assert killer.run(pipeline, source.stream, checkpoint)
    entry = checkpoint / "sources" / "0" / "0"
    entry.write_text(entry.read_text().replace("0000.json", "9999.json"))
    (checkpoint / "sources" / "0" / ".0.crc").unlink(missing_ok=True)
    (source.folder / "9999.json").write_text('{"id": 99, "v": "other"}')
    with pytest.raises(Exception, match="decided for other offsets"):
        run_to_end(pipeline, source.stream, checkpoint)
    assert isinstance(pipeline.error, Refused)
    assert ids(sink) == source.ids


@pytest.mark.compat
def test_a_sink_may_be_added_removed_and_retargeted(
    source: Source, checkpoint: Path, used: Memory, tmp_path: Path
) -> None:
    here, there = (Files(str(tmp_path / name), name="files") for name in ("here", "there"))
    run_to_end(Pipeline("orders", [used, here]), source.stream, checkpoint)
    source.add_numbers(epochs=1)
    with pytest.raises(Misconfigured, match="retarget='files' is one string"):
        run_to_end(Pipeline("orders", [used, there]), source.stream, checkpoint, retarget="files")
    with pytest.raises(Refused, match="now names"):
        run_to_end(Pipeline("orders", [used, there]), source.stream, checkpoint)
    run_to_end(Pipeline("orders", [used, there]), source.stream, checkpoint, retarget=["files"])
    source.add_numbers(epochs=1)
    run_to_end(Pipeline("orders", [used]), source.stream, checkpoint)
    assert ids(used) == source.ids
    assert _file_ids(here) == list(range(20, 30))
    assert _file_ids(there) == list(range(30, 40))


def _file_ids(sink: Files) -> list[int]:
    return sorted(read_epochs(sink.path).to_table()["id"].to_pylist())


def test_a_sink_that_still_owes_a_decided_epoch_can_not_be_removed(
    source: Source, checkpoint: Path, killer: Killer
) -> None:
    source.add_numbers(epochs=1)
    a, b = Memory(name="a"), Memory(name="b")
    killer.at = ("decided", 0)
    assert killer.run(Pipeline("orders", [a, b], watch=killer.watch), source.stream, checkpoint)
    with pytest.raises(Refused, match="not yet carried out on"):
        run_to_end(Pipeline("orders", [a]), source.stream, checkpoint)
    run_to_end(Pipeline("orders", [a, b]), source.stream, checkpoint)
    run_to_end(Pipeline("orders", [a]), source.stream, checkpoint)
    assert ids(a) == ids(b) == source.ids


@pytest.mark.compat
def test_a_batch_is_loaded_once_per_key(source: Source, checkpoint: Path, used: Memory) -> None:
    spark = source.spark
    pipeline = Pipeline("orders", [used])
    january = spark.range(1000, 1005).selectExpr("id", "'jan' AS v")
    first = pipeline.write(january, run="backfill/2026 01", checkpoint=checkpoint)
    again = pipeline.write(january, run="backfill/2026 01", checkpoint=checkpoint)
    other = pipeline.write(january, run="backfill/2026-01", checkpoint=checkpoint)
    assert (first.is_repeat, again.is_repeat, other.is_repeat) == (False, True, False)
    assert first.rows == again.rows == {"memory": 5}
    assert "was done already" in str(again)
    assert ids(used).count(1003) == 2
    run_to_end(pipeline, source.stream, checkpoint)
    assert [n for n in ids(used) if n < 1000] == source.ids
    with pytest.raises(Misconfigured, match="is a stream"):
        pipeline.write(source.stream, run="x", checkpoint=checkpoint)


def test_a_load_that_died_after_its_decision_is_finished_by_the_next_call(
    source: Source, checkpoint: Path, killer: Killer
) -> None:
    a, b = Memory(name="a"), Memory(name="b")
    pipeline = Pipeline("orders", [a, b], watch=killer.watch)
    df = source.spark.range(5)
    killer.at = ("decided", 0)
    with pytest.raises(Exception, match="decided"):
        pipeline.write(df, run="jan", checkpoint=checkpoint)
    killer.is_dead = False
    assert ids(a) == ids(b) == []
    assert pipeline.write(df, run="jan", checkpoint=checkpoint).is_repeat
    assert ids(a) == ids(b) == [0, 1, 2, 3, 4]


def test_a_start_takes_over_from_a_driver_that_goes_on_while_it_checks_its_targets(
    source: Source, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = Memory()
    query = Pipeline("orders", [sink]).start(source.stream, checkpoint)
    # Another process knows nothing of this one's starts: it only sees the log.
    mine = active_runs._runs.pop(str(checkpoint))
    check = MemoryCommitter.check

    def check_slowly(committer: MemoryCommitter, schema: Any) -> Any:
        if not source.rows:
            source.add_numbers(epochs=3)
            wait_for(lambda: ids(sink) == source.ids)
        return check(committer, schema)

    monkeypatch.setattr(MemoryCommitter, "check", check_slowly)
    second = Pipeline("orders", [sink])
    starter = second._starter
    claimed = starter.run(starter.query(source.spark, None), checkpoint, StartOptions())
    assert claimed.coordinator.state.generation == 2
    query.stop()
    mine.end()
    claimed.end()
    monkeypatch.undo()
    source.add_numbers(epochs=1)
    run_to_end(second, source.stream, checkpoint)
    assert ids(sink) == source.ids


def test_a_second_driver_fences_the_first(source: Source, checkpoint: Path) -> None:
    source.add_numbers(epochs=1)
    sink = Memory()
    first, second = Pipeline("orders", [sink]), Pipeline("orders", [sink])
    query = first.start(source.stream, checkpoint, processingTime="0 seconds")
    query.processAllAvailable()
    # Another process knows nothing of this one's starts: it only sees the log.
    mine = active_runs._runs.pop(str(checkpoint))
    starter = second._starter
    claimed = starter.run(starter.query(source.spark, None), checkpoint, StartOptions())
    source.add_numbers(epochs=1)
    with pytest.raises(Exception, match="another driver has taken this pipeline over"):
        query.processAllAvailable()
    query.stop()
    mine.end()
    assert isinstance(first.error, Fenced)
    assert sink.epochs() == [0]
    claimed.end()
    run_to_end(second, source.stream, checkpoint)
    assert ids(sink) == source.ids
