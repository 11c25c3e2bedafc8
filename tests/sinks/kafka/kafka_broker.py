"""Brokers, topics of a test's own, a reader that is not ours, and a pipeline in miniature.

By default the embedded broker serves; EPOCHAL_TEST_KAFKA=apache runs everything on Apache Kafka,
and EPOCHAL_TEST_KAFKA_RELEASE names a release of it.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import confluent_kafka
import pyarrow as pa
from confluent_kafka import TopicPartition
from servers.embedded import EmbeddedServer
from servers.kafka import RELEASE, KafkaServer
from sinks.life import UID, DriverLife

from epochal.clock import SystemClock
from epochal.contract import Begin, Task
from epochal.kafka import batch_reader
from epochal.kafka.client import Client
from epochal.kafka.cluster import Controller, Leader
from epochal.kafka.codes import Code
from epochal.kafka.messages.create_partitions import (
    CreatePartitionsRequest,
    CreatePartitionsTopic,
)
from epochal.kafka.messages.create_topics import (
    CreatableTopic,
    CreatableTopicConfig,
    CreateTopicsRequest,
)
from epochal.kafka.messages.fetch import FetchPartition, FetchRequest, FetchTopic
from epochal.kafka.messages.list_transactions import ListTransactionsRequest
from epochal.sinks.kafka import Kafka, transaction_status, transactions
from epochal.sinks.kafka.receipts import OpenTransaction
from epochal.terms import EpochNumber, Fingerprint, Limits, Receipt

QUICK = Limits(retry_backoff_ms=(1, 5), commit_timeout_s=60.0)
IS_APACHE = os.environ.get("EPOCHAL_TEST_KAFKA") == "apache"
APACHE_RELEASE = os.environ.get("EPOCHAL_TEST_KAFKA_RELEASE", RELEASE)
APACHE_SETTINGS = {"transaction.abort.timed.out.transaction.cleanup.interval.ms": "200"}
_numbers = itertools.count(1)


def apache_at(folder: Path, **options: Any) -> KafkaServer:
    settings = {**APACHE_SETTINGS, **options.pop("settings", {})}
    return KafkaServer(folder, settings=settings, release=APACHE_RELEASE, **options)


def server_at(folder: Path) -> Any:
    return apache_at(folder) if IS_APACHE else EmbeddedServer(folder)


@dataclass(kw_only=True)
class Life(DriverLife):
    """One driver with its tasks, which share what an epoch hands out."""

    limits: Limits = QUICK

    def begin(self, epoch: int) -> Any:
        return self.committer.begin(Begin(epoch=EpochNumber(epoch)))

    def writer(
        self, rows: pa.Table, epoch: int, partition: int = 0, *, handout: Any, first: bool = False
    ) -> Any:
        task = Task(
            handle=self.next_handle(epoch, partition),
            schema=rows.schema,
            handout=handout,
            is_first=first,
            limits=self.limits,
        )
        return self.sink.writer(task)

    def prepare(self, epoch: int, *parts: pa.Table, first: bool = False) -> list[Receipt]:
        """A whole epoch's tasks, each table one of them."""
        handout = self.begin(epoch)
        return [
            self.attempt(rows, epoch, partition, handout=handout, first=first)
            for partition, rows in enumerate(parts)
        ]

    def attempt(self, rows: pa.Table, epoch: int, partition: int = 0, **options: Any) -> Receipt:
        writer = self.writer(rows, epoch, partition, **options)
        for batch in rows.to_batches(max_chunksize=1000):
            writer.write(batch)
        return writer.prepare()

    def abort(self, epoch: int, receipts: Sequence[Receipt]) -> None:
        self.committer.abort(EpochNumber(epoch), receipts)

    def outcome(self, receipt: Receipt) -> Any:
        return self.committer.outcome(receipt.handle.epoch, receipt)

    def write(self, epoch: int, *parts: pa.Table, first: bool = False) -> list[Receipt]:
        receipts = self.prepare(epoch, *parts, first=first)
        self.rehearse(epoch, receipts)
        self.commit(epoch, receipts)
        return receipts


