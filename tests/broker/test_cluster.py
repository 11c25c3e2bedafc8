"""Brokers that share a journal: the active is killed and paused, and every record is there once."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import re
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from client_suites import FranzGo, command
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from conftest_tools import PROOF_KILLS, new_topic
from servers.cluster import WITHIN_S, BrokerCluster, broker_cluster
from servers.etcd import NEW, running_etcd
from servers.fake_s3 import running_fake_s3
from servers.kafka import Certificates, jars
from servers.ports import free_port
from servers.postgres import running_server
from servers.programs import CACHE, program
from test_confluent_kills import WRITERS, Writer, rows_of
from wire import fetch, values

from epochal.broker import embedded
from epochal.broker.core.entries import SlotTaken
from epochal.broker.core.settings import Settings
from epochal.broker.handlers import table
from epochal.broker.server import Cluster, Listener, running_member
from epochal.broker.shared import member, peers, slots, snapshots
from epochal.broker.shared.journal import SharedJournal
from epochal.broker.shared.peers import Peer
from epochal.broker.shared.protocol import Put
from epochal.broker.shared.snapshots import RecordObject
from epochal.broker.shared.status import cluster_status
from epochal.clock import SystemClock
from epochal.errors import EpochalError, Misconfigured
from epochal.kafka import batch_format
from epochal.kafka.client import Client
from epochal.kafka.codes import Code
from epochal.kafka.messages.consumer_group_heartbeat import ConsumerGroupHeartbeatRequest
from epochal.kafka.messages.describe_log_dirs import DescribeLogDirsRequest
from epochal.kafka.messages.end_txn import EndTxnRequest
from epochal.kafka.messages.fetch import FetchPartition, FetchRequest, FetchTopic
from epochal.kafka.messages.heartbeat import HeartbeatRequest
from epochal.kafka.messages.init_producer_id import InitProducerIdRequest
from epochal.kafka.messages.join_group import JoinGroupRequest
from epochal.kafka.messages.list_groups import ListGroupsRequest
from epochal.kafka.messages.list_transactions import ListTransactionsRequest
from epochal.kafka.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
)
from epochal.kafka.messages.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from epochal.kafka.messages.sync_group import SyncGroupRequest
from epochal.kafka.primitives import Message
from epochal.kafka.security import Plain, Security, Tls


class TimedWriter(Writer):
    """Knows when it has committed: the longest time between two commits is what a fault costs."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.times_s: list[float] = []

    def _transaction(self, producer: Producer, chance: random.Random) -> None:
        super()._transaction(producer, chance)
        self.times_s.append(time.monotonic())


def wait_for_commits(writers: list[TimedWriter]) -> None:
    """Until every writer has committed once more."""
    before = [len(writer.committed) for writer in writers]
    wait_until(
        lambda: all(len(w.committed) > count for w, count in zip(writers, before, strict=True))
    )


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 2 * WITHIN_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def strike(cluster: BrokerCluster, fault: str) -> None:
    """Take the active away, one way or another, and bring it back once another has taken over."""
    name = cluster.active()
    if fault == "kill":
        cluster.kill(name)
        assert cluster.active() != name
        cluster.members[name].start()
        return
    cluster.pause(name)
    assert cluster.active() != name
    cluster.resume(name)


def run_under_faults(cluster: BrokerCluster, faults: list[str]) -> list[tuple[str, float]]:
    """The time without a commit at each fault; every record is recounted at the end."""
    with Client(cluster.bootstrap, clock=SystemClock()) as client:
        topic = new_topic(client, 2, segment_bytes="20000")
    is_over = threading.Event()
    writers = [TimedWriter(cluster.bootstrap, topic, number, is_over) for number in range(WRITERS)]
    for writer in writers:
        writer.start()
    chance = random.Random(5)
    gaps_s = []
    wait_for_commits(writers)
    for fault in faults:
        time.sleep(chance.uniform(0.02, 0.3))
        began_s = time.monotonic()
        strike(cluster, fault)
        wait_for_commits(writers)
        times_s = sorted(at for writer in writers for at in writer.times_s if at > began_s - 1)
        longest_s = max(after - before for before, after in itertools.pairwise(times_s))
        gaps_s.append((fault, round(longest_s, 2)))
    is_over.set()
    for writer in writers:
        writer.join(120)
        assert not writer.is_alive()
        assert writer.error is None, writer.error
        name = {"transactional.id": f"confluent-{writer._number}"}
        Producer({"bootstrap.servers": cluster.bootstrap, **name}).init_transactions(60)
    judge(cluster, topic, writers)
    return gaps_s


def judge(cluster: BrokerCluster, topic: str, writers: list[TimedWriter]) -> None:
    rows = rows_of(cluster.bootstrap, topic)
    found = set(rows)
    assert len(rows) == len(found), "a row is there twice"
    for writer in writers:
        assert writer.committed, "nothing was committed"
        assert writer.committed <= found, "a committed row is lost"
        assert not writer.aborted & found, "an aborted row is visible"
        for whole in writer.unknown:
            assert whole <= found or not whole & found, "half a transaction is visible"
    cluster.wait_until_equal()
    cluster.kill_all()
    first, *others = (cluster.contents(name) for name in cluster.members)
    for other in others:
        assert other == first, "two members differ at rest"


