"""Brokers that die, hang, and hand their work over to others, in the midst of an epoch."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from kafka_place import APACHE_SETTINGS, Place, server_at, some
from servers.kafka import KafkaCluster

from epochal.errors import EpochalError, OutcomeUnknown, TryAgain
from epochal.kafka.cluster import Coordinator
from epochal.terms import Proof


@pytest.fixture(scope="module")
def mortal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Place]]:
    """A broker that may be killed."""
    server = server_at(tmp_path_factory.mktemp("mortal"))
    server.start()
    place = Place(bootstrap=server.address())
    yield server, place
    place.close()
    server.kill()


def test_a_broker_that_dies_while_rows_are_prepared_keeps_them(mortal) -> None:
    server, place = mortal
    topic = place.topic(partitions=2)
    life = place.life(topic, key="id")
    receipts = life.prepare(0, some(*range(100)), some(*range(100, 150)))
    server.kill()
    server.start()
    life.rehearse(0, receipts)
    server.kill()
    server.start()
    life.commit(0, receipts)
    assert place.ids(topic) == list(range(150))
    place.keep(life.fresh()).commit(0, receipts)
    assert place.ids(topic) == list(range(150))
    assert not life.committer.in_doubt()


def test_a_broker_that_dies_while_rows_are_sent_gets_each_once(mortal) -> None:
    server, place = mortal
    topic = place.topic(partitions=2)
    life = place.life(topic, key="id", batch_bytes=20_000)
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
    assert place.ids(topic) == list(range(30_000))


def test_an_end_that_goes_unanswered_is_asked_again_and_stands_once(mortal) -> None:
    """The broker stands still with the request in its hands, longer than the driver waits."""
    server, place = mortal
    topic = place.topic()
    life = place.life(topic, options={"request.timeout.ms": "600"})
    receipts = life.prepare(0, some(1, 2))
    life.rehearse(0, receipts)
    server.pause()
    threading.Timer(1.5, server.resume).start()
    life.commit(0, receipts)
    assert place.ids(topic) == [1, 2]
    assert life.outcome(receipts[0]) is Proof.COMMITTED


def test_a_broker_that_is_away_for_long_leaves_the_epoch_undecided_not_lost(mortal) -> None:
    server, place = mortal
    topic = place.topic()
    life = place.life(topic, options={"request.timeout.ms": "300"})
    receipts = life.prepare(0, some(1))
    life.committer._client.patience = type(life.committer._client.patience)(total_s=1.0)
    server.kill()
    try:
        with pytest.raises((OutcomeUnknown, TryAgain)):
            life.commit(0, receipts)
    finally:
        server.start()
    life.commit(0, receipts)
    assert place.ids(topic) == [1]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[KafkaCluster, Place]]:
    """Three brokers of Apache Kafka on loopback, whichever serves the other tests."""
    running = KafkaCluster(tmp_path_factory.mktemp("cluster"), settings=APACHE_SETTINGS)
    running.start()
    place = Place(bootstrap=running.address())
    yield running, place
    place.close()
    running.kill()


def replicated_topic(place: Place) -> str:
    """Made as soon as all three brokers have found each other."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return place.topic(partitions=3, replicas=3, min_insync_replicas="2")
        except (AssertionError, EpochalError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.3)


def test_leaders_and_coordinators_that_move_lose_and_repeat_nothing(cluster) -> None:
    """
    Between prepare and commit the coordinator's broker is killed; while rows are sent, a leader's.
    """
    running, place = cluster
    topic = replicated_topic(place)
    life = place.life(topic, key="id")
    life.write(0, some(*range(50)), some(*range(50, 100)), first=True)
    receipts = life.prepare(1, some(*range(100, 150)), some(*range(150, 200)), first=True)
    life.rehearse(1, receipts)
    name = str(receipts[0].token["transactional_id"])
    doomed = place.client.coordinator(Coordinator(name))
    running.brokers[doomed].kill()
    _patiently(lambda: life.commit(1, receipts))
    running.brokers[doomed].start()
    assert _patiently(lambda: place.quick_ids(topic)) == list(range(200))

    rows = pa.table({"id": range(200, 8_200), "name": ["x" * 100] * 8_000})
    writer = life.writer(rows, 2, handout=_patiently(lambda: life.begin(2)))
    batches = rows.to_batches(max_chunksize=500)
    leader = place.client.topic(topic).leaders[0]
    for number, batch in enumerate(batches):
        if number == len(batches) // 2:
            running.brokers[leader].kill()
        writer.write(batch)
    won = [writer.prepare()]
    life.rehearse(2, won)
    _patiently(lambda: life.commit(2, won))
    running.brokers[leader].start()
    assert _patiently(lambda: place.quick_ids(topic)) == list(range(8_200))
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
