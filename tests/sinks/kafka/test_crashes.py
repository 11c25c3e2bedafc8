"""The driver dies at its first call, at its second, at its third … and the next one finishes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from kafka_broker import Broker, open_transactions

from epochal.logs import MemoryLog
from epochal.sinks.kafka import transaction_status
from epochal.sinks.kafka.committer import KafkaCommitter
from epochal.terms import sink_tag
from epochal.testing.crash import Breach, Setting, crash_at_every_call


def rows(*ids: int) -> pa.RecordBatch:
    return pa.record_batch({"id": pa.array(ids, pa.int64()), "name": [f"n{i}" for i in ids]})


EPOCHS = [[[rows(1, 2)], [rows(3)]], [[rows(4)], [rows(5)]]]


def settings_at(kafka: Broker, epochs: Any, **options: Any) -> Callable[[], Setting]:
    """A topic and a log of its own for every run."""
    numbers = itertools.count(1)

    def fresh() -> Setting:
        topic = kafka.topic(partitions=2)
        sink = kafka.sink(topic, key="id", name=f"crash{next(numbers)}-{topic}", **options)
        log = MemoryLog()
        return Setting(
            log=lambda: log,
            sinks=lambda: [sink],
            epochs=epochs,
            schema=epochs[0][0][0].schema,
            visible=lambda name: kafka.quick_rows(topic),
            leftovers=lambda: open_transactions(kafka.client, sink_tag(sink.name)),
        )

    return fresh


def test_a_crash_at_any_call_leaves_every_row_visible_once(kafka: Broker) -> None:
    """Two epochs, so that the second one works with the pool; the first task runs twice."""
    report = crash_at_every_call(settings_at(kafka, EPOCHS), second=False, effects_only=True)
    assert report.runs > 25


def test_a_crash_while_recovering_from_a_crash_changes_nothing(kafka: Broker) -> None:
    report = crash_at_every_call(settings_at(kafka, EPOCHS[:1]), second_every=11, effects_only=True)
    assert report.runs > 60


def test_the_judge_objects_to_a_commit_that_ends_nothing(
    kafka: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KafkaCommitter, "_end", lambda *_: [])
    with pytest.raises(Breach, match="lost 3 rows"):
        crash_at_every_call(settings_at(kafka, EPOCHS[:1]), second=False, effects_only=True)


def test_the_judge_objects_to_orphans_that_nobody_lists(
    kafka: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transaction_status, "_open_ids", lambda *_: [])
    with pytest.raises(Breach):
        crash_at_every_call(settings_at(kafka, EPOCHS[:1]), second=False, effects_only=True)
