"""Clients that mean harm, and a bystander whose requests are answered as if they were not there.

The bystander's p99 during an attack is compared with its own before the attack, in the same run.
The margin is wide: a broker that stands still is far beyond it.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import resource
import socket
import ssl
import statistics
import struct
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pyarrow as pa
import pytest
from conftest_tools import new_topic
from servers.embedded import EmbeddedServer
from servers.kafka import Certificates
from servers.ports import free_port
from test_hostile_clients import frame
from wire import produce

from epochal.clock import SystemClock
from epochal.kafka import batches
from epochal.kafka.batches import Columns
from epochal.kafka.client import Client
from epochal.kafka.cluster import Controller
from epochal.kafka.codes import Code
from epochal.kafka.compression import Compression
from epochal.kafka.messages.list_offsets import (
    ListOffsetsPartition,
    ListOffsetsRequest,
    ListOffsetsTopic,
)
from epochal.kafka.messages.list_transactions import ListTransactionsRequest
from epochal.kafka.messages.produce import (
    PartitionProduceData,
    ProduceRequest,
    TopicProduceData,
)
from epochal.kafka.security import Plain, Security, Tls

FACTOR, SLACK_S = 15.0, 0.4
QUIET_S, ATTACK_S = 0.8, 1.5
TRIES = 3
FROM = "127.0.0.9"
"""The address that attacks come from."""
SETTINGS = {
    "connections_max": 300,
    "connections_per_address_max": 150,
    "connections_before_login_max": 30,
    "handshakes_max": 20,
    "handshake_within_ms": 3_000,
    "frame_within_ms": 1_000,
    "login_within_ms": 3_000,
    "frames_bytes_max": 40 << 20,
}


class Bystander:
    """One row and its acknowledgement, again and again."""

    def __init__(self, client: Client, topic: str) -> None:
        self._client, self._topic = client, topic
        self._quiet_s = self.undisturbed_s(QUIET_S)

    def undisturbed_s(self, seconds: float) -> float:
        return self.p99_s(lambda: None, seconds)

    def p99_s(self, work: Callable[[], object], seconds: float) -> float:
        """While `work` runs beside it, and for so long at least."""
        failed: list[BaseException] = []

        def attack() -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001  raised again by the thread that waits
                failed.append(error)

        thread = threading.Thread(target=attack, daemon=True)
        until = time.monotonic() + seconds
        thread.start()
        times: list[float] = []
        while time.monotonic() < until or thread.is_alive():
            began = time.perf_counter()
            assert produce(self._client, self._topic, [b"row"]) == Code.NONE
            times.append(time.perf_counter() - began)
        thread.join()
        assert not failed, failed
        return statistics.quantiles(times, n=100)[98] if len(times) > 1 else times[0]

    def judge(self, attack: Callable[[], object], seconds: float = ATTACK_S) -> None:
        for _ in range(TRIES):
            found = self.p99_s(attack, seconds)
            if self._is_allowed(found):
                return
            # Was it the attack, or the machine? It may be busier now than it was before.
            self._quiet_s = max(self._quiet_s, self.undisturbed_s(seconds))
            if self._is_allowed(found):
                return
        raise AssertionError(f"p99 {found:.3f} s, undisturbed {self._quiet_s:.4f} s")

    def _is_allowed(self, found_s: float) -> bool:
        return found_s < self._quiet_s * FACTOR + SLACK_S


class Attacked(EmbeddedServer):
    def __init__(self, folder: Path, **options: object) -> None:
        self.metrics_port = free_port()
        super().__init__(folder, metrics_port=self.metrics_port, settings=SETTINGS, **options)

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def reached(self, limit: str) -> float:
        return self.metrics()[f'epochal_broker_limit_reached_total{{limit="{limit}"}}']

    def rss(self) -> int:
        return psutil.Process(self.pid).memory_info().rss


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    server = Attacked(tmp_path_factory.mktemp("attacked"))
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    folder = tmp_path_factory.mktemp("locked")
    certificates = Certificates(folder)
    server = Attacked(
        folder / "data",
        host="localhost",
        users={"alice": "alice-secret"},
        certificate_file=str(certificates.server),
    )
    server.certificates = certificates
    server.start()
    yield server
    server.stop()


@pytest.fixture
def bystander(server: Attacked) -> Iterator[Bystander]:
    with Client(server.address(), clock=SystemClock()) as client:
        yield Bystander(client, new_topic(client))


@pytest.fixture
def bystander_inside(locked: Attacked) -> Iterator[Bystander]:
    security = Security(
        tls=Tls(ca_file=str(locked.certificates.ca)),
        sasl=Plain(username="alice", password="alice-secret"),
    )
    with Client(locked.address(), clock=SystemClock(), security=security) as client:
        yield Bystander(client, new_topic(client))


def enemy(server: Attacked) -> socket.socket:
    host, _, port = server.address().rpartition(":")
    address = ("127.0.0.1" if host == "localhost" else host, int(port))
    return socket.create_connection(address, timeout=30, source_address=(FROM, 0))


def enemies(server: Attacked, count: int) -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    for _ in range(count):
        with contextlib.suppress(ConnectionError):
            stack.enter_context(enemy(server))
    return stack


def until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.05)


def test_many_connections_of_one_address_leave_room_for_others(
    server: Attacked, bystander: Bystander
) -> None:
    before = server.reached("connections_per_address_max")

    def attack() -> None:
        with enemies(server, 400):
            time.sleep(ATTACK_S)

    bystander.judge(attack)
    assert server.reached("connections_per_address_max") >= before + 200
    with Client(server.address(), clock=SystemClock()) as another:
        assert new_topic(another)


def test_a_process_out_of_descriptors_refuses_connections_and_keeps_its_disk(
    tmp_path: Path,
) -> None:
    server = EmbeddedServer(
        tmp_path, settings={"descriptors_reserved": 60, "connections_max": 1_000}
    )
    server.start()
    host, _, port = server.address().rpartition(":")
    process = psutil.Process(server.pid)
    _, most = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (120, most))
    try:
        with Client(server.address(), clock=SystemClock()) as client:
            topic = new_topic(client, 3)
            bystander = Bystander(client, topic)
            used: list[int] = []

            def attack() -> None:
                with contextlib.ExitStack() as stack:
                    for _ in range(300):
                        with contextlib.suppress(OSError):
                            stack.enter_context(
                                socket.create_connection((host, int(port)), timeout=1)
                            )
                    until(lambda: process.num_fds() >= 60)
                    time.sleep(1.0)
                    used.append(process.num_fds())

            bystander.judge(attack, 0.5)
            assert used[0] < 80  # some of those reserved may be in use
            assert produce(client, topic, [bytes(300_000)], partition=2) == Code.NONE

        # Where others leave it none at all, the kernel refuses: clients wait until some are free.
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (3, most))
        with socket.create_connection((host, int(port)), timeout=60) as waiting:
            waiting.sendall(frame(18, 0, b""))
            time.sleep(0.5)
            resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (120, most))
            assert waiting.recv(4)
    finally:
        server.stop()


def test_large_frames_that_never_end_are_bounded_together_and_in_time(
    server: Attacked, bystander: Bystander
) -> None:
    before, in_time = server.reached("frames_bytes_max"), server.reached("frame_within_ms")
    size = server.rss()

    def attack() -> None:
        socks = [enemy(server) for _ in range(30)]
        for sock in socks:
            with contextlib.suppress(OSError):
                sock.sendall(struct.pack(">ihh", 90 << 20, 0, 9) + bytes(4 << 20))
        until(lambda: server.reached("frame_within_ms") > in_time)
        for sock in socks:
            sock.close()

    bystander.judge(attack)
    assert server.reached("frames_bytes_max") > before
    assert server.rss() - size < 200 << 20


def test_only_produce_may_be_large(server: Attacked, bystander: Bystander) -> None:
    before = server.reached("request_bytes_max")
    with enemy(server) as sock:
        sock.sendall(struct.pack(">ihh", 50 << 20, 3, 9))
        assert sock.recv(1) == b""
    assert server.reached("request_bytes_max") == before + 1


@pytest.mark.parametrize("api", ["metadata", "produce", "tags"])
def test_a_request_of_countless_elements_is_refused_before_it_costs_anything(
    server: Attacked, bystander: Bystander, api: str
) -> None:
    before = server.reached("request_elements_max")
    match api:
        case "metadata":
            count = 2_000_000
            attack_frame = frame(3, 1, struct.pack(">i", count) + b"\0\1x" * count)
        case "produce":
            part = struct.pack(">ii", 0, -1)
            body = struct.pack(">hhii", -1, 1, 1000, 1) + b"\0\1t" + struct.pack(">i", 3_000_000)
            attack_frame = frame(0, 3, body + part * 3_000_000)
        case _:
            attack_frame = frame(3, 9, b"\x80\x89\x7a" + b"\x63\x00" * 2_000_000)

    def attack() -> None:
        # On a busy machine some take longer than a frame may, and are refused for that.
        for _ in range(12):
            with enemy(server) as sock, contextlib.suppress(ConnectionError):
                sock.sendall(attack_frame)
                assert sock.recv(1) == b""
            if server.reached("request_elements_max") >= before + 3:
                break

    bystander.judge(attack)
    assert server.reached("request_elements_max") >= before + 3


def test_a_pattern_that_backtracks_takes_no_time(server: Attacked, bystander: Bystander) -> None:
    from wire import begin

    with Client(server.address(), clock=SystemClock()) as client:
        begin(client, "a" * 40)

        def attack() -> None:
            for _ in range(10):
                client.ask(ListTransactionsRequest(transactional_id_pattern="(a*)*(a*)*b"))

        bystander.judge(attack)


def bomb(megabytes: int) -> bytes:
    rows = [b"\0" * (1 << 20) for _ in range(megabytes)]
    columns = Columns(
        value=pa.array(rows, pa.binary()),
        timestamp_ms=pa.array(range(megabytes), pa.int64()),
    )
    parts = batches.encode(columns, default_timestamp_ms=0, compression=Compression.ZSTD)
    return b"".join(bytes(part) for part in parts)


def test_a_batch_that_unpacks_to_a_thousand_times_its_size_is_not_opened_in_the_loop(
    server: Attacked, bystander: Bystander
) -> None:
    before = server.reached("unpacked_bytes_max")
    with Client(server.address(), clock=SystemClock()) as client:
        topic = new_topic(client)
        part = PartitionProduceData(index=0, records=bomb(200))
        sent = ProduceRequest(
            acks=-1, topic_data=[TopicProduceData(name=topic, partition_data=[part])]
        )
        answer = client.ask(sent, Controller())
        assert answer.responses[0].partition_responses[0].error_code == Code.NONE
        asked = ListOffsetsPartition(partition_index=0, timestamp=150)
        request = ListOffsetsRequest(topics=[ListOffsetsTopic(name=topic, partitions=[asked] * 3)])

        def attack() -> None:
            for _ in range(3):
                found = client.ask(request, Controller()).topics[0].partitions[0]
                assert found.error_code == Code.CORRUPT_MESSAGE

        bystander.judge(attack)
    assert server.reached("unpacked_bytes_max") > before


def test_tls_handshakes_that_never_end_are_counted_and_timed(
    locked: Attacked, bystander_inside: Bystander
) -> None:
    before = locked.reached("handshakes_max")

    def attack() -> None:
        with enemies(locked, 100):
            until(lambda: locked.reached("handshake_within_ms") > 0)

    bystander_inside.judge(attack)
    assert locked.reached("handshakes_max") > before
    until(lambda: locked.metrics()["epochal_broker_handshakes"] == 0)


def _inside(locked: Attacked) -> ssl.SSLSocket:
    context = ssl.create_default_context(cafile=str(locked.certificates.ca))
    return context.wrap_socket(enemy(locked), server_hostname="localhost")


def test_clients_that_never_log_in_make_room_for_those_who_do(
    locked: Attacked, bystander_inside: Bystander
) -> None:
    def attack() -> None:
        with contextlib.ExitStack() as stack:
            for _ in range(60):
                stack.enter_context(_inside(locked))
            security = Security(
                tls=Tls(ca_file=str(locked.certificates.ca)),
                sasl=Plain(username="alice", password="alice-secret"),
            )
            with Client(locked.address(), clock=SystemClock(), security=security) as client:
                assert new_topic(client)

    bystander_inside.judge(attack)
    assert locked.reached("connections_before_login_max") > 0
    until(lambda: locked.metrics()["epochal_broker_connections_before_login"] == 0)


def test_a_frame_before_login_is_small(locked: Attacked) -> None:
    with _inside(locked) as sock:
        sock.sendall(struct.pack(">ihh", 600 << 10, 0, 9))
        assert sock.recv(1) == b""
    assert locked.reached("frame_before_login_bytes_max") == 1


def test_guessing_passwords_is_slow_and_disturbs_nobody(
    locked: Attacked, bystander_inside: Bystander
) -> None:
    taken: list[float] = []

    def guess(number: int) -> None:
        with _inside(locked) as sock:
            sock.sendall(frame(17, 1, b"\0\5PLAIN"))
            assert sock.recv(1 << 10)
            began = time.monotonic()
            text = b"\0alice\0guess %d" % number
            sock.sendall(frame(36, 0, struct.pack(">i", len(text)) + text))
            assert struct.unpack_from(">h", sock.recv(1 << 10), 8) == (58,)
            taken.append(time.monotonic() - began)
            assert sock.recv(1) == b""

    def attack() -> None:
        # Fewer at a time than `handshakes_max`, which a slow machine would reach.
        with ThreadPoolExecutor(15) as guessers:
            list(guessers.map(guess, range(25)))

    bystander_inside.judge(attack)
    assert len(taken) >= 25
    assert min(taken) >= 0.5


def test_every_limit_has_a_value_a_counter_and_a_line_in_the_docs(server: Attacked) -> None:
    from epochal.broker.core.settings import LIMITS

    found = server.metrics()
    page = (Path(__file__).parents[2] / "docs/reference/broker-apis.md").read_text()
    for limit in LIMITS:
        assert f'epochal_broker_limit{{limit="{limit}"}}' in found
        assert f'epochal_broker_limit_reached_total{{limit="{limit}"}}' in found
        assert re.search(rf"^\| `{limit}` \|", page, re.MULTILINE), limit


def test_the_judge_sees_a_broker_that_stands_still(
    server: Attacked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load of the machine is no part of it: it could explain any pause."""
    monkeypatch.setattr(Bystander, "undisturbed_s", lambda *_: 0.01)

    def attack() -> None:
        # With so little between them that of a hundred rows more than one waits.
        for _ in itertools.repeat(None, 4):
            server.pause()
            time.sleep(0.7)
            server.resume()
            time.sleep(0.005)

    with Client(server.address(), clock=SystemClock()) as client:
        bystander = Bystander(client, new_topic(client))
        with pytest.raises(AssertionError, match="p99"):
            bystander.judge(attack, seconds=0)
