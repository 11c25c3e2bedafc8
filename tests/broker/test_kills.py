"""A broker that is killed again and again while clients write: nothing lost, nothing twice."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from conftest_tools import new_topic
from servers.embedded import EmbeddedServer
from wire import Transaction, add_partition, end, fetch, produce, values

from epochal.broker.embedded import BrokerProcess
from epochal.clock import SystemClock
from epochal.errors import EpochalError
from epochal.kafka import batch_reader
from epochal.kafka.client import Client, Patience
from epochal.kafka.cluster import Coordinator, Leader
from epochal.kafka.codes import Code
from epochal.kafka.messages.fetch import FetchPartition, FetchRequest, FetchTopic
from epochal.kafka.messages.init_producer_id import InitProducerIdRequest

Server = EmbeddedServer | BrokerProcess
KILLS = int(os.environ.get("BROKER_KILLS", "9"))
WRITERS = 3


class Writer(threading.Thread):
    """Commits rows in small transactions, and remembers the answer to each."""

    def __init__(self, address: str, topic: str, number: int, is_over: threading.Event) -> None:
        super().__init__(daemon=True)
        self.address, self.topic, self.number = address, topic, number
        self.is_over = is_over
        self.committed: list[bytes] = []
        self.aborted: list[bytes] = []
        self.unknown: list[set[bytes]] = []
        self.error: BaseException | None = None
        self._count = 0

    def run(self) -> None:
        chance = random.Random(self.number)
        patience = Patience(total_s=20)
        with Client(self.address, clock=SystemClock(), patience=patience) as client:
            while not self.is_over.is_set():
                try:
                    self._transaction(client, chance)
                except EpochalError:
                    time.sleep(0.02)
                except BaseException as error:
                    self.error = error
                    raise

    def _transaction(self, client: Client, chance: random.Random) -> None:
        name = f"writer-{self.number}"
        request = InitProducerIdRequest(transactional_id=name, transaction_timeout_ms=60_000)
        given = client.ask(request, Coordinator(name), is_repeatable=True)
        assert given.error_code == 0, given
        txn = Transaction(name, given.producer_id, given.producer_epoch)
        self._count += 1
        rows = [b"%d-%d-%d" % (self.number, self._count, n) for n in range(chance.randint(1, 4))]
        is_commit = chance.random() < 0.7
        if chance.random() < 0.5:
            add_partition(client, txn, self.topic, 0)
        for partition in (0, 1):
            mine: list[bytes | None] = [row + b"-%d" % partition for row in rows]
            code = produce(client, self.topic, mine, partition=partition, txn=txn)
            assert code in (Code.NONE, Code.INVALID_TXN_STATE), code
        whole = {row + b"-%d" % partition for row in rows for partition in (0, 1)}
        if not is_commit:
            self.aborted += whole
        else:
            self.unknown.append(whole)
        code = end(client, txn, commit=is_commit).error_code
        assert code in (Code.NONE, Code.INVALID_TXN_STATE, Code.PRODUCER_FENCED), code
        if is_commit and code == Code.NONE:
            self.unknown.remove(whole)
            self.committed += whole


def await_more(writers: Sequence[Writer], within_s: float = 60.0) -> None:
    """Until some transaction more is acknowledged: a kill among none would prove nothing."""
    before = sum(len(writer.committed) for writer in writers)
    deadline = time.monotonic() + within_s
    while sum(len(writer.committed) for writer in writers) == before:
        assert time.monotonic() < deadline, "nothing is committed any more"
        time.sleep(0.005)


def seen(client: Client, topic: str) -> list[bytes]:
    rows: list[bytes] = []
    for partition in (0, 1):
        found, answer = fetch(client, topic, committed=True, partition=partition)
        part = answer.responses[0].partitions[0]
        assert part.last_stable_offset == part.high_watermark, "something is still open"
        aborted = aborted_of(client, topic, partition)
        kept = [b for b in batch_reader.committed(found, aborted) if not b.is_control]
        rows += [row for row in values(kept) if row is not None]
    return rows


def aborted_of(client: Client, topic: str, partition: int) -> list[tuple[int, int]]:
    """Of the whole partition, asked for step by step as `fetch` does."""
    result: set[tuple[int, int]] = set()
    offset = 0
    while True:
        part = FetchPartition(partition=partition, fetch_offset=offset, partition_max_bytes=1 << 20)
        request = FetchRequest(
            max_wait_ms=0,
            max_bytes=1 << 20,
            isolation_level=1,
            topics=[FetchTopic(topic=topic, partitions=[part])],
        )
        answer = client.ask(request, Leader(topic, partition)).responses[0].partitions[0]
        result |= {(one.producer_id, one.first_offset) for one in answer.aborted_transactions or ()}
        found = list(batch_reader.read(answer.records or b""))
        if not found:
            return sorted(result, key=lambda row: row[1])
        offset = found[-1].last_offset + 1


class Killed(NamedTuple):
    """What a loop of kills went through."""

    committed: int


def kill_loop(
    server: Server,
    kills: int,
    beside: Callable[[str, str, threading.Event], Sequence[threading.Thread]] = lambda *_: (),
) -> Killed:
    """
    Kill a broker again and again while clients write, and look at every row in the end. `beside`
    makes threads that run with them, from the address, the topic and the end of it all.
    """
    server.start()
    address = server.address if isinstance(server.address, str) else server.address()
    with Client(address, clock=SystemClock()) as client:
        topic = new_topic(client, 2, segment_bytes="20000")
    is_over = threading.Event()
    writers = [Writer(address, topic, n, is_over) for n in range(WRITERS)]
    for thread in (*writers, *beside(address, topic, is_over)):
        thread.start()
    chance = random.Random(1)
    for _ in range(kills):
        await_more(writers)
        time.sleep(chance.uniform(0.05, 0.4))
        server.kill()
        server.start()
    await_more(writers)
    is_over.set()
    for writer in writers:
        writer.join(120)
        assert not writer.is_alive()
        assert writer.error is None, writer.error
    with Client(address, clock=SystemClock()) as client:
        for writer in writers:
            # Whatever was left open ends here.
            name = f"writer-{writer.number}"
            request = InitProducerIdRequest(transactional_id=name, transaction_timeout_ms=60_000)
            assert client.ask(request, Coordinator(name)).error_code == 0
        rows = seen(client, topic)
    server.stop()
    _judge(writers, rows)
    return Killed(sum(len(writer.committed) for writer in writers))


def _judge(writers: Sequence[Writer], rows: list[bytes]) -> None:
    found = set(rows)
    assert len(rows) == len(found), "a row is there twice"
    for writer in writers:
        assert set(writer.committed) <= found, "an acknowledged row is lost"
        assert not set(writer.aborted) & found, "an aborted row is visible"
        for whole in writer.unknown:
            assert whole <= found or not whole & found, "half a transaction is visible"


@pytest.mark.proof
@pytest.mark.parametrize("fsync", [False, True], ids=["no-fsync", "fsync"])
def test_a_broker_killed_under_load_keeps_every_acknowledged_transaction(
    tmp_path: Path, fsync: bool
) -> None:
    kill_loop(EmbeddedServer(tmp_path / "data", fsync=fsync), KILLS if not fsync else KILLS // 3)
