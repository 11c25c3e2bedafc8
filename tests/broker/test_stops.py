"""A broker stops on a signal, and when its disk refuses a write: acknowledged records stay.

It does not stop for a renewed certificate.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest_tools import new_topic
from servers.kafka import Certificates
from wire import fetch, produce, values

from epochal.broker import server
from epochal.broker.core.settings import Settings
from epochal.broker.server import Listener
from epochal.clock import SystemClock
from epochal.errors import EpochalError
from epochal.kafka.client import Client, Patience
from epochal.kafka.codes import Code

IMPATIENT = Patience(total_s=1.0)
_LAUNCH = """
import sys
from epochal.broker.server import serve
from epochal.errors import EpochalError
try:
    serve(sys.argv[1], port=int(sys.argv[2]), ready=lambda address: print(address, flush=True))
except EpochalError as error:
    sys.exit(str(error))
"""


class Running:
    """A broker whose last output can be read."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _LAUNCH, folder, str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.address = self._process.stdout.readline().strip()

    def limit_files(self, size: int) -> None:
        """From now on no file may grow beyond this: to the broker, its disk is full."""
        resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE, (size, size))

    def last_words(self) -> str:
        return self._process.communicate(timeout=60)[1]

    def stop(self) -> int:
        self._process.terminate()
        self.last_words()
        return self._process.returncode


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[Running]]:
    brokers: list[Running] = []
    yield brokers
    for one in brokers:
        one.stop()


def test_a_broker_stops_while_clients_are_connected(tmp_path: Path) -> None:
    broker = Running(tmp_path)
    host, _, port = broker.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60):
        assert broker.stop() == 0


def test_a_disk_that_refuses_stops_the_broker_and_what_was_acknowledged_is_there(
    tmp_path: Path, started: list[Running]
) -> None:
    started.append(Running(tmp_path))
    with Client(started[0].address, clock=SystemClock(), patience=IMPATIENT) as client:
        topic = new_topic(client)
        rows = [b"%06d" % number + bytes(2_000) for number in range(1_000)]
        started[0].limit_files(300_000)
        taken = _taken(client, topic, rows)
    result = started[0].last_words()
    assert "Traceback" not in result
    assert f"its folder {tmp_path} can't be used: File too large" in result
    assert "hint: " in result
    assert 10 < len(taken) < len(rows)
    started.append(Running(tmp_path))
    with Client(started[1].address, clock=SystemClock()) as client:
        seen = values(fetch(client, topic)[0])
        # The one that was refused was never seen; no other may be missing, or twice.
        assert seen in (taken, [*taken, rows[len(taken)]])
        assert produce(client, topic, [b"on it goes"]) == Code.NONE


def _taken(client: Client, topic: str, rows: list[bytes]) -> list[bytes]:
    """Those that were acknowledged before the broker was gone."""
    for number, row in enumerate(rows):
        try:
            assert produce(client, topic, [row]) == Code.NONE
        except EpochalError:
            return rows[:number]
    return rows


def test_an_address_that_is_taken_is_reported_in_a_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = Running(tmp_path, taken.getsockname()[1]).last_words()
    assert "can't listen on 127.0.0.1" in result
    assert "Traceback" not in result


def test_a_renewed_certificate_is_used_without_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(server, "_CERTIFICATE_LOOK_S", 0.02)
    certificates = Certificates(tmp_path)
    unverified = ssl.create_default_context()
    unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE

    async def shown(port: int) -> bytes:
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=unverified)
        writer.close()
        return writer.get_extra_info("ssl_object").getpeercert(binary_form=True)

    async def run() -> None:
        listener = Listener(port=0, certificate_file=str(certificates.server))
        async with server.running(tmp_path / "data", listener, Settings()) as address:
            before, said = await shown(address.port), ""
            certificates.server.write_text("half a file, as it is being replaced")
            while "those before are used" not in said:
                await asyncio.sleep(0.01)
                said += capfd.readouterr().err
            assert await shown(address.port) == before
            renewed = Certificates(tmp_path)
            while await shown(address.port) == before:
                await asyncio.sleep(0.01)
            context = ssl.create_default_context(cafile=str(renewed.ca))
            place = {"host": "127.0.0.1", "port": address.port, "server_hostname": "localhost"}
            _, writer = await asyncio.open_connection(**place, ssl=context)
            writer.close()

    asyncio.run(asyncio.wait_for(run(), 60))
