"""Our broker, Apache Kafka beside it, and clients of either."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from epochal.clock import SystemClock
from epochal.kafka.client import Client

TESTS = Path(__file__).resolve().parent.parent
for folder in (TESTS, TESTS / "kafka", TESTS / "broker"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from conftest_tools import MakeTopic, new_topic  # noqa: E402  found by the lines above
from servers.embedded import EmbeddedServer  # noqa: E402  the same
from servers.kafka import KafkaServer  # noqa: E402  the same


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    settings = {
        "session_timeout_min_ms": 1_000,
        "consumer_heartbeat_ms": 300,
    }
    server = EmbeddedServer(tmp_path_factory.mktemp("broker"), settings=settings)
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def apache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaServer]:
    server = KafkaServer(
        tmp_path_factory.mktemp("apache"),
        settings={
            "transaction.abort.timed.out.transaction.cleanup.interval.ms": "200",
            "group.min.session.timeout.ms": "1000",
            "group.consumer.assignment.interval.ms": "0",
            "group.consumer.min.heartbeat.interval.ms": "100",
            "group.consumer.heartbeat.interval.ms": "300",
        },
    )
    server.start()
    yield server
    server.kill()


@pytest.fixture
def client(broker: EmbeddedServer) -> Iterator[Client]:
    with Client(broker.address(), clock=SystemClock()) as client:
        yield client


@pytest.fixture
def make_topic(client: Client) -> MakeTopic:
    return lambda partitions=1, **configs: new_topic(client, partitions, **configs)
