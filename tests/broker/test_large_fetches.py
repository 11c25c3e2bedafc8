"""Large answers to Fetch, checked while they are sent: every byte, for every reader."""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import psutil
import pytest
from conftest_tools import new_topic
from servers.embedded import EmbeddedServer
from servers.kafka import Certificates
from test_hostile_clients import connected, frame
from wire import produce

from epochal.broker.acceptor import Acceptor
from epochal.broker.core.settings import Settings
from epochal.clock import SystemClock
from epochal.kafka import batch_reader
from epochal.kafka.client import Client
from epochal.kafka.cluster import Controller
from epochal.kafka.codes import Code
from epochal.kafka.messages.delete_topics import DeleteTopicsRequest, DeleteTopicState
from epochal.kafka.messages.fetch import FetchPartition, FetchRequest, FetchResponse, FetchTopic
from epochal.kafka.security import PLAINTEXT, Security, Tls

VERSION = 11
ROWS, ROW_BYTES, ASKED_BYTES = 24, 400_000, 3_000_000


class Reader:
    """A socket on which several Fetch requests are sent before an answer is read."""

    def __init__(self, server: EmbeddedServer, topic: str) -> None:
        self.socket = connected(server.address())
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        self._topic = topic

    def ask(self, *offsets: int) -> None:
        for offset in offsets:
            part = FetchPartition(partition=0, fetch_offset=offset, partition_max_bytes=ASKED_BYTES)
            request = FetchRequest(
                max_wait_ms=0,
                min_bytes=1,
                max_bytes=ASKED_BYTES,
                topics=[FetchTopic(topic=self._topic, partitions=[part])],
            )
            body = b"".join(bytes(part) for part in request.encode(VERSION))
            self.socket.sendall(frame(1, VERSION, body))

    def answer(self, chance: random.Random, begun: bytes = b"") -> tuple[Code, list[bytes]]:
        """The next one, of which these bytes were read; read in pieces of any size."""
        (size,) = struct.unpack(">i", begun + self._exactly(4 - len(begun), chance))
        answer = FetchResponse.decode(VERSION, self._exactly(size, chance), 4)
        (part,) = answer.responses[0].partitions
        found = batch_reader.read(part.records or b"")
        rows = [value for batch in found for value in batch.columns()["value"].to_pylist()]
        return Code(part.error_code), rows

    def _exactly(self, size: int, chance: random.Random) -> bytes:
        data = bytearray()
        while len(data) < size:
            piece = self.socket.recv(min(size - len(data), chance.randint(1, 300_000)))
            if not piece:
                raise ConnectionResetError
            data += piece
        return bytes(data)


