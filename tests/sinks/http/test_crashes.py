"""The driver dies at its first call, at its second, at its third … and the next one finishes."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pyarrow as pa
import pytest
from kit.spool.spooled import left_in
from sinks.http.conftest import TOKEN
from sinks.http.left import left_at

from epochal.errors import Refused
from epochal.logs import MemoryLog
from epochal.sinks.http import Http
from epochal.sinks.http.committer import HttpCommitter
from epochal.sinks.http.idempotency_key import KeyedDelivery
from epochal.testing.crash import Breach, Setting, crash_at_every_call

_numbers = itertools.count()


def rows(*ids: int) -> pa.RecordBatch:
    return pa.record_batch({"id": pa.array(ids, pa.int64()), "name": [f"n{i}" for i in ids]})


EPOCHS = [[[rows(1, 2), rows(3)]]]


def setting(sink: Http, visible: Callable, leftovers: Callable) -> Setting:
    log = MemoryLog()
    return Setting(
        log=lambda: log,
        sinks=lambda: [sink],
        epochs=EPOCHS,
        schema=rows(1).schema,
        visible=lambda name: visible(),
        leftovers=leftovers,
    )


@pytest.fixture
def two_phase(receiver):
    def fresh() -> Setting:
        name = f"crash {next(_numbers)}"
        return setting(
            Http(receiver.url, token=TOKEN, name=name),
            lambda: receiver.rows(name),
            lambda: left_at(receiver, name),
        )

    return fresh


@pytest.fixture
def keyed(service, tmp_path):
    def fresh() -> Setting:
        spool = tmp_path / str(next(_numbers))
        service.taken.clear()
        sink = Http(service.url, mode="idempotency-key", spool=spool, retries_max=0)
        return setting(sink, service.rows, lambda: left_in(spool))

    return fresh


def test_a_crash_at_any_call_in_two_phases_leaves_every_row_visible_once(two_phase):
    assert crash_at_every_call(two_phase, second=False, effects_only=True).runs > 15


def test_a_crash_at_any_call_with_keys_leaves_every_row_taken_once(keyed):
    assert crash_at_every_call(keyed, second=False, effects_only=True).runs > 15


def test_the_judge_objects_to_an_epoch_that_is_proven_and_not_called(keyed, monkeypatch):
    monkeypatch.setattr(KeyedDelivery, "deliver", lambda *_: {})
    with pytest.raises(Breach, match="lost 3 rows"):
        crash_at_every_call(keyed, second=False, effects_only=True)


def test_the_judge_objects_to_a_commit_that_forgets_a_transaction(two_phase, monkeypatch):
    honest = HttpCommitter.commit
    monkeypatch.setattr(
        HttpCommitter, "commit", lambda self, epoch, some: honest(self, epoch, some[1:])
    )
    with pytest.raises(Breach, match="lost 3 rows"):
        crash_at_every_call(two_phase, second=False, effects_only=True)


def test_a_commit_without_its_mark_is_found_at_the_next_start(two_phase, monkeypatch):
    monkeypatch.setattr(HttpCommitter, "_mark", lambda *_: None)
    with pytest.raises(Refused, match="proves no epoch"):
        crash_at_every_call(two_phase, second=False, effects_only=True)
