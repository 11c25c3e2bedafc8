"""Hostile bytes: no crash, no hang, no memory growth; and which clients may connect."""

from __future__ import annotations

import os
import random
import socket
import struct
import time
from pathlib import Path

import google_crc32c
import psutil
import pytest
from conftest_tools import new_topic
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from servers.embedded import EmbeddedServer
from servers.kafka import Certificates
from table import Table
from wire import produce, produce_request

from epochal.broker import handlers
from epochal.broker.core.batch_check import BatchHeader, inspect
from epochal.broker.embedded import BrokerProcess
from epochal.broker.server import Listener
from epochal.clock import SystemClock
from epochal.errors import EpochalError, Misconfigured
from epochal.kafka import batch_format
from epochal.kafka.client import Client
from epochal.kafka.codes import Code
from epochal.kafka.messages.add_offsets_to_txn import AddOffsetsToTxnRequest
from epochal.kafka.messages.create_topics import (
    CreatableTopic,
    CreatableTopicConfig,
    CreateTopicsRequest,
)
from epochal.kafka.messages.fetch import FetchPartition, FetchRequest, FetchTopic
from epochal.kafka.messages.headers import RequestHeader
from epochal.kafka.messages.init_producer_id import InitProducerIdRequest
from epochal.kafka.messages.join_group import JoinGroupRequest, JoinGroupRequestProtocol
from epochal.kafka.messages.metadata import MetadataRequest
from epochal.kafka.primitives import Malformed, Unsupported
from epochal.kafka.security import Plain, Scram, Security, Tls


def connected(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=60)


def frame(api_key: int, version: int, body: bytes) -> bytes:
    head = struct.pack(">hhih", api_key, version, 1, -1)
    return struct.pack(">i", len(head) + len(body)) + head + body


def test_random_frames_leave_the_broker_alive_and_small(
    broker: EmbeddedServer, client: Client
) -> None:
    chance = random.Random(7)
    topic = new_topic(client)
    good = b"".join(bytes(part) for part in produce_request(topic, [b"row"]).encode(9))
    before = psutil.Process(broker.pid).memory_info().rss
    for number in range(1_500):
        api_key = chance.choice([*handlers.table(), 99, -1])
        version = chance.randint(-1, 14)
        match number % 3:
            case 0:
                body = chance.randbytes(chance.randint(0, 200))
            case 1:
                api_key, version, changed = 0, 9, bytearray(b"\x00" + good)
                for _ in range(chance.randint(1, 4)):
                    changed[chance.randrange(len(changed))] = chance.randrange(256)
                body = bytes(changed)
            case _:
                body = b"\x00" + b"\xff\xff\xff\xff\x0f" * chance.randint(1, 30)
        with connected(broker.address()) as sock:
            sock.sendall(frame(api_key, version, body))
            if number % 10 == 0:
                sock.settimeout(0.05)
                try:
                    sock.recv(1 << 16)
                except (TimeoutError, ConnectionResetError):
                    continue
    assert produce(client, topic, [b"still here"]) == Code.NONE
    grown = psutil.Process(broker.pid).memory_info().rss - before
    assert grown < 30 << 20, f"grew by {grown} bytes"


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack(">i", -1),
        struct.pack(">i", 0),
        struct.pack(">i", 2_000_000_000),
        struct.pack(">i", 3) + b"abc",
        frame(77, 0, b""),
        frame(0, 99, b""),
        frame(0, 9, b"\xff" * 50),
    ],
)
def test_what_is_no_request_ends_its_connection_only(
    broker: EmbeddedServer, client: Client, garbage: bytes
) -> None:
    with connected(broker.address()) as sock:
        sock.sendall(garbage)
        assert _is_ended(sock)
    assert client.ask(MetadataRequest(topics=[])).controller_id == 1


def test_a_text_longer_than_kafkas_ends_its_connection_only(
    broker: EmbeddedServer, client: Client
) -> None:
    """A version with variable lengths could carry it; the journal and older versions can't."""
    given = client.ask(InitProducerIdRequest(transactional_id="long", transaction_timeout_ms=9_000))
    for size, is_taken in ((32_767, True), (32_768, False), (70_000, False)):
        request = AddOffsetsToTxnRequest(
            transactional_id="long",
            producer_id=given.producer_id,
            producer_epoch=given.producer_epoch,
            group_id="g" * size,
        )
        body = b"\x00" + b"".join(bytes(part) for part in request.encode(3))
        with connected(broker.address()) as sock:
            sock.sendall(frame(AddOffsetsToTxnRequest.API_KEY, 3, body))
            assert _is_ended(sock) != is_taken
    assert client.ask(MetadataRequest(topics=[])).controller_id == 1


