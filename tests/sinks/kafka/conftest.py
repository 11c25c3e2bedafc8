"""The broker that these tests share; see `kafka_broker`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
for folder in (HERE.parent.parent, HERE):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from confluent_kafka.schema_registry import SchemaRegistryClient  # noqa: E402  as below
from kafka_broker import Broker, close_readers, server_at  # noqa: E402  found by the lines above
from servers.apicurio import Apicurio, running_apicurio  # noqa: E402  the same
from servers.registry import Registry, running_registry  # noqa: E402  the same


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    running = server_at(tmp_path_factory.mktemp("kafka"))
    running.start()
    yield running
    close_readers()
    running.kill()


@pytest.fixture
def kafka(server: Any) -> Iterator[Broker]:
    made = Broker(bootstrap=server.address())
    yield made
    made.close()


@pytest.fixture(scope="session")
def apicurio() -> Iterator[Apicurio]:
    with running_apicurio() as running:
        with SchemaRegistryClient({"url": running.url}) as client:
            client.set_compatibility(level="BACKWARD")
        yield running


@pytest.fixture
def registry(request: pytest.FixtureRequest) -> Iterator[Registry | Apicurio]:
    """A stand-in that notes what it is asked; or, as a parameter, a registry that is not ours."""
    if getattr(request, "param", "stand-in") == "apicurio":
        yield request.getfixturevalue("apicurio")
        return
    with running_registry() as running:
        yield running