def test_the_active_is_killed_and_paused_and_no_row_is_lost_or_doubled(tmp_path: Path) -> None:
    with broker_cluster(tmp_path, str(tmp_path / "journal")) as cluster:
        run_under_faults(cluster, ["kill", "pause"])


METADATA = struct.pack(">ihhihi", 14, 3, 1, 7, -1, -1)
"""A request for all topics, version 1."""


def connected(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=WITHIN_S)


def test_an_active_that_slept_through_its_end_answers_nobody_from_the_past(tmp_path: Path) -> None:
    with broker_cluster(tmp_path, str(tmp_path / "journal")) as cluster:
        old = cluster.active()
        with connected(cluster.members[old].address) as before:
            before.sendall(METADATA)
            assert len(before.recv(1 << 16)) > 4
            cluster.pause(old)
            before.sendall(METADATA)
            new = cluster.active()
            cluster.resume(old)
            with contextlib.suppress(ConnectionResetError):
                assert before.recv(1 << 16) == b""
        # A standby by now, which answers as soon as it has seen the end: it names the new active.
        answer, deadline = b"", time.monotonic() + WITHIN_S
        while not answer and time.monotonic() < deadline:
            with (
                contextlib.suppress(ConnectionError),
                connected(cluster.members[old].address) as after,
            ):
                after.sendall(METADATA)
                answer = after.recv(1 << 16)
        host, _, port = cluster.members[new].address.rpartition(":")
        assert struct.pack(f">h{len(host)}si", len(host), host.encode(), int(port)) in answer


