"""A broker, and clients of it, for all tests of the Kafka wire."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from epochal.clock import SystemClock
from epochal.kafka.client import Client
from epochal.kafka.cluster import Controller
from epochal.kafka.messages.create_topics import CreatableTopic, CreateTopicsRequest

TESTS = Path(__file__).resolve().parent.parent
for folder in (TESTS, TESTS / "kafka", TESTS.parent / "tools"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from servers.kafka import KafkaServer, jars, run_java  # noqa: E402  found by the lines above

JAVA = Path(__file__).resolve().parent / "java"
MakeTopic = Callable[..., str]


@pytest.fixture(scope="session")
def clients_jar() -> Path:
    (jar,) = jars().glob("kafka-clients-*.jar")
    return jar


@pytest.fixture(scope="session")
def java(clients_jar: Path) -> Callable[[str, list[str]], list[str]]:
    """Feeds lines to one of the Java programs here and returns the lines it prints."""

    def run(program: str, lines: list[str]) -> list[str]:
        return run_java(JAVA / program, stdin="\n".join(lines)).splitlines()

    return run


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaServer]:
    server = KafkaServer(tmp_path_factory.mktemp("kafka"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def client(broker: KafkaServer) -> Iterator[Client]:
    with Client(broker.address(), clock=SystemClock()) as client:
        yield client


_numbers = itertools.count()


@pytest.fixture
def make_topic(client: Client) -> MakeTopic:
    def make(partitions: int = 1) -> str:
        name = f"topic-{next(_numbers)}"
        wanted = CreatableTopic(name=name, num_partitions=partitions, replication_factor=1)
        request = CreateTopicsRequest(topics=[wanted], timeout_ms=10_000)
        (made,) = client.ask(request, Controller()).topics
        assert made.error_code == 0, made.error_message
        return name

    return make