@pytest.fixture(scope="module", params=["plain", "tls"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EmbeddedServer]:
    folder = tmp_path_factory.mktemp("large")
    certificates = Certificates(folder)
    options = {"host": "localhost", "certificate_file": str(certificates.server)}
    server = EmbeddedServer(folder / "data", **(options if request.param == "tls" else {}))
    server.ca_file = str(certificates.ca) if request.param == "tls" else None
    server.start()
    yield server
    server.stop()


@pytest.fixture
def client(server: EmbeddedServer) -> Iterator[Client]:
    security = Security(tls=Tls(ca_file=server.ca_file)) if server.ca_file else PLAINTEXT
    with Client(server.address(), clock=SystemClock(), security=security) as client:
        yield client


@pytest.fixture
def rows(client: Client) -> tuple[str, list[bytes]]:
    """A topic, and what is in it: batches of one row."""
    topic = new_topic(client)
    chance = random.Random(3)
    made = [chance.randbytes(ROW_BYTES) for _ in range(ROWS)]
    for row in made:
        assert produce(client, topic, [row]) == Code.NONE
    return topic, made


def reader_of(server: EmbeddedServer, topic: str) -> Reader:
    reader = Reader(server, topic)
    if server.ca_file:
        context = ssl.create_default_context(cafile=server.ca_file)
        reader.socket = context.wrap_socket(reader.socket, server_hostname="localhost")
    return reader


def test_a_slow_reader_with_several_requests_gets_every_byte_in_order(
    server: EmbeddedServer, rows: tuple[str, list[bytes]]
) -> None:
    topic, made = rows
    chance = random.Random(5)
    reader = reader_of(server, topic)
    with reader.socket:
        offsets = [chance.randrange(ROWS) for _ in range(6)]
        reader.ask(*offsets)
        for offset in offsets:
            code, found = reader.answer(chance)
            assert code is Code.NONE
            assert found == made[offset : offset + len(found)]
            assert len(found) == min(ROWS - offset, ASKED_BYTES // ROW_BYTES)


def test_what_is_being_sent_outlives_its_topic(
    server: EmbeddedServer, client: Client, rows: tuple[str, list[bytes]]
) -> None:
    topic, made = rows
    chance = random.Random(5)
    reader = reader_of(server, topic)
    with reader.socket:
        reader.ask(0, 8, 16)
        begun = reader.socket.recv(1)  # the answers don't fit into the buffers
        gone = DeleteTopicsRequest(topics=[DeleteTopicState(name=topic)], timeout_ms=10_000)
        assert client.ask(gone, Controller()).responses[0].error_code == 0
        assert reader.answer(chance, begun) == (Code.NONE, made[: ASKED_BYTES // ROW_BYTES])
        for offset in (8, 16):  # answered before it was deleted, or not
            code, found = reader.answer(chance)
            assert code in (Code.NONE, Code.UNKNOWN_TOPIC_OR_PARTITION)
            assert found == made[offset : offset + len(found)]


def test_a_reader_that_goes_in_the_middle_leaves_no_file_open(
    server: EmbeddedServer, client: Client, rows: tuple[str, list[bytes]]
) -> None:
    topic, _ = rows
    process = psutil.Process(server.pid)
    before = process.num_fds()
    for _ in range(8):
        reader = reader_of(server, topic)
        reader.ask(0, 3, 6)
        reader.socket.recv(1)
        reader.socket.close()
    gone = DeleteTopicsRequest(topics=[DeleteTopicState(name=topic)], timeout_ms=10_000)
    assert client.ask(gone, Controller()).responses[0].error_code == 0
    deadline = time.monotonic() + 60
    while process.num_fds() > before or any(
        "(deleted)" in one.path for one in process.open_files()
    ):
        assert time.monotonic() < deadline, process.open_files()
        time.sleep(0.02)
    assert produce(client, new_topic(client), [b"row"]) == Code.NONE


def test_a_segment_that_became_shorter_is_refused_from_there_on(
    server: EmbeddedServer, client: Client, rows: tuple[str, list[bytes]]
) -> None:
    topic, made = rows
    chance = random.Random(1)
    reader = reader_of(server, topic)
    with reader.socket:
        reader.ask(0, 6, 12, 0, 6, 12)
        begun = reader.socket.recv(1)
        with newest_segment(server).open("r+b") as file:
            file.truncate(1)
        for offset in (0, 6, 12, 0, 6, 12):
            code, found = reader.answer(chance, begun)
            assert code in (Code.NONE, Code.CORRUPT_MESSAGE)
            assert found == made[offset : offset + len(found)]
            assert found or code is Code.CORRUPT_MESSAGE
            begun = b""
    assert produce(client, new_topic(client), [b"row"]) == Code.NONE


@pytest.mark.parametrize("byte", [0, 9, 16, 23, 61, 300_000], ids=lambda byte: f"byte {byte}")
def test_of_a_batch_damaged_within_an_answer_not_a_byte_is_sent(
    server: EmbeddedServer, rows: tuple[str, list[bytes]], byte: int
) -> None:
    topic, made = rows
    chance = random.Random(byte)
    batch_bytes = newest_segment(server).stat().st_size // ROWS
    with newest_segment(server).open("r+b") as file:
        file.seek(3 * batch_bytes + byte)
        changed = bytes([file.read(1)[0] ^ 1])
        file.seek(-1, 1)
        file.write(changed)
    reader = reader_of(server, topic)
    with reader.socket:
        reader.ask(0, 3, 4)
        assert reader.answer(chance) == (Code.NONE, made[:3])
        assert reader.answer(chance) == (Code.CORRUPT_MESSAGE, [])
        assert reader.answer(chance) == (Code.NONE, made[4 : 4 + ASKED_BYTES // ROW_BYTES])


def newest_segment(server: EmbeddedServer) -> Path:
    return max(Path(server.folder).rglob("*.segment"), key=lambda path: path.stat().st_mtime)


def test_the_small_end_of_a_large_answer_is_sent_at_once() -> None:
    """Else it waits until what is before it is acknowledged, which takes clients up to 40 ms."""

    async def accepted() -> bool:
        met: asyncio.Future[asyncio.Transport] = asyncio.get_running_loop().create_future()

        class Met(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                met.set_result(cast("asyncio.Transport", transport))

        acceptor = Acceptor(Met, Settings(), None, lambda limit: None)  # type: ignore[arg-type]
        port = await acceptor.bind("127.0.0.1", 0)
        acceptor.start()
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        transport = await met
        is_sent_at_once = transport.get_extra_info("socket").getsockopt(
            socket.IPPROTO_TCP, socket.TCP_NODELAY
        )
        writer.close()
        transport.abort()
        acceptor.close()
        return bool(is_sent_at_once)

    assert asyncio.run(accepted())
