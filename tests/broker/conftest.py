"""Our broker, Apache Kafka beside it, and clients of either."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from epochal.broker.embedded import BrokerProcess
from epochal.coordinator.clock import SystemClock
from epochal.kafka.client import Client

TESTS = Path(__file__).resolve().parent.parent
for folder in (TESTS, TESTS / "kafka", TESTS / "broker"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from conftest_tools import new_topic  # noqa: E402  found by the lines above
from servers.kafka import KafkaServer  # noqa: E402  the same

MakeTopic = Callable[..., str]


class OurServer:
    """Our broker with the handles that the tests of Apache Kafka's have."""

    def __init__(self, folder: Path, **options: object) -> None:
        self.folder = folder
        self._process = BrokerProcess(folder, **options)

    def address(self, _listener: str = "PLAIN") -> str:
        return self._process.address

    def start(self) -> None:
        self._process.start()

    def stop(self) -> None:
        self._process.stop()

    def kill(self) -> None:
        self._process.kill()

    def pause(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    @property
    def pid(self) -> int:
        return self._process.pid


SETTINGS = {"topics_auto_created": False}


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OurServer]:
    server = OurServer(tmp_path_factory.mktemp("broker"), settings=SETTINGS)
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def apache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaServer]:
    server = KafkaServer(
        tmp_path_factory.mktemp("apache"),
        settings={"transaction.abort.timed.out.transaction.cleanup.interval.ms": "200"},
    )
    server.start()
    yield server
    server.kill()


@pytest.fixture
def client(broker: OurServer) -> Iterator[Client]:
    with Client(broker.address(), clock=SystemClock()) as client:
        yield client


@pytest.fixture
def make_topic(client: Client) -> MakeTopic:
    return lambda partitions=1, **configs: new_topic(client, partitions, **configs)
