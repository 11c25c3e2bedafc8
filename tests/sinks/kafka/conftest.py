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

from kafka_broker import Broker, close_readers, server_at  # noqa: E402  found by the lines above
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


@pytest.fixture
def registry() -> Iterator[Registry]:
    with running_registry() as running:
        yield running
