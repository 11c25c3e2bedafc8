"""The driver dies at its first call, at its second, at its third … and the next one finishes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa
import pytest

from epochal.errors import Refused
from epochal.logs import MemoryLog
from epochal.sinks.iceberg.committer import IcebergCommitter
from epochal.sinks.iceberg.ledger import Ledger
from epochal.sinks.iceberg.snapshot_plan import SnapshotPlanner
from epochal.testing.crash import Breach, Setting, crash_at_every_call


def batch(*ids: int) -> pa.RecordBatch:
    return pa.record_batch({"id": pa.array(ids, pa.int64()), "name": [f"n{i}" for i in ids]})


def settings(warehouse, **options: Any) -> Callable[[], Setting]:
    """A table and a log of its own for every run."""

    def fresh() -> Setting:
        name = warehouse.create()
        sink = warehouse.sink(name, **options)
        log = MemoryLog()

        def visible(_: str) -> list[Mapping[str, Any]]:
            return warehouse.rows(name)

        return Setting(
            log=lambda: log,
            sinks=lambda: [sink],
            epochs=[[[batch(1, 2), batch(3)]]],
            schema=batch().schema,
            visible=visible,
            leftovers=lambda: warehouse.leftovers(name),
        )

    return fresh


def test_a_crash_at_any_call_leaves_every_row_visible_once(warehouse):
    report = crash_at_every_call(settings(warehouse), second=False, effects_only=True)
    assert report.runs > 15


def test_the_judge_objects_to_a_commit_that_forgets_rows(warehouse, monkeypatch):
    monkeypatch.setattr(SnapshotPlanner, "_files", lambda *_: [])
    with pytest.raises(Breach, match="lost 3 rows"):
        crash_at_every_call(settings(warehouse), second=False, effects_only=True)


def test_the_judge_objects_to_losers_that_are_left(warehouse, monkeypatch):
    monkeypatch.setattr(IcebergCommitter, "_discard", lambda *_: None)
    with pytest.raises(Breach, match="left behind"):
        crash_at_every_call(settings(warehouse), second=False, effects_only=True)


def test_a_commit_that_proves_nothing_is_found_at_the_next_start(warehouse, monkeypatch):
    monkeypatch.setattr(Ledger, "written", lambda *_: {"unrelated": "property"})
    with pytest.raises((Refused, Breach)):
        crash_at_every_call(settings(warehouse), second=False, effects_only=True)
