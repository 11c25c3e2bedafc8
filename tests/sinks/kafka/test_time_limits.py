"""The time for which brokers keep a transaction open, and brokers that allow little of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from kafka_broker import Broker, apache_at, some, summed
from servers.embedded import EmbeddedServer

from epochal.contract import Begin, Task
from epochal.coordinator import Environment
from epochal.errors import Misconfigured, TryAgain
from epochal.kafka.cluster import Node
from epochal.kafka.messages.describe_configs import (
    DescribeConfigsResourceResult,
    DescribeConfigsResponse,
    DescribeConfigsResult,
)
from epochal.logs import MemoryLog
from epochal.sinks.kafka import Kafka, check, committer, ledger, transaction_status
from epochal.sinks.kafka.receipts import OpenTransaction, transaction_of
from epochal.terms import Identity, Json, Limits, Receipt, sink_tag
from epochal.testing.driver import Checkpoint, Crash, Driver

ALLOWED_S = 10


def _server(kind: str, folder: Path) -> Any:
    if kind == "apache":
        return apache_at(folder, settings={"transaction.max.timeout.ms": str(1000 * ALLOWED_S)})
    return EmbeddedServer(folder, settings={"transaction_timeout_max_ms": 1000 * ALLOWED_S})


@pytest.fixture(scope="module", params=["embedded", "apache"])
def strict(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A broker that allows transactions of ten seconds."""
    server = _server(request.param, tmp_path_factory.mktemp("strict"))
    server.start()
    broker = Broker(bootstrap=server.address())
    yield broker
    broker.close()
    server.kill()


def test_every_transaction_of_the_sink_fits_what_the_brokers_allow(
    strict: Broker, tmp_path: Path
) -> None:
    """Rows, an epoch without rows, an abort, and rows that are sent again from the spool."""
    topic = strict.topic(partitions=2)
    life = strict.life(topic, key="id", spool=f"{tmp_path}/spool")
    life.committer.check(some(1).schema)
    life.write(0, some(1, 2), some(3), first=True)
    life.write(1)
    life.abort(2, life.prepare(2, some(4), first=True))
    receipts = life.prepare(2, some(5), some(6), first=True)
    life.rehearse(2, receipts)
    for receipt in receipts:
        strict.abort_open(transaction_of(receipt).transactional_id)
    life.commit(2, receipts)
    life.write(3)
    assert strict.ids(topic) == [1, 2, 3, 5, 6]
    (mark,) = life.committer.newest()
    assert mark.epoch == 3
    assert not life.committer.in_doubt()


def test_check_reports_that_the_time_is_too_short_for_a_cold_start(strict: Broker) -> None:
    found = strict.life(strict.topic()).committer.check(some(1).schema)
    (ability,) = [one for one in found if one.name == "time to decide"]
    assert not ability.granted
    assert "for 10 s (transaction.max.timeout.ms of the brokers: 10 s)" in ability.because
    assert "too short for a cold start" in ability.because


def test_a_longer_time_than_the_brokers_allow_is_refused_at_the_start(strict: Broker) -> None:
    life = strict.life(strict.topic(), transaction_timeout_s=ALLOWED_S + 1)
    with pytest.raises(Misconfigured, match="don't allow a transaction of 11 s"):
        life.committer.check(some(1).schema)


def test_the_shortest_time_of_all_brokers_counts() -> None:
    """Brokers of a cluster may differ while an administrator changes one after the other."""
    limits = {Node(1): "900000", Node(2): "8000"}
    away = TryAgain("broker 3 is not there now")

    def ask_all(asks: Any, **_: Any) -> list[Any]:
        return [_setting(limits[ask.to]) if ask.to in limits else away for ask in asks]

    client: Any = SimpleNamespace(cluster=SimpleNamespace(addresses=[1, 2, 3]), ask_all=ask_all)
    assert check.timeout_max_ms(client) == 8000


def _setting(value: str) -> DescribeConfigsResponse:
    config = DescribeConfigsResourceResult(name="transaction.max.timeout.ms", value=value)
    return DescribeConfigsResponse(results=[DescribeConfigsResult(configs=[config])])


