"""Brokers that die, hang, and hand their work over to others, in the midst of an epoch."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from kafka_broker import APACHE_SETTINGS, Broker, server_at, some
from servers.kafka import KafkaCluster

from epochal.errors import EpochalError, Misconfigured, OutcomeUnknown, TryAgain
from epochal.kafka.client import DEFAULT_PATIENCE, Patience
from epochal.kafka.cluster import Coordinator
from epochal.kafka.codes import Code
from epochal.kafka.connection import Pending
from epochal.kafka.messages.describe_configs import DescribeConfigsResponse
from epochal.kafka.messages.metadata import MetadataResponse
from epochal.kafka.messages.produce import ProduceResponse
from epochal.kafka.messages.txn_offset_commit import TxnOffsetCommitResponse
from epochal.terms import Proof

_TOPIC = 2
"""The kind of resource in DescribeConfigs."""


@pytest.fixture(scope="module")
def mortal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Broker]]:
    """A broker that may be killed."""
    server = server_at(tmp_path_factory.mktemp("mortal"))
    server.start()
    kafka = Broker(bootstrap=server.address())
    yield server, kafka
    kafka.close()
    server.kill()


def test_a_broker_that_dies_while_rows_are_prepared_keeps_them(mortal) -> None:
    server, kafka = mortal
    topic = kafka.topic(partitions=2)
    life = kafka.life(topic, key="id")
    receipts = life.prepare(0, some(*range(100)), some(*range(100, 150)))
    server.kill()
    server.start()
    life.rehearse(0, receipts)
    server.kill()
    server.start()
    life.commit(0, receipts)
    assert kafka.ids(topic) == list(range(150))
    kafka.keep(life.fresh()).commit(0, receipts)
    assert kafka.ids(topic) == list(range(150))
    assert not life.committer.in_doubt()


def test_a_broker_that_dies_while_rows_are_sent_gets_each_once(mortal) -> None:
    server, kafka = mortal
    topic = kafka.topic(partitions=2)
    life = kafka.life(topic, key="id", batch_bytes=20_000)
    rows = pa.table({"id": range(30_000), "name": ["x" * 50] * 30_000})
    writer = life.writer(rows, 0, handout=life.begin(0))
    batches = rows.to_batches(max_chunksize=1_000)
    for number, batch in enumerate(batches):
        if number == len(batches) // 2:
            server.kill()
            server.start()
        writer.write(batch)
    receipts = [writer.prepare()]
    life.rehearse(0, receipts)
    life.commit(0, receipts)
    assert kafka.ids(topic) == list(range(30_000))


def test_an_end_that_goes_unanswered_is_asked_again_and_stands_once(mortal) -> None:
    """The broker stands still with the request in its hands, longer than the driver waits."""
    server, kafka = mortal
    topic = kafka.topic()
    life = kafka.life(topic)
    receipts = life.prepare(0, some(1, 2))
    life.rehearse(0, receipts)
    hurried = kafka.sink(topic, options={"request.timeout.ms": "600"})
    driver = kafka.keep(life.fresh(sink=hurried))
    assert driver.outcome(receipts[0]) is Proof.UNKNOWN, "a read is repeated until it is answered"
    server.pause()
    threading.Timer(1.5, server.resume).start()
    driver.commit(0, receipts)
    assert kafka.ids(topic) == [1, 2]
    assert life.outcome(receipts[0]) is Proof.COMMITTED


def test_a_broker_that_is_away_for_long_leaves_the_epoch_undecided_not_lost(mortal) -> None:
    server, kafka = mortal
    topic = kafka.topic()
    life = kafka.life(topic)
    receipts = life.prepare(0, some(1))
    hurried = kafka.keep(life.fresh())
    hurried.committer._client.patience = Patience(total_s=1.0)
    server.kill()
    try:
        with pytest.raises((OutcomeUnknown, TryAgain)):
            hurried.commit(0, receipts)
    finally:
        server.start()
    life.commit(0, receipts)
    assert kafka.ids(topic) == [1]


def _topic_parts(answer: Any) -> list[Any]:
    """The parts of an answer that say whether the broker knows the topic."""
    if isinstance(answer, MetadataResponse):
        return answer.topics
    if isinstance(answer, DescribeConfigsResponse):
        return [one for one in answer.results if one.resource_type == _TOPIC]
    if isinstance(answer, ProduceResponse):
        return answer.responses[0].partition_responses
    return answer.topics[0].partitions


@pytest.mark.parametrize(
    "kind", [MetadataResponse, DescribeConfigsResponse, ProduceResponse, TxnOffsetCommitResponse]
)
def test_a_topic_that_some_brokers_do_not_know_yet_is_asked_for_again(
    kafka: Broker, monkeypatch: pytest.MonkeyPatch, kind: type
) -> None:
    """Two of three answers of one kind come from a broker that is behind, in driver and task."""
    topic = kafka.topic(partitions=1, max_message_bytes="20000")
    honest, numbers = Pending.result, itertools.count()

    def result(self: Any) -> Any:
        answer = honest(self)
        parts = _topic_parts(answer) if isinstance(answer, kind) else []
        if parts and next(numbers) % 3 < 2:
            parts[0].error_code = Code.UNKNOWN_TOPIC_OR_PARTITION
        return answer

    with monkeypatch.context() as behind:
        behind.setattr(Pending, "result", result)
        life = kafka.life(topic, key="id")
        life.committer.check(some(1).schema)
        receipts = life.write(0, some(*range(20)))
        assert life.begin(1)["batch_bytes_max"] == 20_000
        kafka.add_partitions(topic, 4)
        life.committer._limits_read_s = float("-inf")
        receipts = life.write(1, some(*range(20, 60)))
    assert next(numbers) > 2, "no answer was changed"
    assert kafka.ids(topic) == list(range(60))
    assert {life.outcome(one) for one in receipts} == {Proof.COMMITTED}


def test_a_topic_that_does_not_exist_is_reported_within_seconds(kafka: Broker) -> None:
    started_s = time.monotonic()
    with pytest.raises(Misconfigured, match="there is no topic 'never-made'") as caught:
        kafka.life("never-made").committer.check(some(1).schema)
    assert "create it" in caught.value.hint
    assert 1 < time.monotonic() - started_s < DEFAULT_PATIENCE.total_s / 2


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[KafkaCluster, Broker]]:
    """Three brokers of Apache Kafka on loopback, whichever serves the other tests."""
    running = KafkaCluster(tmp_path_factory.mktemp("cluster"), settings=APACHE_SETTINGS)
    running.start()
    kafka = Broker(bootstrap=running.address())
    yield running, kafka
    kafka.close()
    running.kill()


def replicated_topic(kafka: Broker) -> str:
    """Made as soon as all three brokers have found each other."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return kafka.topic(partitions=3, replicas=3, min_insync_replicas="2")
        except (AssertionError, EpochalError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.3)