def changed(batch: bytes, section: bytes | None = None, **fields: int) -> bytes:
    """A batch with other values in its header, or other records, and the right checksum."""
    names = BatchHeader._fields
    values = dict(zip(names, batch_format.HEADER.unpack_from(batch), strict=True)) | fields
    section = batch[batch_format.HEADER_BYTES :] if section is None else section
    values["length"] = batch_format.HEADER_BYTES + len(section) - batch_format.LENGTH_FROM
    head = batch_format.HEADER.pack(*values.values())
    crc = google_crc32c.value((head + section)[batch_format.CRC_FROM :])
    return head[: batch_format.CRC_AT] + struct.pack(">I", crc) + head[21:] + section


@pytest.mark.parametrize("policy", ["compact", "delete"])
def test_records_that_contradict_their_header_are_refused_at_once(policy: str) -> None:
    """In compacted topics they are opened, to look for keys."""
    table = Table()
    config = CreatableTopicConfig(name="cleanup.policy", value=policy)
    wanted = CreatableTopic(name="t", num_partitions=1, replication_factor=1, configs=[config])
    table.ask(CreateTopicsRequest(topics=[wanted]))
    good = bytes(produce_request("t", [b"row"]).topic_data[0].partition_data[0].records)
    many = {"records": (1 << 31) - 1, "last_offset_delta": (1 << 31) - 2}
    for records in (
        changed(good, attributes=5),
        changed(good, **many),
        changed(good, b"\x01" + bytes(60), **many),  # a record of length -1, again and again
    ):
        request = produce_request("t", [b"row"])
        request.topic_data[0].partition_data[0].records = records
        (part,) = table.ask(request).responses[0].partition_responses
        assert part.error_code == Code.INVALID_RECORD


def test_a_client_with_a_very_long_name_joins_a_group(
    broker: EmbeddedServer, client: Client
) -> None:
    name, version = b"n" * 32_767, 5
    request = JoinGroupRequest(
        group_id="g",
        session_timeout_ms=10_000,
        rebalance_timeout_ms=10_000,
        protocol_type="consumer",
        protocols=[JoinGroupRequestProtocol(name="range", metadata=b"")],
    )
    head = struct.pack(">hhih", JoinGroupRequest.API_KEY, version, 1, len(name)) + name
    body = head + b"".join(bytes(part) for part in request.encode(version))
    with connected(broker.address()) as sock:
        sock.sendall(struct.pack(">i", len(body)) + body)
        file = sock.makefile("rb")
        (size,) = struct.unpack(">i", file.read(4))
        answer = request.decode_response(version, file.read(size), 4)
    assert answer.error_code == Code.MEMBER_ID_REQUIRED
    assert client.ask(MetadataRequest(topics=[])).controller_id == 1


def _is_ended(sock: socket.socket) -> bool:
    sock.settimeout(60)
    try:
        return sock.recv(100) == b""
    except ConnectionResetError:
        return True


def test_an_unknown_version_of_the_first_request_is_answered_in_version_0(
    broker: EmbeddedServer,
) -> None:
    with connected(broker.address()) as sock:
        sock.sendall(frame(18, 99, b""))
        data = sock.recv(1 << 16)
        assert struct.unpack_from(">h", data, 8) == (Code.UNSUPPORTED_VERSION,)
        sock.sendall(frame(18, 0, b""))
        data = sock.recv(1 << 16)
        assert struct.unpack_from(">h", data, 8) == (Code.NONE,)


TABLE = Table()
TABLE.ask(
    CreateTopicsRequest(topics=[CreatableTopic(name="t", num_partitions=1, replication_factor=1)])
)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_bytes_are_decoded_and_handled_or_refused(data: st.DataObject) -> None:
    handler = data.draw(st.sampled_from(sorted(handlers.table().values())))
    version = data.draw(st.sampled_from(list(handler.versions)))
    body = data.draw(st.binary(max_size=120))
    try:
        request, _ = handler.request.decode_head(version, body)
    except (Malformed, Unsupported):
        return
    TABLE.ask(request, version)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=150))
def test_any_bytes_are_a_batch_or_refused(data: bytes) -> None:
    found = inspect(data, bytes_max=1_000, timestamp_max_ms=1 << 62, takes_zstd=True)
    assert not isinstance(found, BatchHeader)


def test_a_client_that_reads_nothing_does_not_fill_the_memory(
    broker: EmbeddedServer, client: Client
) -> None:
    topic = new_topic(client)
    for _ in range(8):
        assert produce(client, topic, [os.urandom(900_000)]) == Code.NONE
    from epochal.kafka.messages.fetch import FetchPartition, FetchRequest, FetchTopic

    part = FetchPartition(partition=0, fetch_offset=0, partition_max_bytes=8 << 20)
    request = FetchRequest(max_bytes=8 << 20, topics=[FetchTopic(topic=topic, partitions=[part])])
    header = RequestHeader(request_api_key=1, request_api_version=11, client_id=None)
    body = b"".join(bytes(part) for part in (*header.encode(1), *request.encode(11)))
    server = psutil.Process(broker.pid)
    before = server.memory_info().rss
    with connected(broker.address()) as sock:
        for _ in range(200):
            sock.sendall(struct.pack(">i", len(body)) + body)
        _await_rest(server)
        grown = server.memory_info().rss - before
        assert grown < 150 << 20, f"grew by {grown} bytes"
    assert produce(client, topic, [b"still here"]) == Code.NONE


