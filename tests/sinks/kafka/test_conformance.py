"""The promises of `contract`, judged as every sink is judged."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from kafka_broker import open_transactions, read_topic

from epochal.terms import sink_tag
from epochal.testing.conformance import SinkConformance, Target
from epochal.testing.trial import OTHER_UID, UID, Trial

SECRET = "hunter2-s3cret"


class _Conformance(SinkConformance):
    options: Mapping[str, Any] = MappingProxyType({})

    @pytest.fixture(autouse=True)
    def _at(self, kafka) -> None:
        self._kafka = kafka

    def make(self, tmp_path: Path) -> Target:
        kafka = self._kafka
        topic = kafka.topic(partitions=3)
        tag = sink_tag(f"kafka:{topic}")
        return Target(
            sink=kafka.sink(topic, options={"kafka.sasl.password": SECRET}, **self.options),
            visible=lambda: [json.loads(m.value()) for m in read_topic(kafka.bootstrap, topic)],
            leftovers=lambda: open_transactions(kafka.client, tag),
            secrets=[SECRET],
            refused=(2, "x" * 4_000_000),
            unreachable=lambda: nullcontext(
                kafka.sink(topic, bootstrap="127.0.0.1:1", **self.options)
            ),
            misconfigured={"a missing topic": kafka.sink("nowhere", **self.options)},
        )

    @pytest.fixture
    def trial(self, tmp_path: Path) -> Iterator[Trial]:
        trial = Trial(self.make(tmp_path))
        yield trial
        for uid in (UID, OTHER_UID):
            trial.sweep(uid=uid)
        trial.close()

    def test_the_newest_epoch_is_proven_per_uid_and_run(self, trial: Trial) -> None:
        """As in the suite, but that a ledger which nobody wrote yet can't be told from a lost."""
        trial.commit(3, trial.prepare(3, trial.batch(1), run="backfill"), run="backfill")
        trial.commit(4, trial.prepare(4, trial.batch(2), run="backfill"), run="backfill")
        trial.commit(9, trial.prepare(9, trial.batch(3), uid=OTHER_UID), uid=OTHER_UID)
        marks = trial.committer().newest() or ()
        found = {(mark.uid, mark.epoch, mark.run) for mark in marks}
        assert found == {(UID, 4, "backfill"), (OTHER_UID, 9, None)}

    def test_of_two_attempts_of_one_task_only_the_winner_is_seen(self, trial: Trial) -> None:
        """As in the suite, but that an open transaction holds back all rows behind it."""
        loser = trial.prepare(0, trial.batch(1, 2))
        winner = trial.prepare(0, trial.batch(1, 2))
        trial.commit(0, winner)
        assert trial.ids() in ([], [1, 2])
        assert trial.handles() == {loser.handle}, "the loser is not listed (I5)"
        trial.sweep()
        assert trial.ids() == [1, 2]
        assert not trial.handles()
        assert not trial.target.leftovers()


class TestKeyed(_Conformance):
    options = MappingProxyType({"key": "id"})
