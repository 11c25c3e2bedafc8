"""A receiver and a keyed service, each a real server on loopback."""

from __future__ import annotations

import pytest
from servers.receiver import ReceiverServer
from servers.tcp_proxy import Proxy
from sinks.http.keyed_service import KeyedService

TOKEN = "t0ken-hunter2"


@pytest.fixture(scope="session")
def receiver(tmp_path_factory):
    server = ReceiverServer(tmp_path_factory.mktemp("receiver"), tokens=(TOKEN, "another"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def proxy(receiver):
    proxy = Proxy(receiver.port)
    yield proxy
    proxy.close()


@pytest.fixture
def service():
    service = KeyedService()
    yield service
    service.close()