def test_a_damaged_slot_and_a_lost_one_stop_a_member(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    journal = tmp_path / "journal"
    with broker_cluster(tmp_path, str(journal), "a") as cluster:
        with Client(cluster.bootstrap, clock=SystemClock()) as client:
            new_topic(client)
        cluster.stop()
        last = max((journal / "slots").iterdir())
        whole = last.read_bytes()
        last.chmod(0o600)
        last.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        other = BrokerCluster(tmp_path, str(journal), "b")
        with pytest.raises(Misconfigured):
            other.members["b"].start()
        assert f"slot {int(last.name)} of the shared journal is damaged" in capfd.readouterr().err
        last.unlink()
        with pytest.raises(Misconfigured):
            cluster.members["a"].start()
        lost = f"slot {int(last.name)} was there and is gone"
        assert lost in capfd.readouterr().err
        last.write_bytes(whole)
        cluster.members["a"].start()
        assert cluster.active() == "a"


def test_the_folder_of_a_single_broker_is_no_member(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with embedded.broker(tmp_path / "a"):
        pass
    with pytest.raises(Misconfigured):
        BrokerCluster(tmp_path, str(tmp_path / "journal"), "a").members["a"].start()
    assert "no member of a cluster" in capfd.readouterr().err


def test_a_member_can_go_on_alone_and_is_no_member_then(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with broker_cluster(tmp_path, str(tmp_path / "journal"), "a") as cluster:
        with Client(cluster.bootstrap, clock=SystemClock()) as client:
            topic = new_topic(client, 2)
        produce_rows(cluster, topic, range(10))
        cluster.stop()
        with embedded.broker(tmp_path / "a") as alone:
            assert len(rows_of(alone, topic)) == 10
        with pytest.raises(Misconfigured):
            cluster.members["a"].start()
    assert "no member of a cluster" in capfd.readouterr().err


ROWS_A_FAULT = 300
Copier = Callable[[str, str, str, threading.Event], None]


def copy_under_faults(cluster: BrokerCluster, faults: list[str], copy: Copier) -> None:
    """A consumer group copies a topic within transactions, offsets included, exactly once."""
    with Client(cluster.bootstrap, clock=SystemClock()) as client:
        source, target = new_topic(client, 2), new_topic(client, 2)
    writer = Producer({"bootstrap.servers": cluster.bootstrap, "enable.idempotence": True})
    rows: list[bytes] = []

    def add() -> None:
        for _ in range(ROWS_A_FAULT):
            rows.append(b"%d" % len(rows))
            writer.produce(source, rows[-1], partition=len(rows) % 2)
        assert writer.flush(2 * WITHIN_S) == 0

    def copied() -> int:
        return len(set(rows_of(cluster.bootstrap, target)))

    is_over = threading.Event()
    copier = threading.Thread(target=copy, args=(cluster.bootstrap, source, target, is_over))
    copier.start()
    try:
        for fault in faults:
            before = len(rows)
            add()
            wait_until(lambda: copied() > before)  # noqa: B023  called within the turn
            strike(cluster, fault)
        add()
        wait_until(lambda: copied() == len(rows))
    finally:
        is_over.set()
        copier.join(120)
    assert sorted(rows_of(cluster.bootstrap, target)) == sorted(rows)


def copy(protocol: str, bootstrap: str, source: str, target: str, is_over: threading.Event) -> None:
    while not is_over.is_set():
        settings = {"bootstrap.servers": bootstrap, "log_level": 0, "socket.timeout.ms": 5_000}
        consumer = Consumer(
            {
                **settings,
                "group.id": "copy",
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "isolation.level": "read_committed",
                "group.protocol": protocol,
                **({"session.timeout.ms": 6_000} if protocol == "classic" else {}),
            }
        )
        producer = Producer({**settings, "transactional.id": "copy"})
        try:
            consumer.subscribe([source])
            producer.init_transactions(30)
            while not is_over.is_set():
                _copy_some(consumer, producer, target)
        except KafkaException:
            time.sleep(0.1)
        finally:
            consumer.close()


def copy_by(
    words: list[str], bootstrap: str, source: str, target: str, is_over: threading.Event
) -> None:
    """By a program that copies until it is given a line."""
    with subprocess.Popen(
        [*words, bootstrap, source, target],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        is_over.wait()
        printed, _ = process.communicate("over\n", timeout=120)
    assert printed.splitlines()[-1] == "done"


def protocol_of(bootstrap: str, group: str) -> str:
    """By which protocol the members of a group have distributed its partitions."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    listed = admin.list_consumer_groups(request_timeout=WITHIN_S).result()
    assert not listed.errors, "a member that has no groups must say so"
    return next(one.type.name.lower() for one in listed.valid if one.group_id == group)


def go_program(source: Path) -> str:
    """A program that uses franz-go, compiled."""
    go, folder = program("go", "golang-go"), CACHE / f"go-{source.stem}"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, folder / "main.go")
    (folder / "go.mod").write_text(f"module {source.stem}\n")
    command([go, "get", FranzGo.module.replace("@", "/pkg/kgo@")], folder)
    command([go, "build", "-o", source.stem, "."], folder)
    return str(folder / source.stem)


def _copy_some(consumer: Consumer, producer: Producer, target: str) -> None:
    found = [one for one in consumer.consume(10, timeout=0.5) if one.error() is None]
    if not found:
        return
    producer.begin_transaction()
    for one in found:
        producer.produce(target, one.value(), partition=one.partition())
    places = consumer.position(consumer.assignment())
    producer.send_offsets_to_transaction(places, consumer.consumer_group_metadata(), 30)
    producer.commit_transaction(30)


def produce_rows(cluster: BrokerCluster, topic: str, rows: range) -> None:
    settings = {"bootstrap.servers": cluster.bootstrap, "enable.idempotence": True}
    producer = Producer({**settings, "linger.ms": 0, "log_level": 0})
    for number in rows:
        producer.produce(topic, b"%06d" % number + bytes(200), partition=number % 2)
        producer.poll(0)
        if number % 5 == 0:
            assert producer.flush(60) == 0
    assert producer.flush(60) == 0


def test_a_new_member_and_one_that_slept_begin_from_a_snapshot(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    with broker_cluster(tmp_path, str(journal), snapshot_slots=30) as cluster:
        with Client(cluster.bootstrap, clock=SystemClock()) as client:
            topic = new_topic(client, 2, segment_bytes="4000")
        old = cluster.active()
        produce_rows(cluster, topic, range(100))
        cluster.pause(old)
        # The next slot of the paused one is a claim; what it has read last is deleted under it.
        assert cluster.active() != old
        count, deadline = 100, time.monotonic() + 2 * WITHIN_S
        while deleted_slots(journal) < 40 or count < 400:
            produce_rows(cluster, topic, range(count, count + 100))
            count += 100
            assert time.monotonic() < deadline, "no slot is deleted"
        cluster.resume(old)
        with broker_cluster(tmp_path, str(journal), "c") as third:
            rows = rows_of(cluster.bootstrap, topic)
            assert sorted(int(row[:6]) for row in rows) == list(range(count))
            together = BrokerCluster(tmp_path, str(journal), "")
            together.members = {**cluster.members, **third.members}
            together.wait_until_equal()
            together.kill_all()
            first, *others = (together.contents(name) for name in "abc")
            assert others == [first, first]
        kept = sorted(int(file.name) for file in (journal / "slots").iterdir())
        claims = [number for number in kept if is_claim(journal, number)]
        assert len(claims) >= 2
        assert claims[0] == 1
        assert len(kept) < max(kept)


def deleted_slots(journal: Path) -> int:
    numbers = [int(file.name) for file in (journal / "slots").iterdir() if file.name.isdigit()]
    return max(numbers) - len(numbers)


def is_claim(journal: Path, number: int) -> bool:
    data = (journal / "slots" / f"{number:020d}").read_bytes()
    return slots.decode(number, data).kind is slots.Kind.CLAIM


class Sender(threading.Thread):
    """Writes numbered rows one after the other, each once the one before is acknowledged."""

    def __init__(self, bootstrap: str, topic: str, **settings: Any) -> None:
        super().__init__(daemon=True)
        settings = {"bootstrap.servers": bootstrap, "enable.idempotence": True, **settings}
        self._producer = Producer({**settings, "linger.ms": 0, "log_level": 0})
        self._topic = topic
        self.is_over = threading.Event()
        self.acknowledged = 0

    def run(self) -> None:
        while not self.is_over.is_set():
            row = b"%d" % self.acknowledged
            self._producer.produce(self._topic, row, partition=self.acknowledged % 2)
            if self._producer.flush(2 * WITHIN_S):
                return
            self.acknowledged += 1

    def goes_on(self) -> None:
        """Until two more rows are acknowledged: the first may have been sent before."""
        before = self.acknowledged
        wait_until(lambda: self.acknowledged > before + 1)

    def comes_to_rest(self, seconds: float) -> None:
        """Until nothing has been acknowledged for so long."""
        deadline = time.monotonic() + WITHIN_S
        before = -1
        while before != self.acknowledged:
            assert time.monotonic() < deadline, "it goes on without its store"
            before = self.acknowledged
            time.sleep(seconds)

    def end(self) -> list[int]:
        self.is_over.set()
        self.join(2 * WITHIN_S)
        assert not self.is_alive()
        return list(range(self.acknowledged))


def test_a_store_that_is_away_or_reads_only_delays_and_loses_nothing(tmp_path: Path) -> None:
    with (
        running_server() as server,
        broker_cluster(tmp_path, f"{server.url()}#away") as cluster,
    ):
        with Client(cluster.bootstrap, clock=SystemClock()) as client:
            topic = new_topic(client, 2)
        sender = Sender(cluster.bootstrap, topic)
        sender.start()
        sender.goes_on()
        before = cluster.active()
        server.kill()
        sender.comes_to_rest(3.5)  # longer than a member that does not answer is waited for
        server.start()
        sender.goes_on()
        with psycopg.connect(server.url(), autocommit=True) as connection:
            connection.execute("ALTER SYSTEM SET default_transaction_read_only = on")
            connection.execute("SELECT pg_reload_conf()")
            sender.comes_to_rest(1.0)
            connection.execute("SET default_transaction_read_only = off")
            connection.execute("ALTER SYSTEM RESET default_transaction_read_only")
            connection.execute("SELECT pg_reload_conf()")
        sender.goes_on()
        assert cluster.active() == before, "a member that waits for the store is alive"
        rows = sender.end()
        assert sorted(map(int, rows_of(cluster.bootstrap, topic))) == rows


def test_a_full_store_delays_and_loses_nothing(tmp_path: Path, small_disk: Path) -> None:
    with broker_cluster(tmp_path, str(small_disk / "journal")) as cluster:
        with Client(cluster.bootstrap, clock=SystemClock()) as client:
            topic = new_topic(client, 2)
        sender = Sender(cluster.bootstrap, topic)
        sender.start()
        sender.goes_on()
        filler = small_disk / "filler"
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        sender.comes_to_rest(1.0)
        filler.unlink()
        sender.goes_on()
        rows = sender.end()
        assert sorted(map(int, rows_of(cluster.bootstrap, topic))) == rows
        cluster.wait_until_equal()


def test_clients_with_tls_and_passwords_go_on_after_a_takeover(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    users = {"alice": "alice-secret"}
    options = {
        "host": "localhost",
        "users": users,
        "certificate_file": str(certificates.server),
    }
    security = {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "SCRAM-SHA-256",
        "sasl.username": "alice",
        "sasl.password": "alice-secret",
        "ssl.ca.location": str(certificates.ca),
    }
    with broker_cluster(tmp_path, str(tmp_path / "journal"), options=options) as cluster:
        own = Security(
            tls=Tls(ca_file=str(certificates.ca)),
            sasl=Plain(username="alice", password="alice-secret"),
        )
        with Client(cluster.bootstrap, clock=SystemClock(), security=own) as client:
            topic = new_topic(client, 2)
        sender = Sender(cluster.bootstrap, topic, **security)
        sender.start()
        sender.goes_on()
        strike(cluster, "kill")
        sender.goes_on()
        rows = sender.end()
        assert sorted(map(int, rows_of(cluster.bootstrap, topic, **security))) == rows


def large_row(number: int) -> bytes:
    return b"%06d" % number + bytes(random.Random(number).randbytes(100_000))


def test_large_batches_go_to_the_store_of_segments(tmp_path: Path) -> None:
    journal, segments = tmp_path / "journal", tmp_path / "segments"
    options = {"segments": str(segments), "snapshot_slots": 12}
    with broker_cluster(tmp_path, str(journal), **options) as cluster:
        with Client(cluster.bootstrap, clock=SystemClock()) as client:
            topic = new_topic(client, 2, segment_bytes="250000")
        writer = Producer({"bootstrap.servers": cluster.bootstrap, "enable.idempotence": True})
        count = 0

        def write(rows: int) -> None:
            nonlocal count
            for number in range(count, count + rows):
                writer.produce(topic, large_row(number), partition=number % 2)
                assert writer.flush(2 * WITHIN_S) == 0
            count += rows

        write(4)
        assert len(list((segments / "batches").iterdir())) == 4
        assert max(file.stat().st_size for file in (journal / "slots").iterdir()) < 2_000
        strike(cluster, "kill")  # the next active has them from there
        write(2)
        first = {file.name for file in (segments / "batches").iterdir()}
        deadline = time.monotonic() + 2 * WITHIN_S
        while {file.name for file in (segments / "batches").iterdir()} & first:
            write(4)  # until they are in two snapshots
            assert time.monotonic() < deadline, "batches stay for ever"
        with broker_cluster(tmp_path, str(journal), "c", **options) as third:
            together = BrokerCluster(tmp_path, str(journal), "")
            together.members = {**cluster.members, **third.members}
            rows = rows_of(cluster.bootstrap, topic)
            assert sorted(rows) == [large_row(number) for number in range(count)]
            together.wait_until_equal()
            together.kill_all()
            first_one, *others = (together.contents(name) for name in "abc")
            assert others == [first_one, first_one]


def test_a_batch_that_is_gone_from_the_store_of_segments_stops_a_member(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    journal, segments = tmp_path / "journal", tmp_path / "segments"
    with broker_cluster(tmp_path, str(journal), "a", segments=str(segments)) as cluster:
        with Client(cluster.bootstrap, clock=SystemClock()) as client:
            topic = new_topic(client, 2)
        writer = Producer({"bootstrap.servers": cluster.bootstrap})
        writer.produce(topic, large_row(0), partition=0)
        assert writer.flush(2 * WITHIN_S) == 0
        cluster.kill("a")
        (batch,) = (segments / "batches").iterdir()
        batch.unlink()
        other = BrokerCluster(tmp_path, str(journal), "b", segments=str(segments))
        with pytest.raises(Misconfigured):
            other.members["b"].start()
        number = int(batch.name.partition(".")[0])
        assert f"a batch of slot {number} is gone" in capfd.readouterr().err
        # Who has it itself goes on.
        cluster.members["a"].start()
        assert cluster.active() == "a"


async def ask(address: str) -> bytes:
    """The answer to a request for metadata."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(METADATA)
        return await reader.read(1 << 16)
    finally:
        writer.close()


def test_a_request_waits_for_the_member_that_is_claiming(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_claim = threading.Event()
    carry_out = SharedJournal.carry_out

    def late(journal: SharedJournal, action: Any) -> Any:
        if isinstance(action, Put):
            assert may_claim.wait(WITHIN_S)
        return carry_out(journal, action)

    monkeypatch.setattr(SharedJournal, "carry_out", late)
    monkeypatch.setattr(member, "_HELD_S", WITHIN_S)

    async def run() -> None:
        failed: list[BaseException] = []
        cluster = Cluster(journal=str(tmp_path / "j"), member="a", advertised="127.0.0.1:0")
        listener = Listener(port=0)
        async with running_member(
            tmp_path / "a", listener, Settings(), cluster, fail=failed.append
        ) as address:
            answer = asyncio.create_task(ask(f"{address.host}:{address.port}"))
            await asyncio.sleep(0.5)
            assert not answer.done(), "answered before it is known who is the active"
            may_claim.set()
            shown = struct.pack(">h9si", 9, b"127.0.0.1", address.port)
            assert shown in await asyncio.wait_for(answer, WITHIN_S)
        assert not failed

    asyncio.run(run())


@pytest.fixture
def cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where files say what members can't reach."""
    folder = tmp_path / "cut-off"
    folder.mkdir()
    monkeypatch.setenv("CUT_OFF", str(folder))
    program = Path(__file__).with_name("cut_off_member.py")
    monkeypatch.setattr(embedded.BrokerProcess, "PROGRAM", (str(program),))
    return folder


def test_members_that_do_not_reach_each_other_leave_an_active_that_writes_alone(
    tmp_path: Path, cut_off: Path
) -> None:
    """As behind a firewall that lets clients through, and both of them to the store."""
    (cut_off / "members").touch()
    journal = tmp_path / "j"

    def claims() -> int:
        numbers = [int(file.name) for file in (journal / "slots").iterdir() if file.name.isdigit()]
        return sum(is_claim(journal, number) for number in numbers)

    def created(bootstrap: str) -> str:
        while True:  # as long as nobody writes, they do take over from each other
            with contextlib.suppress(EpochalError), Client(bootstrap, clock=SystemClock()) as one:
                return new_topic(one, 2)

    cluster = BrokerCluster(tmp_path, str(journal))
    try:
        for one in cluster.members.values():
            one.start()
        sender = Sender(cluster.bootstrap, created(cluster.bootstrap))
        sender.start()
        sender.goes_on()
        before, until = claims(), time.monotonic() + 4
        while time.monotonic() < until:
            sender.goes_on()
        assert claims() == before, "an active that writes was taken over"
        sender.end()
    finally:
        for one in cluster.members.values():
            one.kill()


def test_an_active_that_alone_does_not_reach_the_store_is_taken_over(
    tmp_path: Path, cut_off: Path
) -> None:
    with broker_cluster(tmp_path, str(tmp_path / "j")) as cluster:
        with Client(cluster.bootstrap, clock=SystemClock()) as client:
            topic = new_topic(client, 2)
        quick = {"socket.timeout.ms": 1_000, "request.timeout.ms": 500}
        sender = Sender(cluster.bootstrap, topic, **quick)
        sender.start()
        sender.goes_on()
        old = cluster.active()
        sign = cut_off / f"store-{cluster.members[old].pid}"
        sign.touch()
        sender.goes_on()
        members = cluster_status(cluster.journal).members
        assert any(one.role == "active" for one in members if one.member != old)
        sign.unlink()  # it finds that it is fenced
        sender.goes_on()
        expected = sender.end()
        assert sorted(map(int, rows_of(cluster.bootstrap, topic))) == expected


def test_an_active_that_was_never_heard_is_given_up_later_every_time() -> None:
    hearing = peers.Hearing(0.0)
    limits_s = []
    for number in range(7):
        hearing.begin(b"%d" % number, 0.0)
        limits_s.append(hearing.limit_s)
        assert hearing.given_up() == number + 1
        assert hearing.given_up() == 0  # its end is said once
    assert limits_s == [2, 4, 8, 16, 32, 60, 60]
    hearing.begin(b"another", 0.0)
    hearing.hear(1.0)
    assert hearing.given_up() == 0
    assert hearing.limit_s == 2


def test_a_snapshot_is_finished_though_records_are_deleted_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After every object of the first two of them, all logs begin one record later."""
    journal = tmp_path / "j"
    put_object, deleted = SharedJournal.put_object, 0
    clients: list[Callable[[int], None]] = []

    def late(shared: SharedJournal, one: Any, data: bytes) -> None:
        nonlocal deleted
        put_object(shared, one, data)
        if len(list(journal.glob("snapshots/[0-9]*"))) < 2:
            deleted += 1
            clients[0](deleted)

    def use(bootstrap: str) -> tuple[str, int]:
        admin = AdminClient({"bootstrap.servers": bootstrap})
        with Client(bootstrap, clock=SystemClock()) as client:
            topic = new_topic(client, 3)

        def delete(offset: int) -> None:
            places = [TopicPartition(topic, number, offset) for number in range(3)]
            for future in admin.delete_records(places).values():
                future.result(WITHIN_S)

        clients.append(delete)
        producer = Producer({"bootstrap.servers": bootstrap})
        count, deadline = 0, time.monotonic() + WITHIN_S
        while not deleted_slots(journal):
            for number in range(count, count + 30):
                producer.produce(topic, b"%d" % number, partition=number % 3)
                assert producer.flush(WITHIN_S) == 0
            count += 30
            assert time.monotonic() < deadline, "no snapshot is finished"
        return topic, count

    async def run(other: BrokerCluster) -> tuple[str, int]:
        cluster = Cluster(
            journal=str(journal), member="a", advertised="127.0.0.1:0", snapshot_slots=30
        )
        failed: list[BaseException] = []
        async with running_member(
            tmp_path / "a", Listener(port=0), Settings(), cluster, fail=failed.append
        ) as address:
            found = await asyncio.to_thread(use, f"{address.host}:{address.port}")
            # It begins from the second one.
            await asyncio.to_thread(other.members["b"].start)
        assert not failed
        return found

    monkeypatch.setattr(SharedJournal, "put_object", late)
    other = BrokerCluster(tmp_path, str(journal), "b")
    try:
        topic, count = asyncio.run(run(other))
        rows = rows_from(other.bootstrap, topic, deleted)
        assert sorted(int(row or b"") for row in rows) == list(range(3 * deleted, count))
    finally:
        other.members["b"].kill()


def rows_from(bootstrap: str, topic: str, offset: int) -> list[bytes | None]:
    with Client(bootstrap, clock=SystemClock()) as client:
        return [
            row
            for partition in range(3)
            for row in values(fetch(client, topic, partition=partition, offset=offset)[0])
        ]


def test_what_a_failed_snapshot_has_written_is_deleted(tmp_path: Path) -> None:
    journal = SharedJournal(str(tmp_path / "j"), SystemClock())

    def written(number: int) -> RecordObject:
        data = marker_at(number)
        one = snapshots.record_object(number, 1, number, number + 1, data)
        journal.put_object(one, data)
        return one

    kept: list[RecordObject] = []
    for number in (10, 20, 30):
        written(number - 1)  # of a snapshot that never came to its end
        one = written(number)
        position = SlotTaken(number, 0, 1, "", "", [])
        journal.put_snapshot(snapshots.Snapshot(position, b"", [*kept, one]))
        kept = [one]
    written(31)  # of one that is under way
    journal.prune()
    names = sorted(int(file.name[:20]) for file in (tmp_path / "j" / "records").iterdir())
    assert names == [10, 20, 29, 30, 31]
    journal.close()


def marker_at(offset: int) -> bytes:
    who = batch_format.Producer(producer_id=1, producer_epoch=0, is_transactional=True)
    commit = batch_format.Marker.COMMIT
    parts = batch_format.encode_marker(commit, producer=who, coordinator_epoch=0, timestamp_ms=0)
    return struct.pack(">q", offset) + b"".join(bytes(part) for part in parts)[8:]


def test_only_partitions_with_more_records_are_written_again() -> None:
    def one(first: int, end: int, size: int) -> RecordObject:
        return RecordObject(f"records/{first}", 1, first, end, first, 0, size, 0)

    large, small = one(0, 10, 4 << 20), one(10, 12, 100)
    assert snapshots.kept_objects([large, small], 0, 12) == [large, small]
    assert snapshots.kept_objects([large, small], 0, 13) == [large]
    assert snapshots.kept_objects([large, small], 10, 13) == []
    # What it begins with may not be there any more.
    assert snapshots.kept_objects([large, small], 11, 13) == [small]


def test_two_clusters_do_not_share_a_store_of_segments(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    segments = str(tmp_path / "segments")
    with broker_cluster(tmp_path / "1", str(tmp_path / "j1"), "a", segments=segments):
        other = BrokerCluster(tmp_path / "2", str(tmp_path / "j2"), "a", segments=segments)
        with pytest.raises(Misconfigured):
            other.members["a"].start()
    assert "is that of another cluster" in capfd.readouterr().err


def test_the_folder_of_another_cluster_is_left_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Though the journal that it is pointed at by mistake has newer snapshots."""
    with broker_cluster(tmp_path / "1", str(tmp_path / "j1"), "a") as first:
        with Client(first.bootstrap, clock=SystemClock()) as client:
            topic = new_topic(client, 2)
        produce_rows(first, topic, range(10))
    with broker_cluster(tmp_path / "2", str(tmp_path / "j2"), "b", snapshot_slots=20) as second:
        with Client(second.bootstrap, clock=SystemClock()) as client:
            other = new_topic(client, 2)
        count, deadline = 0, time.monotonic() + WITHIN_S
        while not deleted_slots(tmp_path / "j2"):
            produce_rows(second, other, range(count, count + 50))
            count += 50
            assert time.monotonic() < deadline
        astray = BrokerCluster(tmp_path / "1", str(tmp_path / "j2"), "a")
        with pytest.raises(Misconfigured):
            astray.members["a"].start()
    assert "is the journal of the cluster" in capfd.readouterr().err
    first.members["a"].start()
    assert len(rows_of(first.bootstrap, topic)) == 10
    first.kill_all()


def test_members_reach_each_other_by_ipv6(tmp_path: Path) -> None:
    journal, options = str(tmp_path / "journal"), {"host": "::1"}
    with broker_cluster(tmp_path, journal, options=options, advertised="[::1]:0") as cluster:
        old = cluster.active()
        addresses = {member.address for member in cluster.members.values()}
        wait_until(lambda: {one.address for one in cluster_status(journal).members} == addresses)
        cluster.kill(old)
        assert cluster.active() != old
        with Client(cluster.bootstrap, clock=SystemClock()) as client:
            new_topic(client, 1)


def test_a_standby_answers_whom_to_ask_instead(tmp_path: Path) -> None:
    """In every version: a client that is cut off may take it for a server that wants SASL."""
    group = {
        "group_id": "g",
        "member_id": "m",
    }
    part = [OffsetCommitRequestPartition(partition_index=3)]
    requests: list[tuple[Message, Callable[[Any], int]]] = [
        (HeartbeatRequest(**group), lambda found: found.error_code),
        (JoinGroupRequest(**group, protocol_type="consumer"), lambda found: found.error_code),
        (SyncGroupRequest(**group), lambda found: found.error_code),
        (EndTxnRequest(transactional_id="t"), lambda found: found.error_code),
        (InitProducerIdRequest(transactional_id="t"), lambda found: found.error_code),
        (ConsumerGroupHeartbeatRequest(**group), lambda found: found.error_code),
        (
            OffsetCommitRequest(
                **group, topics=[OffsetCommitRequestTopic(name="x", partitions=part)]
            ),
            lambda found: found.topics[0].partitions[0].error_code,
        ),
        (
            ProduceRequest(
                acks=-1,
                topic_data=[
                    TopicProduceData(name="x", partition_data=[PartitionProduceData(index=2)])
                ],
            ),
            lambda found: found.responses[0].partition_responses[0].error_code,
        ),
        (
            FetchRequest(topics=[FetchTopic(topic="x", partitions=[FetchPartition(partition=2)])]),
            lambda found: found.responses[0].partitions[0].error_code,
        ),
    ]
    with broker_cluster(tmp_path, str(tmp_path / "journal")) as cluster:
        active = cluster.active()
        (standby,) = (one for name, one in cluster.members.items() if name != active)
        for request, code_of in requests:
            for version in table()[request.API_KEY].versions:
                answer = answer_to(standby.address, request, version)
                code = code_of(answer)
                assert code in (Code.NOT_COORDINATOR, Code.NOT_LEADER_OR_FOLLOWER), (request, code)
        # Tools ask every broker, and put the answers together.
        for asked in (ListGroupsRequest(), ListTransactionsRequest(), DescribeLogDirsRequest()):
            for version in table()[asked.API_KEY].versions:
                assert answer_to(standby.address, asked, version).error_code == 0
        # Of no coordinator: a client would ask the same member for ever if it were answered.
        with pytest.raises(struct.error):
            answer_to(standby.address, InitProducerIdRequest(transactional_id=None), 4)


def answer_to(address: str, request: Message, version: int) -> Message:
    parts: list[Any] = []
    is_flexible = version >= request.FLEXIBLE_FROM
    head = struct.pack(">hhih", request.API_KEY, version, 7, -1) + b"\0" * is_flexible
    request.ENCODERS[version](parts.append, request)
    body = head + b"".join(bytes(part) for part in parts)
    with connected(address) as one:
        one.sendall(struct.pack(">i", len(body)) + body)
        file = one.makefile("rb")
        (size,) = struct.unpack(">i", file.read(4))
        return request.decode_response(version, file.read(size), 4 + is_flexible)


def test_an_active_waits_for_standbys_that_are_behind(tmp_path: Path) -> None:
    metrics_port = free_port()
    options = {"metrics_port": metrics_port}
    with broker_cluster(tmp_path, str(tmp_path / "journal"), "a", options=options) as cluster:

        def throttled() -> int:
            url = f"http://127.0.0.1:{metrics_port}/metrics"
            with urllib.request.urlopen(url) as answer:
                text = answer.read().decode()
            found = re.search(r"^epochal_broker_member_throttled_total (\d+)$", text, re.MULTILINE)
            return int(found[1])

        journal = SharedJournal(cluster.journal, SystemClock())
        (record,), secret = journal.members(), journal.secret()
        with Client(cluster.bootstrap, clock=SystemClock()) as client:
            topic = new_topic(client, 2)
        sender = Sender(cluster.bootstrap, topic)
        sender.start()

        async def stand_by(slot: int, is_enough: Callable[[], bool]) -> None:
            """As a standby that has taken in this slot and no more."""
            peer = Peer(record.peer_host, record.peer_port, secret or b"")
            deadline = time.monotonic() + WITHIN_S
            while not is_enough():
                await peer.ask({"member": "z", "slot": slot})
                assert time.monotonic() < deadline
                await asyncio.sleep(0.1)
            peer.close()

        asyncio.run(stand_by(1, lambda: throttled() > 5))
        # One that is at the end is waited for no more.
        counts = [-1, -2]

        def is_steady() -> bool:
            counts.append(throttled())
            return counts[-1] == counts[-3]

        asyncio.run(stand_by(1 << 40, is_steady))
        sender.goes_on()
        sender.end()
        journal.close()


@pytest.mark.proof
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_group_copies_within_transactions_across_takeovers(tmp_path: Path, protocol: str) -> None:
    with broker_cluster(tmp_path, str(tmp_path / "journal")) as cluster:
        copy_under_faults(cluster, ["kill", "pause", "kill"], partial(copy, protocol))
        assert protocol_of(cluster.bootstrap, "copy") == protocol


@pytest.mark.proof
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_javas_group_copies_within_transactions_across_takeovers(
    tmp_path: Path, protocol: str
) -> None:
    options = ["-XX:TieredStopAtLevel=1", "-Dlog4j2.level=OFF", "-cp", f"{jars()}/*"]
    words = ["java", *options, str(Path(__file__).parent / "java" / "Copy.java"), protocol]
    with broker_cluster(tmp_path, str(tmp_path / "journal")) as cluster:
        copy_under_faults(cluster, ["kill", "pause", "kill"], partial(copy_by, words))
        assert protocol_of(cluster.bootstrap, f"java-copy-{protocol}") == protocol


@pytest.mark.proof
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_franz_gos_group_copies_within_transactions_across_takeovers(
    tmp_path: Path, protocol: str
) -> None:
    words = [go_program(Path(__file__).parent / "go" / "copy.go"), protocol]
    with broker_cluster(tmp_path, str(tmp_path / "journal")) as cluster:
        copy_under_faults(cluster, ["kill", "pause", "kill"], partial(copy_by, words))
        assert protocol_of(cluster.bootstrap, "go-copy") == protocol


@contextlib.contextmanager
def store(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if kind == "postgres":
        with running_server() as server:
            yield f"{server.url()}#storm"
    elif kind.startswith("etcd"):
        with running_etcd(size=int(kind[-1]), suite=NEW) as etcd:
            yield etcd.url("storm/journal")
    elif kind == "s3":
        with running_fake_s3(monkeypatch):
            yield "s3://bucket/storm"
    else:
        yield str(folder / "journal")


@pytest.mark.proof
@pytest.mark.parametrize("kind", ["folder", "postgres", "etcd1", "etcd3", "s3"])
def test_many_takeovers_lose_and_double_no_row(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    chance = random.Random(3)
    segments = str(tmp_path / "segments") if kind.startswith("etcd") else ""
    faults = [chance.choice(("kill", "pause")) for _ in range(max(PROOF_KILLS // 5, 2))]
    with (
        store(kind, tmp_path, monkeypatch) as journal,
        broker_cluster(
            tmp_path,
            journal,
            "abc",
            snapshot_slots=200,
            segments=segments,
        ) as cluster,
    ):
        gaps_s = run_under_faults(cluster, faults)
    with capsys.disabled():
        sys.stdout.write(f" {kind}: seconds without a commit {sorted(gaps_s)} ")