def test_brokers_that_refuse_the_ledgers_id_are_noticed_before_the_decision(
    kafka: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = kafka.life(kafka.topic())

    def refused(*_: Any) -> None:
        raise Misconfigured("no right to this id")

    monkeypatch.setattr(ledger, "start_one", refused)
    life.begin(0)
    with pytest.raises(Misconfigured, match="no right to this id"):
        life.rehearse(0, [])


@pytest.mark.parametrize("first", [False, True], ids=["own id", "pool"])
def test_the_time_of_a_transaction_counts_from_the_first_record_of_a_task(
    kafka: Broker, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    """Workers that start cold, or other sinks that prepare before, take none of it."""
    life = kafka.life(kafka.topic(), transaction_timeout_s=20.0)
    life.write(0, some(0), first=True)
    with monkeypatch.context() as earlier:
        moved = SimpleNamespace(monotonic=lambda: time.monotonic() - 60, time=time.time)
        earlier.setattr(committer, "time", moved)
        handout = life.begin(1)
    before_s = time.monotonic()
    receipt = life.attempt(some(1), 1, handout=handout, first=first)
    deadline = life.committer.rehearse(receipt.handle.epoch, [receipt])
    assert deadline.kept_s == 20.0
    assert before_s <= deadline.at_s - 20.0 <= time.monotonic()
    assert deadline.at_s - time.monotonic() == pytest.approx(
        _left_at_broker_s(kafka, receipt), abs=10
    )
    life.commit(1, [receipt])
    assert life.committer.pinned_s < 20


def _left_at_broker_s(kafka: Broker, receipt: Receipt) -> float:
    """When the broker itself will abort a transaction."""
    (state,) = transaction_status.describe(kafka.client, [transaction_of(receipt).transactional_id])
    assert state.transaction_state == "Ongoing"
    ends_ms = state.transaction_start_time_ms + state.transaction_timeout_ms
    return ends_ms / 1000 - time.time()


@pytest.mark.parametrize(
    ("opened_ago_s", "open_s", "age_s"),
    [
        (30.0, 5.0, 30.0),  # done early, while another task was still at work
        (80.0, 5.0, 60.0),  # never older than its epoch
        (4.5, 5.0, 5.0),  # never younger than its task measured
        (-20.0, 5.0, 60.0),  # clocks of two machines that differ: the most that is possible
    ],
)
def test_a_transaction_is_as_old_as_two_clocks_can_show(
    opened_ago_s: float, open_s: float, age_s: float
) -> None:
    txn = OpenTransaction(
        transactional_id="t",
        producer_id=1,
        producer_epoch=0,
        is_v2=True,
        opened_at_s=1000.0 - opened_ago_s,
        open_s=open_s,
    )
    assert txn.age_s(1000.0, at_most_s=60.0) == age_s


class _Tampering:
    """A writer whose receipts carry a sum, as Spark's runner adds it, and maybe an older age."""

    def __init__(self, real: Any, older_s: float) -> None:
        self._real = real
        self._older_s = older_s
        self._sum = 0

    def write(self, batch: pa.RecordBatch) -> None:
        self._sum += sum(hash(value) for value in batch.column("id").to_pylist())
        self._real.write(batch)

    def prepare(self) -> Receipt:
        receipt = summed(self._real.prepare(), self._sum)
        opened_at_s = receipt.token["opened_at_s"] - self._older_s
        return replace(receipt, token={**receipt.token, "opened_at_s": opened_at_s})

    def abort(self) -> None:
        self._real.abort()


class _SlowKafka(Kafka):
    """Epoch and tasks seem to have begun earlier, as if other tasks were at work for so long."""

    def writer(self, task: Task) -> Any:
        return _Tampering(super().writer(task), OLDER_S[self.topic])

    def committer(self, identity: Identity, limits: Limits) -> Any:
        made = super().committer(identity, limits)
        begin = made.begin

        def begin_earlier(given: Begin) -> Json:
            handout = begin(given)
            made._began_s -= OLDER_S[self.topic]
            return handout

        made.begin = begin_earlier
        return made


OLDER_S: dict[str, float] = {}
EPOCHS = [
    [some(1, 2).to_batches(), some(3).to_batches()],
    [some(4).to_batches()],
]


class Runs:
    """A pipeline of two epochs with one sink, run by driver after driver."""

    def __init__(self, kafka: Broker, *, timeout_s: float) -> None:
        self.topic = kafka.topic(partitions=2)
        self.sink = _SlowKafka(
            kafka.bootstrap,
            topic=self.topic,
            key="id",
            name=self.topic,
            transaction_timeout_s=timeout_s,
        )
        self.log, self._engine = MemoryLog(), Checkpoint(["first", "second"])

    def run(self, *, older_s: float = 0.0, dies_at: str = "") -> None:
        def die(step: str, epoch: int | None) -> None:
            if step == dies_at:
                raise Crash

        OLDER_S[self.topic] = older_s
        Driver(
            log=self.log,
            sinks=[self.sink],
            engine=self._engine,
            read=lambda epoch: EPOCHS[epoch],
            epochs=2,
            schema=some(1).schema,
            limits=Limits(retry_backoff_ms=(1,), sweep_every_s=0.0),
            environment=Environment(on_step=die),
        ).run()


def test_an_epoch_that_runs_out_of_time_is_refused_before_its_decision_and_then_written_again(
    kafka: Broker,
) -> None:
    runs = Runs(kafka, timeout_s=60.0)
    with pytest.raises(TryAgain, match="too few to decide"):
        runs.run(older_s=59.0)
    assert kafka.ids(runs.topic) == []
    assert not kafka.open_transactions(sink_tag(runs.topic))
    runs.run()
    assert kafka.ids(runs.topic) == [1, 2, 3, 4]


def test_an_epoch_that_timed_out_after_its_decision_is_written_again_when_it_is_replayed(
    kafka: Broker,
) -> None:
    """The driver dies right after the decision and comes back when the broker has given up."""
    runs = Runs(kafka, timeout_s=60.0)
    with pytest.raises(Crash):
        runs.run(dies_at="decided")
    assert kafka.quick_ids(runs.topic) == []
    for name in kafka.open_transactions(sink_tag(runs.topic)):
        kafka.abort_open(name)
    runs.run()
    assert kafka.ids(runs.topic) == [1, 2, 3, 4]
    assert not kafka.open_transactions(sink_tag(runs.topic))


def test_an_epoch_of_which_a_part_was_lost_is_completed_when_it_is_replayed(
    kafka: Broker,
) -> None:
    """What was committed before is not asked to be open, and is not written again."""
    runs = Runs(kafka, timeout_s=60.0)
    with pytest.raises(Crash):
        runs.run(dies_at="decided")
    one, _ = kafka.open_transactions(sink_tag(runs.topic))
    kafka.abort_open(one)
    runs.run()
    assert kafka.ids(runs.topic) == [1, 2, 3, 4]
    assert not kafka.open_transactions(sink_tag(runs.topic))


def test_a_replay_that_runs_out_of_time_is_refused_before_it_is_recorded(kafka: Broker) -> None:
    runs = Runs(kafka, timeout_s=60.0)
    with pytest.raises(Crash):
        runs.run(dies_at="decided")
    for name in kafka.open_transactions(sink_tag(runs.topic)):
        kafka.abort_open(name)
    with pytest.raises(TryAgain, match="too few to decide"):
        runs.run(older_s=59.0)
    assert kafka.ids(runs.topic) == []
    runs.run()
    assert kafka.ids(runs.topic) == [1, 2, 3, 4]


def test_what_a_killed_check_leaves_open_is_ended_by_the_broker_within_seconds(
    kafka: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a driver that has not claimed nobody else knows the uid."""
    life = kafka.life(kafka.topic())
    with monkeypatch.context() as patched:
        patched.setattr(check, "end_transactions", lambda *_, **__: [])
        life.committer.check(some(1).schema)
    (name,) = [one for one in kafka.open_transactions() if one.endswith("-check")]
    (left,) = transaction_status.describe(kafka.client, [name])
    assert left.transaction_timeout_ms <= 10_000
    kafka.abort_open(name)
