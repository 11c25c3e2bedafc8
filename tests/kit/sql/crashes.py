"""The driver dies at its first call, at its second, at its third … and the next one finishes.

A module of tests for each database imports these, beside its own fixture `place`. The judge objects
to code that is broken on purpose.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from epochal.errors import Refused
from epochal.kit.sql.ledger import Ledger
from epochal.kit.sql.staged import StagedSqlCommitter
from epochal.logs import MemoryLog
from epochal.testing.crash import Breach, Setting, crash_at_every_call


def epochs() -> list:
    def rows(*ids: int) -> pa.RecordBatch:
        return pa.record_batch({"id": pa.array(ids, pa.int64()), "name": [f"n{i}" for i in ids]})

    return [[[rows(1, 2)], [rows(3)]]]


def settings_at(place, key: str = "", **options: Any) -> Callable[[], Setting]:
    """A table and a log of its own for every run."""
    numbers = itertools.count(1)

    def fresh() -> Setting:
        table = f"crash{next(numbers)}"
        place.sql(f"CREATE TABLE {place.schema}.{table} (id bigint {key}, name text)")
        sink = place.sink(table, pool_min=0, **options)
        log = MemoryLog()
        return Setting(
            log=lambda: log,
            sinks=lambda: [sink],
            epochs=epochs(),
            schema=epochs()[0][0][0].schema,
            visible=lambda name: [{"id": key, "name": name} for key, name in place.rows(table)],
            leftovers=place.leftovers,
        )

    return fresh


@pytest.mark.parametrize("strategy", ["staged", "prepared"])
def test_a_crash_at_any_call_leaves_every_row_visible_once(place, strategy):
    report = crash_at_every_call(
        settings_at(place, strategy=strategy), second=False, effects_only=True
    )
    assert report.runs > 15


def test_the_judge_objects_to_a_commit_that_forgets_rows(place, monkeypatch):
    monkeypatch.setattr(StagedSqlCommitter, "take", lambda *_: [])
    with pytest.raises(Breach, match="lost 3 rows"):
        crash_at_every_call(settings_at(place), second=False, effects_only=True)


def test_a_commit_that_proves_nothing_is_found_at_the_next_start(place, monkeypatch):
    monkeypatch.setattr(Ledger, "claim_epoch", lambda *_, **__: True)
    monkeypatch.setattr(Ledger, "record_epoch", lambda *_: [])
    with pytest.raises(Refused, match="proves no epoch"):
        crash_at_every_call(settings_at(place), second=False, effects_only=True)
