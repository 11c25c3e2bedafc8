"""The driver dies at its first call, at its second, at its third … and the next one finishes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from sinks.delta.conftest import ORDERS
from sinks.delta.delta_stage import leftovers, made, rows

from epochal.errors import Refused
from epochal.logs import MemoryLog
from epochal.sinks.delta import Delta
from epochal.sinks.delta.committer import DeltaCommitter
from epochal.sinks.delta.ledger import Uids
from epochal.testing.crash import Breach, Setting, crash_at_every_call

CASES: list[dict[str, Any]] = [{}, {"mode": "merge", "keys": ["id"]}]


def epochs() -> list:
    def batch(*ids: int) -> pa.RecordBatch:
        return pa.record_batch({"id": list(ids), "name": [f"n{i}" for i in ids]}, schema=ORDERS)

    return [[[batch(1, 2)], [batch(3)]]]


def settings_in(tmp_path_factory, options: dict[str, Any]) -> Callable[[], Setting]:
    """A table and a log of its own for every run."""

    def fresh() -> Setting:
        folder = tmp_path_factory.mktemp("crash") / "table"
        made(folder, ORDERS)
        log = MemoryLog()
        return Setting(
            log=lambda: log,
            sinks=lambda: [Delta(folder, **options)],
            epochs=epochs(),
            schema=ORDERS,
            visible=lambda _: rows(folder),
            leftovers=lambda: leftovers(folder),
        )

    return fresh


@pytest.mark.parametrize("options", CASES, ids=str)
def test_a_crash_at_any_call_leaves_every_row_visible_once(tmp_path_factory, options):
    report = crash_at_every_call(
        settings_in(tmp_path_factory, options), second=False, effects_only=True
    )
    assert report.runs > 15


def test_the_judge_objects_to_a_commit_that_forgets_rows(tmp_path_factory, monkeypatch):
    monkeypatch.setattr("epochal.sinks.delta.committer.files_of", lambda _: ())
    with pytest.raises(Breach, match="lost 3 rows"):
        crash_at_every_call(settings_in(tmp_path_factory, {}), second=False, effects_only=True)


def test_the_judge_objects_to_an_abort_that_leaves_files(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(DeltaCommitter, "abort", lambda *_: None)
    with pytest.raises(Breach, match="left behind"):
        crash_at_every_call(settings_in(tmp_path_factory, {}), second=False, effects_only=True)


def test_a_commit_that_proves_nothing_is_found_at_the_next_start(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(Uids, "to_write", lambda *_: {})
    with pytest.raises(Refused, match="proves no epoch"):
        crash_at_every_call(settings_in(tmp_path_factory, {}), second=False, effects_only=True)
