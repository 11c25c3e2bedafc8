"""Unmodified clients of others: librdkafka, aiokafka, Java. What they see is what Apache shows."""

from __future__ import annotations

import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import confluent_kafka
import pytest
from client_jars import client_jars
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
)
from conftest_tools import new_topic
from servers.kafka import jars

from epochal.clock import SystemClock
from epochal.kafka.client import Client

HERE = Path(__file__).resolve().parent


@pytest.fixture(params=["ours", "apache"])
def address(request: pytest.FixtureRequest) -> str:
    server = request.getfixturevalue("broker" if request.param == "ours" else "apache")
    return server.address()


@pytest.fixture
def topic(address: str) -> str:
    with Client(address, clock=SystemClock()) as client:
        return new_topic(client, 3)


def fresh(about: str) -> str:
    return f"{about}-{uuid.uuid4().hex[:10]}"


def rd_producer(address: str, **options: object) -> Producer:
    return Producer({"bootstrap.servers": address, "transaction.timeout.ms": 20_000, **options})


def rd_consumer(address: str, **options: object) -> Consumer:
    return Consumer(
        {
            "bootstrap.servers": address,
            "group.id": fresh("group"),
            "auto.offset.reset": "earliest",
            "session.timeout.ms": 6_000,
            "heartbeat.interval.ms": 300,
            "enable.auto.commit": False,
            "check.crcs": True,
            **options,
        }
    )


def rd_read(consumer: Consumer, count: int, within_s: float = 60.0) -> list[bytes]:
    found: list[bytes] = []
    deadline = time.monotonic() + within_s
    while len(found) < count and time.monotonic() < deadline:
        for message in consumer.consume(count - len(found), timeout=0.3):
            assert message.error() is None, message.error()
            found.append(message.value())
    return found


def test_librdkafka_sees_only_what_was_committed(address: str, topic: str) -> None:
    producer = rd_producer(address, **{"transactional.id": fresh("tx")})
    producer.init_transactions(60)
    for number in range(4):
        producer.begin_transaction()
        for row in range(5):
            producer.produce(topic, f"{number}-{row}".encode(), partition=1)
        producer.flush(60)
        if number % 2:
            producer.abort_transaction(60)
        else:
            producer.commit_transaction(60)
    for level, wanted in (("read_committed", 10), ("read_uncommitted", 20)):
        consumer = rd_consumer(address, **{"isolation.level": level})
        consumer.assign([TopicPartition(topic, 1, 0)])
        rows = rd_read(consumer, wanted)
        assert len(rows) == wanted
        assert rd_read(consumer, 1, within_s=0.5) == []
        consumer.close()
    assert {row[:1] for row in rows} == {b"0", b"1", b"2", b"3"}


def test_librdkafkas_zombie_is_fenced(address: str, topic: str) -> None:
    name = fresh("tx")
    zombie = rd_producer(address, **{"transactional.id": name})
    zombie.init_transactions(60)
    zombie.begin_transaction()
    zombie.produce(topic, b"zombie", partition=0)
    zombie.flush(60)
    newer = rd_producer(address, **{"transactional.id": name})
    newer.init_transactions(60)
    with pytest.raises(KafkaException) as refused:
        zombie.commit_transaction(60)
    assert refused.value.args[0].code() in (
        confluent_kafka.KafkaError._FENCED,
        confluent_kafka.KafkaError.PRODUCER_FENCED,
    )
    newer.begin_transaction()
    newer.produce(topic, b"kept", partition=0)
    newer.commit_transaction(60)
    consumer = rd_consumer(address, **{"isolation.level": "read_committed"})
    consumer.assign([TopicPartition(topic, 0, 0)])
    assert rd_read(consumer, 1) == [b"kept"]
    consumer.close()


def test_librdkafka_reads_transforms_and_writes_exactly_once(address: str, topic: str) -> None:
    source = rd_producer(address)
    for number in range(30):
        source.produce(topic, b"%d" % number, partition=0)
    source.flush(60)
    group = fresh("group")
    consumer = rd_consumer(address, **{"group.id": group, "isolation.level": "read_committed"})
    consumer.subscribe([topic])
    producer = rd_producer(address, **{"transactional.id": fresh("tx")})
    producer.init_transactions(60)
    position = 0
    has_aborted = False
    deadline = time.monotonic() + 60
    while position < 30 and time.monotonic() < deadline:
        rows = [m for m in consumer.consume(10, timeout=0.3) if m.partition() == 0]
        if not rows:
            continue
        producer.begin_transaction()
        for message in rows:
            producer.produce(topic, b"out-" + message.value(), partition=2)
        position = rows[-1].offset() + 1
        producer.send_offsets_to_transaction(
            [TopicPartition(topic, 0, position)], consumer.consumer_group_metadata()
        )
        if has_aborted:
            producer.commit_transaction(60)
        else:
            producer.abort_transaction(60)
            has_aborted, position = True, 0
            consumer.seek(TopicPartition(topic, 0, 0))
    (committed,) = consumer.committed([TopicPartition(topic, 0)], timeout=60)
    assert committed.offset == 30
    consumer.close()
    reader = rd_consumer(address, **{"isolation.level": "read_committed"})
    reader.assign([TopicPartition(topic, 2, 0)])
    assert rd_read(reader, 30) == [b"out-%d" % number for number in range(30)]
    assert rd_read(reader, 1, within_s=0.5) == []
    reader.close()