def _await_rest(process: psutil.Process) -> None:
    """Until it has worked, and works no more."""
    began = spent = process.cpu_times()[:2]
    while True:
        time.sleep(0.25)
        before, spent = spent, process.cpu_times()[:2]
        if began != before == spent:
            return


def test_silent_clients_lose_their_place_and_waiting_ones_keep_it(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path, settings={"connection_idle_max_ms": 1_000})
    server.start()
    try:
        with Client(server.address(), clock=SystemClock()) as client:
            topic = new_topic(client)
        with connected(server.address()) as silent, connected(server.address()) as waiting:
            waiting.sendall(frame(1, 4, _fetch(topic, wait_ms=2_500)))
            assert silent.recv(1) == b""
            assert len(waiting.recv(4)) == 4
    finally:
        server.stop()


def test_a_full_house_lets_nobody_in_until_somebody_leaves(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path, settings={"connections_max": 1})
    server.start()
    try:
        with connected(server.address()) as first:
            assert _is_served(first)
            with connected(server.address()) as second:
                assert not _is_served(second)
        deadline = time.monotonic() + 60
        while True:
            with connected(server.address()) as third:
                if _is_served(third):
                    break
            assert time.monotonic() < deadline, "the place stays taken"
    finally:
        server.stop()


def _is_served(client: socket.socket) -> bool:
    try:
        client.sendall(frame(18, 0, b""))
        return client.recv(4) != b""
    except ConnectionError:
        return False


def _fetch(topic: str, wait_ms: int) -> bytes:
    wanted = FetchTopic(topic=topic, partitions=[FetchPartition(partition=0)])
    request = FetchRequest(max_wait_ms=wait_ms, min_bytes=1, topics=[wanted])
    return b"".join(bytes(part) for part in request.encode(4))


def test_a_broker_that_others_can_reach_needs_authentication() -> None:
    for host in ("127.0.0.1", "::1", "localhost"):
        Listener(host=host).check()
    for host in ("0.0.0.0", "192.168.1.1", "example.org", ""):
        with pytest.raises(Misconfigured, match="no client would be authenticated"):
            Listener(host=host).check()
        Listener(host=host, users={"a": "b"}).check()
        Listener(host=host, certificate_file="x.pem").check()


def test_a_data_folder_has_one_broker(tmp_path: Path) -> None:
    first = BrokerProcess(tmp_path)
    first.start()
    with pytest.raises(Misconfigured):
        BrokerProcess(tmp_path).start()
    first.stop()


def test_names_of_topics_never_become_paths(broker: EmbeddedServer, client: Client) -> None:
    topic = new_topic(client)
    assert produce(client, topic, [b"x" * 300_000]) == Code.NONE
    made = [path.relative_to(broker.folder) for path in broker.folder.rglob("*")]
    assert made
    assert not [path for path in made if topic in str(path)]


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> EmbeddedServer:
    folder = tmp_path_factory.mktemp("locked")
    certificates = Certificates(folder)
    server = EmbeddedServer(
        folder / "data",
        host="localhost",
        users={"alice": "alice-secret", "bob": "b,o=b"},
        certificate_file=str(certificates.server),
    )
    server.certificates = certificates
    server.start()
    yield server
    server.stop()


@pytest.mark.parametrize(
    "mechanism",
    [
        Plain(username="alice", password="alice-secret"),
        Scram(username="alice", password="alice-secret", mechanism="SCRAM-SHA-256"),
        Scram(username="bob", password="b,o=b", mechanism="SCRAM-SHA-512"),
    ],
)
def test_those_who_know_the_password_come_in(locked: EmbeddedServer, mechanism) -> None:
    security = Security(tls=Tls(ca_file=str(locked.certificates.ca)), sasl=mechanism)
    with Client(locked.address(), clock=SystemClock(), security=security) as client:
        topic = new_topic(client)
        assert produce(client, topic, [b"row"]) == Code.NONE


@pytest.mark.parametrize(
    "mechanism",
    [
        None,
        Plain(username="alice", password="wrong"),
        Plain(username="nobody", password="alice-secret"),
        Scram(username="alice", password="wrong"),
        Scram(username="nobody", password="x", mechanism="SCRAM-SHA-256"),
    ],
)
def test_those_who_do_not_stay_outside(locked: EmbeddedServer, mechanism) -> None:
    security = Security(tls=Tls(ca_file=str(locked.certificates.ca)), sasl=mechanism)
    with (
        Client(locked.address(), clock=SystemClock(), security=security) as client,
        pytest.raises(EpochalError),
    ):
        client.ask(MetadataRequest(topics=[]), timeout_s=1.0)