@dataclass(kw_only=True)
class Broker:
    """A cluster, and topics of a test's own."""

    bootstrap: str
    lives: list[Life] = field(default_factory=list)
    _client: Client | None = None

    @property
    def client(self) -> Client:
        if self._client is None:
            self._client = Client(self.bootstrap, clock=SystemClock())
        return self._client

    def close(self) -> None:
        for life in self.lives:
            life.close()
        if self._client is not None:
            self._client.close()

    def topic(self, partitions: int = 1, replicas: int = 1, **configs: str) -> str:
        name = f"topic-{next(_numbers)}-{time.monotonic_ns()}"
        wanted = CreatableTopic(
            name=name,
            num_partitions=partitions,
            replication_factor=replicas,
            configs=[
                CreatableTopicConfig(name=key.replace("_", "."), value=value)
                for key, value in configs.items()
            ],
        )
        request = CreateTopicsRequest(topics=[wanted], timeout_ms=60_000)
        self.client.refresh()  # replaces a connection to a broker that was killed meanwhile
        (made,) = self.client.ask(request, Controller()).topics
        assert made.error_code == 0, made.error_message
        return name

    def add_partitions(self, topic: str, count: int) -> None:
        """Let a topic have so many in all."""
        wanted = CreatePartitionsTopic(name=topic, count=count, assignments=None)
        request = CreatePartitionsRequest(topics=[wanted], timeout_ms=20_000)
        (made,) = self.client.ask(request, Controller()).results
        assert made.error_code == 0, made.error_message

    def sink(self, topic: str, **options: Any) -> Kafka:
        return Kafka(options.pop("bootstrap", self.bootstrap), topic=topic, **options)

    def life(self, topic: str, **options: Any) -> Life:
        known = ("generation", "location", "run", "uid")
        whose = {key: options.pop(key) for key in known if key in options}
        life = Life(sink=self.sink(topic, **options), **whose)
        self.lives.append(life)
        return life

    def keep(self, life: Life) -> Life:
        self.lives.append(life)
        return life

    def messages(self, topic: str, *, committed: bool = True) -> list[Any]:
        return read_topic(self.bootstrap, topic, committed=committed)

    def quick_rows(self, topic: str) -> list[dict[str, Any]]:
        """The same by our own client: for tests that look hundreds of times."""
        client = self.client
        count = client.topic(topic).partition_count
        found = [
            value for index in range(count) for value in committed_values(client, topic, index)
        ]
        return [json.loads(value) for value in found]

    def quick_ids(self, topic: str) -> list[int]:
        return sorted(row["id"] for row in self.quick_rows(topic))

    def rows(self, topic: str) -> list[dict[str, Any]]:
        return [json.loads(message.value()) for message in self.messages(topic)]

    def ids(self, topic: str) -> list[int]:
        return sorted(row["id"] for row in self.rows(topic))

    def open_transactions(self, whose: str = UID) -> list[str]:
        return open_transactions(self.client, whose)

    def abort_open(self, transactional_id: str) -> None:
        """Abort what is open under an id, as its broker does when the time is over."""
        (state,) = transaction_status.describe(self.client, [transactional_id])
        txn = OpenTransaction(
            transactional_id=transactional_id,
            producer_id=state.producer_id,
            producer_epoch=state.producer_epoch,
            is_v2=self.client.transaction_version() >= 2,
        )
        (answer,) = transactions.end_transactions(self.client, [txn], is_commit=False)
        assert answer.error_code == Code.NONE, answer
        await_nothing_open(self, transactional_id)


def await_nothing_open(broker: Broker, whose: str) -> None:
    deadline = time.monotonic() + 60
    while broker.open_transactions(whose):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def summed(receipt: Receipt, hash_sum: int) -> Receipt:
    """A receipt with a sum over its rows, as Spark's runner adds it."""
    return replace(receipt, fingerprint=Fingerprint(receipt.rows, hash_sum))


def open_transactions(client: Client, whose: str) -> list[str]:
    """Whatever is still open, on any broker, under names that hold a uid or the tag of a sink."""
    found: list[str] = []
    for node in client.nodes():
        answer = client.ask(ListTransactionsRequest(state_filters=["Ongoing"]), node)
        found += [one.transactional_id for one in answer.transaction_states]
    return [name for name in found if whose in name]


def committed_values(client: Client, topic: str, partition: int) -> list[bytes]:
    offset, found = 0, []
    while True:
        wanted = FetchPartition(
            partition=partition, fetch_offset=offset, partition_max_bytes=1 << 20
        )
        request = FetchRequest(
            max_wait_ms=1,
            min_bytes=0,
            max_bytes=1 << 20,
            isolation_level=1,
            topics=[FetchTopic(topic=topic, partitions=[wanted])],
        )
        answer = client.ask(request, Leader(topic, partition))
        (part,) = answer.responses[0].partitions
        assert part.error_code == 0, part.error_code
        here = list(batch_reader.read(part.records or b""))
        if not here:
            return found
        aborted = [(one.producer_id, one.first_offset) for one in part.aborted_transactions or []]
        for batch in batch_reader.committed(here, aborted):
            found += batch.columns()["value"].to_pylist()
        offset = here[-1].last_offset + 1


_readers: dict[tuple[str, bool], confluent_kafka.Consumer] = {}


def reader_of(bootstrap: str, *, committed: bool) -> confluent_kafka.Consumer:
    """One librdkafka consumer a broker: joining no group, so made once."""
    key = (bootstrap, committed)
    if key not in _readers:
        _readers[key] = confluent_kafka.Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": "reader",
                "isolation.level": "read_committed" if committed else "read_uncommitted",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "auto.offset.reset": "earliest",
                "fetch.wait.max.ms": 10,
                "log_level": 0,  # brokers are killed here, and it would log that
                "reconnect.backoff.ms": 20,
                "reconnect.backoff.max.ms": 200,
                "topic.metadata.refresh.interval.ms": 500,
            }
        )
    return _readers[key]


def read_topic(bootstrap: str, topic: str, *, committed: bool = True) -> list[Any]:
    """Every message up to the end that this isolation has now."""
    reader = reader_of(bootstrap, committed=committed)
    described = reader.list_topics(topic, timeout=60).topics[topic]
    parts = [TopicPartition(topic, index, 0) for index in described.partitions]
    reader.assign(parts)
    found: list[Any] = []
    ended: set[int] = set()
    deadline = time.monotonic() + 90
    while len(ended) < len(parts):
        assert time.monotonic() < deadline, f"{topic} can't be read to its end"
        for message in reader.consume(1000, timeout=0.2):
            error = message.error()
            if error is None:
                found.append(message)
            elif error.code() == confluent_kafka.KafkaError._PARTITION_EOF:
                ended.add(message.partition())
    reader.unassign()
    return found


def close_readers() -> None:
    for reader in _readers.values():
        reader.close()
    _readers.clear()


def some(*ids: int, name: str = "n") -> pa.Table:
    """Rows with these ids."""
    return pa.table(
        {"id": pa.array(ids, pa.int64()), "name": [f"{name}{number}" for number in ids]}
    )