def test_librdkafkas_groups_rebalance(address: str, topic: str) -> None:
    group = fresh("group")
    one = rd_consumer(address, **{"group.id": group})
    short = {"group.instance.id": "two", "session.timeout.ms": 2_000}
    two = rd_consumer(address, **{"group.id": group, **short})
    one.subscribe([topic])
    two.subscribe([topic])

    def parts() -> tuple[int, int]:
        one.poll(0.1)
        two.poll(0.1)
        return len(one.assignment()), len(two.assignment())

    wait_for(lambda: sorted(parts()) == [1, 2])
    two.close()
    # A static member does not leave by closing: its partitions stay until its session ends.
    assert parts_of(one) in (1, 2)
    admin = AdminClient({"bootstrap.servers": address})
    wait_for(lambda: (one.poll(0.1), len(one.assignment()) == 3)[1])
    response = admin.describe_consumer_groups([group])[group].result()
    assert len(response.members) == 1
    one.commit(offsets=[TopicPartition(topic, 0, 5)], asynchronous=False)
    one.close()
    assert [future.result() for future in admin.delete_consumer_groups([group]).values()] == [None]


def test_librdkafkas_newer_consumers_share_by_name_and_by_pattern(address: str, topic: str) -> None:
    producer = rd_producer(address)
    for number in range(30):
        producer.produce(topic, b"%d" % number, partition=number % 3)
    producer.flush(60)
    group = fresh("group")

    def join(*topics: str, **options: object) -> Consumer:
        consumer = Consumer(
            {
                "bootstrap.servers": address,
                "group.id": group,
                "group.protocol": "consumer",
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                **options,
            }
        )
        consumer.subscribe(list(topics))
        return consumer

    one = join(topic)
    assert sorted(map(int, rd_read(one, 30))) == list(range(30))
    one.commit(asynchronous=False)
    two = join(f"^{topic}(-none)?$", **{"group.instance.id": "two"})

    def parts() -> tuple[int, int]:
        one.poll(0.05)
        two.poll(0.05)
        return len(one.assignment()), len(two.assignment())

    wait_for(lambda: sorted(parts()) == [1, 2])
    found = {(part.topic, part.partition) for part in one.assignment() + two.assignment()}
    assert found == {(topic, index) for index in range(3)}
    admin = AdminClient({"bootstrap.servers": address})

    def described() -> tuple[str, str]:
        parts()
        response = admin.describe_consumer_groups([group])[group].result()
        return response.type.name, response.state.name

    # Not before the last of them has confirmed what it was given.
    wait_for(lambda: described() == ("CONSUMER", "STABLE"))
    kept = one.committed([TopicPartition(topic, index) for index in range(3)], timeout=60)
    assert [part.offset for part in kept] == [10, 10, 10]
    one.close()
    wait_for(lambda: (two.poll(0.05), len(two.assignment()) == 3)[1])
    assert rd_read(two, 1, within_s=0.5) == []
    two.close()


def parts_of(consumer: Consumer) -> int:
    return len(consumer.assignment())


def wait_for(is_so: Callable[[], bool], within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < deadline, "it did not come true in time"


def test_librdkafkas_admin(address: str) -> None:
    admin = AdminClient({"bootstrap.servers": address})
    name = fresh("made")
    (made,) = admin.create_topics([NewTopic(name, 2, 1)]).values()
    assert made.result(60) is None
    (again,) = admin.create_topics([NewTopic(name, 2, 1)]).values()
    with pytest.raises(KafkaException, match="TOPIC_ALREADY_EXISTS"):
        again.result(60)
    (grown,) = admin.create_partitions([NewPartitions(name, 4)]).values()
    assert grown.result(60) is None
    wait_for(lambda: len(admin.list_topics(name, timeout=60).topics[name].partitions) == 4)
    resource = ConfigResource(ConfigResource.Type.TOPIC, name)
    change = ConfigEntry("retention.ms", "12345", incremental_operation=AlterConfigOpType.SET)
    resource.add_incremental_config(change)
    (changed,) = admin.incremental_alter_configs([resource]).values()
    assert changed.result(60) is None
    asked = ConfigResource(ConfigResource.Type.TOPIC, name)

    def retention() -> str:
        return next(iter(admin.describe_configs([asked]).values())).result(60)["retention.ms"].value

    wait_for(lambda: retention() == "12345")
    (gone,) = admin.delete_topics([name]).values()
    assert gone.result(60) is None
    wait_for(lambda: name not in admin.list_topics(timeout=60).topics)


def test_aiokafka_writes_and_reads_in_transactions_and_groups(address: str, topic: str) -> None:
    lines = run_client([sys.executable, str(HERE / "aiokafka_client.py"), address, topic])
    kept = [f"kept {number}" for number in range(5)]
    assert lines == ["aborted", "fenced", *kept, "shared", "made and deleted"]


@pytest.mark.parametrize(
    ("program", "release"),
    [("Clients", "4.3.1"), ("Clients", "3.9.2"), ("NewerConsumers", "4.3.1")],
)
def test_the_java_clients_see_the_same_on_both(broker, apache, program: str, release: str) -> None:
    addresses = [broker.address(), apache.address()]
    with ThreadPoolExecutor() as pool:
        lines = list(pool.map(lambda address: run_java(address, program, release), addresses))
    assert lines[0] == lines[1]
    assert lines[0][-1] == "done"


def run_java(address: str, program: str, release: str) -> list[str]:
    path = jars() if release == "4.3.1" else client_jars(release)
    source = HERE / "java" / f"{program}.java"
    quiet = ("-XX:TieredStopAtLevel=1", "-Dlog4j2.level=OFF")
    command = ["java", *quiet, "-cp", f"{path}/*", str(source)]
    return run_client([*command, address, uuid.uuid4().hex[:8]])


def run_client(command: list[str]) -> list[str]:
    ran = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout.splitlines()
