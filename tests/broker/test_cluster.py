"""Brokers that share a journal: the active is killed and paused, and every record is there once."""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaException, Producer
from conftest_tools import PROOF_KILLS, new_topic
from servers.cluster import WITHIN_S, BrokerCluster, broker_cluster
from servers.etcd import NEW, running_etcd
from servers.fake_s3 import running_fake_s3
from servers.postgres import running_server
from test_confluent_kills import WRITERS, Writer, rows_of

from epochal.broker import embedded
from epochal.broker.shared import slots
from epochal.clock import SystemClock
from epochal.errors import Misconfigured
from epochal.kafka.client import Client


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


def run_under_faults(cluster: BrokerCluster, faults: list[str]) -> list[float]:
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
        gaps_s.append(max(after - before for before, after in itertools.pairwise(times_s)))
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


def copy_under_faults(cluster: BrokerCluster, faults: list[str]) -> None:
    """A consumer group copies a topic within transactions, offsets included, exactly once."""
    with Client(cluster.bootstrap, clock=SystemClock()) as client:
        source, target = new_topic(client, 2), new_topic(client, 2)
    writer = Producer({"bootstrap.servers": cluster.bootstrap, "enable.idempotence": True})
    rows = {b"%d" % number for number in range(400)}
    for number, row in enumerate(sorted(rows)):
        writer.produce(source, row, partition=number % 2)
    assert writer.flush(60) == 0
    is_over = threading.Event()
    copier = threading.Thread(target=copy, args=(cluster.bootstrap, source, target, is_over))
    copier.start()
    try:
        for fault in faults:
            strike(cluster, fault)
        deadline = time.monotonic() + 120
        while len(set(rows_of(cluster.bootstrap, target))) < len(rows):
            assert time.monotonic() < deadline, "the copy does not end"
            time.sleep(0.2)
    finally:
        is_over.set()
        copier.join(120)
    assert sorted(rows_of(cluster.bootstrap, target)) == sorted(rows)


def copy(bootstrap: str, source: str, target: str, is_over: threading.Event) -> None:
    while not is_over.is_set():
        settings = {"bootstrap.servers": bootstrap, "log_level": 0, "socket.timeout.ms": 5_000}
        consumer = Consumer(
            {
                **settings,
                "group.id": "copy",
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "isolation.level": "read_committed",
                "session.timeout.ms": 6_000,
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


@pytest.mark.proof
def test_a_group_copies_within_transactions_across_takeovers(tmp_path: Path) -> None:
    with broker_cluster(tmp_path, str(tmp_path / "journal")) as cluster:
        copy_under_faults(cluster, ["kill", "pause", "kill"])


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
        sys.stdout.write(f" {kind}: {sorted(round(gap, 2) for gap in gaps_s)} s without a commit ")