def test_a_topic_can_be_written_the_moment_it_is_created(cluster) -> None:
    """By drivers and tasks that connect anew, each to whichever broker answers first."""
    _, kafka = cluster
    for number in range(5):
        topic = replicated_topic(kafka)
        life = kafka.life(topic, key="id")
        life.committer.check(some(1).schema)
        life.write(0, some(number), some(number + 10))
        assert kafka.quick_ids(topic) == [number, number + 10]


def test_leaders_and_coordinators_that_move_lose_and_repeat_nothing(cluster) -> None:
    """
    Between prepare and commit the coordinator's broker is killed; while rows are sent, a leader's.
    """
    running, kafka = cluster
    topic = replicated_topic(kafka)
    life = kafka.life(topic, key="id")
    life.write(0, some(*range(50)), some(*range(50, 100)), first=True)
    receipts = life.prepare(1, some(*range(100, 150)), some(*range(150, 200)), first=True)
    life.rehearse(1, receipts)
    name = str(receipts[0].token["transactional_id"])
    doomed = kafka.client.coordinator(Coordinator(name))
    running.brokers[doomed].kill()
    _patiently(lambda: life.commit(1, receipts))
    running.brokers[doomed].start()
    assert _patiently(lambda: kafka.quick_ids(topic)) == list(range(200))

    rows = pa.table({"id": range(200, 8_200), "name": ["x" * 100] * 8_000})
    writer = life.writer(rows, 2, handout=_patiently(lambda: life.begin(2)))
    batches = rows.to_batches(max_chunksize=500)
    leader = kafka.client.topic(topic).leaders[0]
    for number, batch in enumerate(batches):
        if number == len(batches) // 2:
            running.brokers[leader].kill()
        writer.write(batch)
    won = [writer.prepare()]
    life.rehearse(2, won)
    _patiently(lambda: life.commit(2, won))
    running.brokers[leader].start()
    assert _patiently(lambda: kafka.quick_ids(topic)) == list(range(8_200))
    assert not _patiently(life.committer.in_doubt)


def _patiently(ask: Any) -> Any:
    """As a driver does: whatever may be asked again is asked again, for a while."""
    deadline = time.monotonic() + 90
    while True:
        try:
            return ask()
        except (OutcomeUnknown, TryAgain):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
