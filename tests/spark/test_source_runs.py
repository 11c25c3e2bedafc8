"""The data source door over several runs of one driver, process by process and without Spark."""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StructField, StructType

from epochal.coordinator.reading import read_state
from epochal.errors import Fenced, Misconfigured, Refused
from epochal.logs import checkpoint_log
from epochal.protocol.admission import Admission, Unfinished
from epochal.protocol.records import receipt_out
from epochal.protocol.state import State
from epochal.sinks.files import Files, read_epochs
from epochal.spark.checkpoint import Checkpoint
from epochal.spark.notes import Driver
from epochal.spark.options import default_sinks
from epochal.spark.source import DecidingWriter, Message, PlannedWriter, Settings, _plan, _settings
from epochal.spark.task import prepare
from epochal.terms import EpochNumber

IDS = StructType([StructField("id", LongType())])


class Door:
    """One query's checkpoint, as Spark keeps it, and the processes that Spark starts for it."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.out = place / "out"
        self.checkpoint = place / "checkpoint"
        for folder in ("offsets", "commits"):
            (self.checkpoint / folder).mkdir(parents=True)
        (self.checkpoint / "metadata").write_text('{"id":"q"}')
        self.settings = Settings(
            driver=self.driver("first"),
            pipeline="orders",
            checkpoint=str(self.checkpoint),
            sink=Files(str(self.out), name="out"),
            log=None,
            run=None,
            unfinished=Unfinished.ASK,
        )
        self.attempts = 0
        self.plan_epoch(0)

    def driver(self, key: str) -> Driver:
        folder = self.place / key
        folder.mkdir()
        driver = Driver(key=key, folder=str(folder), registered_at=time.time() - 60)
        driver.enter()
        return driver

    def plan_epoch(self, epoch: int) -> None:
        (self.checkpoint / "offsets" / str(epoch)).write_text(f'v1\n{{}}\n{{"x":{epoch}}}')

    def finish_epoch(self, epoch: int) -> None:
        (self.checkpoint / "commits" / str(epoch)).write_text("v1\n{}")
        self.plan_epoch(epoch + 1)

    def plan(self, **changed: Any) -> PlannedWriter:
        return _plan(replace(self.settings, **changed), IDS)

    def prepare(self, planned: PlannedWriter, *ids: int) -> Message:
        self.attempts += 1
        rows = pa.record_batch([pa.array(ids, pa.int64())], names=["id"])
        receipt = prepare(planned.job, iter([rows]), partition=0, attempt=self.attempts)
        return planned._message(json.dumps(receipt_out(receipt)))

    def commit(self, message: Message, epoch: int) -> None:
        DecidingWriter(self.settings)._commit([message], EpochNumber(epoch))

    def write(self, epoch: int, *ids: int) -> None:
        self.commit(self.prepare(self.plan(), *ids), epoch)
        self.finish_epoch(epoch)

    @property
    def ids(self) -> list[int]:
        return sorted(read_epochs(str(self.out)).to_table()["id"].to_pylist())

    @property
    def prepared(self) -> list[str]:
        return [path.name for path in (self.out / "_epochal" / "prepared").iterdir()]

    @property
    def state(self) -> State:
        state = read_state(checkpoint_log(self.checkpoint))
        assert state is not None
        return state


@pytest.fixture
def door(tmp_path: Path) -> Door:
    return Door(tmp_path)


def test_a_committer_that_outlives_its_run_decides_or_is_fenced_and_never_loses_rows(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = door.prepare(door.plan(), 1, 2)
    true, again = Checkpoint.offsets, []

    def while_another_run_plans(self: Checkpoint, epoch: EpochNumber) -> Any:
        """The committer has rehearsed; its last look before it decides takes a while."""
        monkeypatch.setattr(Checkpoint, "offsets", true)
        again.append(door.plan())
        return true(self, epoch)

    monkeypatch.setattr(Checkpoint, "offsets", while_another_run_plans)
    with pytest.raises(Fenced):
        door.commit(message, 0)
    assert door.state.last is None, "its rows were aborted: they must not be decided"
    door.commit(door.prepare(again[0], 1, 2), 0)
    assert (door.ids, door.prepared) == ([1, 2], [])


def test_a_late_abort_of_a_stopped_run_leaves_the_next_one_alone(door: Door) -> None:
    old = door.prepare(door.plan(), 1)
    new = door.prepare(door.plan(), 1)
    with pytest.raises(Fenced):
        DecidingWriter(door.settings).abort([old], 0)
    door.commit(new, 0)
    assert (door.ids, door.prepared) == ([1], [])


def test_a_planner_of_the_same_run_puts_no_record_and_aborts_nothing(door: Door) -> None:
    planned = door.plan()
    door.commit(door.prepare(planned, 1), 0)
    door.finish_epoch(0)
    door.prepare(planned, 1)
    assert (door.plan().record, door.state.generation) == (3, 1)
    assert len(door.prepared) == 1, "a late copy of a task is the committer's to sweep"


def test_what_no_decision_names_is_swept_by_the_committer_after_its_record(door: Door) -> None:
    planned = door.plan()
    door.prepare(planned, 1)
    door.commit(door.prepare(planned, 1), 0)
    assert (door.ids, door.prepared) == ([1], [])


def test_a_run_that_declares_something_else_is_asked_in_the_same_process_too(door: Door) -> None:
    door.write(0, 1)
    with pytest.raises(Refused, match="belongs to the pipeline 'orders'"):
        door.plan(pipeline="other")
    with pytest.raises(Refused, match="belongs to run None"):
        door.plan(run="again")
    with pytest.raises(Refused, match=r"wrote to .*out so far and now names .*elsewhere"):
        door.plan(sink=Files(str(door.place / "elsewhere"), name="out"))
    assert door.plan().admission is Admission.FRESH
    assert door.state.generation == 1


@pytest.mark.parametrize("is_folder_gone", [False, True])
def test_a_fenced_driver_whose_notes_were_cleared_away_does_not_claim_back(
    door: Door, is_folder_gone: bool
) -> None:
    folder = Path(door.settings.driver.folder)

    def clear() -> None:
        if is_folder_gone:
            shutil.rmtree(folder)
        else:
            for note in folder.iterdir():
                note.unlink()

    door.write(0, 1)
    clear()
    door.write(1, 2)
    assert door.state.generation == 2, "the newest claim is its own: it goes on"
    clear()
    door.plan(driver=door.driver("second"))
    for _ in range(2):
        with pytest.raises(Fenced, match="the newest claim is of second"):
            door.plan()
    assert door.state.driver == "second"


def test_every_batch_keeps_all_notes_young_and_the_mark_the_oldest(door: Door) -> None:
    door.write(0, 1)
    folder = Path(door.settings.driver.folder)
    other = folder / "another checkpoint.plan"
    other.touch()
    for note in folder.iterdir():
        os.utime(note, (1, 1))
    door.write(1, 2)
    times = {note.name: note.stat().st_mtime_ns for note in folder.iterdir()}
    assert len(times) == 3
    assert min(times.values()) == times["registered"] > time.time_ns() - 60e9


def test_a_wrong_word_for_what_is_unfinished_is_told_with_the_right_ones(door: Door) -> None:
    options = {"sink": "files", "path": "x", "pipeline": "p", "checkpointlocation": "c"}
    with pytest.raises(Misconfigured, match="'Skip' is none of 'ask', 'redo', 'skip'"):
        _settings(door.settings.driver, default_sinks(), {**options, "unfinished": "Skip"})
