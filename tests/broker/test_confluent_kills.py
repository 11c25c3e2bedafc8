"""confluent-kafka's transactions while the broker is killed: every row that was committed, once."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from conftest_tools import PROOF_KILLS, new_topic
from servers.embedded import EmbeddedServer

from epochal.clock import SystemClock
from epochal.kafka.client import Client

KILLS_SHORT = 2
WRITERS = 2


class Writer(threading.Thread):
    """One transactional producer of librdkafka, made anew where it can't go on."""

    def __init__(self, address: str, topic: str, number: int, is_over: threading.Event) -> None:
        super().__init__(daemon=True)
        self._address, self._topic, self._number = address, topic, number
        self._is_over = is_over
        self._count = 0
        self.committed: set[bytes] = set()
        self.aborted: set[bytes] = set()
        self.unknown: list[set[bytes]] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._is_over.is_set():
                self._work()
        except BaseException as error:  # noqa: BLE001  looked at by the test
            self.error = error

    def _work(self) -> None:
        producer = Producer(
            {
                "bootstrap.servers": self._address,
                "transactional.id": f"confluent-{self._number}",
                "transaction.timeout.ms": 60_000,
                "socket.timeout.ms": 5_000,
                "reconnect.backoff.max.ms": 200,
                "log_level": 0,
            }
        )
        chance = random.Random(self._number)
        try:
            producer.init_transactions(30)
            while not self._is_over.is_set():
                self._transaction(producer, chance)
        except KafkaException as error:
            if not error.args[0].retriable():
                return
            time.sleep(0.05)

    def _transaction(self, producer: Producer, chance: random.Random) -> None:
        self._count += 1
        whole = {b"%d-%d-%d" % (self._number, self._count, n) for n in range(chance.randint(1, 5))}
        producer.begin_transaction()
        for number, row in enumerate(sorted(whole)):
            producer.produce(self._topic, row, partition=number % 2)
        if chance.random() < 0.25:
            self.aborted |= whole
            producer.abort_transaction(30)
            return
        self.unknown.append(whole)
        try:
            producer.commit_transaction(30)
        except KafkaException as error:
            if error.args[0].txn_requires_abort():
                producer.abort_transaction(30)
            raise
        self.unknown.remove(whole)
        self.committed |= whole


def rows_of(address: str, topic: str, **settings: str) -> list[bytes]:
    consumer = Consumer(
        {
            "bootstrap.servers": address,
            "group.id": "counting",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            **settings,
        }
    )
    consumer.assign([TopicPartition(topic, number, 0) for number in (0, 1)])
    rows: list[bytes] = []
    ended: set[int] = set()
    while len(ended) < 2:
        message = consumer.poll(30)
        assert message is not None, "the topic does not end"
        if message.error() is None:
            rows.append(message.value())
        else:
            ended.add(message.partition())
    consumer.close()
    return rows


def kill_under_confluent(folder: Path, kills: int, *, fsync: bool) -> int:
    server = EmbeddedServer(folder, fsync=fsync)
    server.start()
    with Client(server.address(), clock=SystemClock()) as client:
        topic = new_topic(client, 2, segment_bytes="20000")
    is_over = threading.Event()
    writers = [Writer(server.address(), topic, number, is_over) for number in range(WRITERS)]
    for writer in writers:
        writer.start()
    chance = random.Random(5)
    for number in range(kills + 1):
        before = sum(len(writer.committed) for writer in writers)
        deadline = time.monotonic() + 120
        while sum(len(writer.committed) for writer in writers) == before:
            assert time.monotonic() < deadline, "nothing is committed any more"
            time.sleep(0.01)
        if number < kills:
            time.sleep(chance.uniform(0.02, 0.3))
            server.kill()
            server.start()
    is_over.set()
    for writer in writers:
        writer.join(120)
        assert not writer.is_alive()
        assert writer.error is None, writer.error
        # A new producer of the same name ends what was left open.
        last = Producer(
            {
                "bootstrap.servers": server.address(),
                "transactional.id": f"confluent-{writer._number}",
            }
        )
        last.init_transactions(60)
    rows = rows_of(server.address(), topic)
    server.stop()
    found = set(rows)
    assert len(rows) == len(found), "a row is there twice"
    for writer in writers:
        assert writer.committed <= found, "a committed row is lost"
        assert not writer.aborted & found, "an aborted row is visible"
        for whole in writer.unknown:
            assert whole <= found or not whole & found, "half a transaction is visible"
    return sum(len(writer.committed) for writer in writers)


def test_transactions_of_confluent_kafka_outlive_kills_of_the_broker(tmp_path: Path) -> None:
    assert kill_under_confluent(tmp_path / "data", KILLS_SHORT, fsync=True) > 0


@pytest.mark.proof
@pytest.mark.parametrize("fsync", [False, True], ids=["no-fsync", "fsync"])
def test_many_kills_lose_and_double_no_row_of_confluent_kafka(tmp_path: Path, fsync: bool) -> None:
    assert kill_under_confluent(tmp_path / "data", PROOF_KILLS, fsync=fsync) > 0
