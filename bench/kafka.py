"""
[kafka_writer_100b, kafka_writer_1k, kafka_commit, kafka_exactly_once_cost] The Kafka sink without
Spark, against confluent-kafka and against itself, on one Apache Kafka started here.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import confluent_kafka
import numpy as np
import pyarrow as pa

from bench.broker import apache
from bench.harness import Comparison
from epochal.clock import SystemClock
from epochal.contract import Begin, Task
from epochal.kafka import batches
from epochal.kafka.batches import Columns
from epochal.kafka.client import Ask, Client
from epochal.kafka.cluster import Controller, Leader
from epochal.kafka.messages.create_topics import CreatableTopic, CreateTopicsRequest
from epochal.kafka.messages.produce import (
    PartitionProduceData,
    ProduceRequest,
    TopicProduceData,
)
from epochal.sinks.kafka import Kafka
from epochal.terms import EpochNumber, Generation, Identity, Limits, Receipt, Uid

ROUNDS = 4
BYTES_A_ROUND = 60_000_000
ROUNDS_A_SECOND = 3
"""About as much as one process sends in a second."""
BATCH_ROWS = 10_000
PARTITIONS = 4
TASKS = 8
EPOCHS = 100
_numbers = itertools.count()


@dataclass(kw_only=True)
class Driver:
    """One life of one pipeline, as far as a benchmark needs it."""

    bootstrap: str
    topic: str
    options: Mapping[str, Any] = field(default_factory=dict)
    attempts: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.sink = Kafka(self.bootstrap, topic=self.topic, **self.options)
        self.identity = Identity(
            pipeline="bench", uid=Uid("abcdefgh2345"), sink=self.sink.name, generation=Generation(1)
        )
        self.committer = self.sink.committer(self.identity, Limits())

    def prepare(self, epoch: int, parts: list[list[pa.RecordBatch]]) -> list[Receipt]:
        handout = self.committer.begin(Begin(epoch=EpochNumber(epoch)))
        return [
            self.task(epoch, at, batches_, handout, is_first=True)
            for at, batches_ in enumerate(parts)
        ]

    def task(
        self, epoch: int, at: int, rows: list[pa.RecordBatch], handout: Any, *, is_first: bool
    ) -> Receipt:
        handle = self.identity.handle(EpochNumber(epoch), partition=at, attempt=next(self.attempts))
        schema = rows[0].schema
        writer = self.sink.writer(
            Task(handle=handle, schema=schema, handout=handout, is_first=is_first)
        )
        for batch in rows:
            writer.write(batch)
        return writer.prepare()

    def commit(self, epoch: int, receipts: list[Receipt]) -> None:
        self.committer.rehearse(EpochNumber(epoch), receipts)
        self.committer.commit(EpochNumber(epoch), receipts)


def new_topic(bootstrap: str, partitions: int = PARTITIONS) -> str:
    name = f"bench-{next(_numbers)}"
    with Client(bootstrap, clock=SystemClock()) as client:
        wanted = CreatableTopic(name=name, num_partitions=partitions, replication_factor=1)
        client.ask(CreateTopicsRequest(topics=[wanted], timeout_ms=20_000), Controller())
        client.await_topic(name)
    return name


def rows_of(size: int) -> list[pa.RecordBatch]:
    count = BYTES_A_ROUND // size
    chance = np.random.default_rng(7)
    text = chance.integers(97, 122, size=(BATCH_ROWS, size), dtype=np.uint8).tobytes()
    values = [text[at * size : (at + 1) * size] for at in range(BATCH_ROWS)]
    batch = pa.record_batch(
        {"key": [str(n) for n in range(BATCH_ROWS)], "value": pa.array(values, pa.binary())}
    )
    return [batch] * max(1, count // BATCH_ROWS)


def writer(size: int) -> Comparison:
    """One process, transactional, acks=all: rows a second from Arrow to committed."""
    comparison = Comparison(
        name=f"kafka_writer_{'100b' if size == 100 else '1k'}",
        peer_name="confluent-kafka produce() without callbacks, transactional",
        unit="rows/s",
        is_rate=True,
    )
    rows = rows_of(size)
    epochs = itertools.count()
    with apache() as bootstrap:
        topic = new_topic(bootstrap)
        driver = Driver(bootstrap=bootstrap, topic=topic, options={"key": "key", "value": "value"})
        peer = confluent_kafka.Producer(
            {
                "bootstrap.servers": bootstrap,
                "transactional.id": "peer",
                "queue.buffering.max.messages": 2_000_000,
                "partitioner": "murmur2_random",
            }
        )
        peer.init_transactions(30)
        cpu: dict[str, list[float]] = {"ours": [], "peer": []}
        comparison.run(
            lambda: _with_cpu(cpu["ours"], rows, lambda: _ours_per_s(driver, next(epochs), rows)),
            lambda: _with_cpu(cpu["peer"], rows, lambda: _peer_per_s(peer, topic, rows)),
            rounds=ROUNDS,
        )
        driver.committer.close()
    comparison.beside = {
        "encoding_alone": round(_encoded_per_s(rows[0])),
        **{f"{who}_cpu_us_a_row": round(min(spent), 3) for who, spent in cpu.items()},
    }
    return comparison


def _with_cpu(
    spent_us: list[float], rows: list[pa.RecordBatch], measure: Callable[[], float]
) -> float:
    """Also what the client's own threads cost, which a busy machine distorts less than time."""
    started_s = time.process_time()
    rate = measure()
    total = sum(batch.num_rows for batch in rows)
    spent_us.append(1e6 * (time.process_time() - started_s) / total)
    return rate


def _ours_per_s(driver: Driver, epoch: int, rows: list[pa.RecordBatch]) -> float:
    started_s = time.perf_counter()
    driver.commit(epoch, driver.prepare(epoch, [rows]))
    return sum(batch.num_rows for batch in rows) / (time.perf_counter() - started_s)


def _peer_per_s(peer: Any, topic: str, rows: list[pa.RecordBatch]) -> float:
    started_s = time.perf_counter()
    peer.begin_transaction()
    for batch in rows:
        for key, value in zip(
            batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True
        ):
            _produced(peer, topic, key, value)
    peer.flush(60)
    peer.commit_transaction(60)
    return sum(batch.num_rows for batch in rows) / (time.perf_counter() - started_s)


def _produced(peer: Any, topic: str, key: str, value: bytes) -> None:
    try:
        peer.produce(topic, value, key)
    except BufferError:
        peer.poll(0.1)
        peer.produce(topic, value, key)


def _encoded_per_s(batch: pa.RecordBatch) -> float:
    columns = Columns(value=batch.column(1), key=batch.column(0))
    times = []
    for _ in range(20):
        started_s = time.perf_counter()
        batches.encode(columns, default_timestamp_ms=0)
        times.append(time.perf_counter() - started_s)
    return batch.num_rows / statistics.median(times)


def commit() -> Comparison:
    """An epoch's commit with 8 tasks; beside it, how long a fresh producer takes to prepare."""
    small = pa.record_batch({"key": [str(n) for n in range(100)], "value": ["x" * 100] * 100})
    comparison = Comparison(
        name="kafka_commit",
        peer_name="eight commit_transaction() of confluent-kafka, one after the other",
        unit="ms",
        is_rate=False,
    )
    with apache() as bootstrap:
        topic = new_topic(bootstrap)
        driver = Driver(bootstrap=bootstrap, topic=topic, options={"key": "key", "value": "value"})
        epochs = itertools.count()
        peers = [_transactional(bootstrap, f"peer-{number}") for number in range(TASKS)]
        taken: list[float] = []
        comparison.run(
            lambda: _commit_ms(driver, epochs, small, taken),
            lambda: _peer_commit_ms(peers, topic),
            rounds=ROUNDS,
        )
        ordered = sorted(taken[EPOCHS // ROUNDS :])
        fresh = [_fresh_ms(driver, next(epochs), small) for _ in range(20)]
        driver.committer.close()
    comparison.beside = {
        "p50_ms": round(ordered[len(ordered) // 2], 2),
        "p99_ms": round(ordered[int(len(ordered) * 0.99)], 2),
        "fresh_producer_100_rows_ms": round(statistics.median(fresh), 2),
    }
    return comparison


def _commit_ms(
    driver: Driver, epochs: Iterator[int], rows: pa.RecordBatch, taken: list[float]
) -> float:
    mine = []
    for _ in range(EPOCHS // ROUNDS):
        epoch = next(epochs)
        receipts = driver.prepare(epoch, [[rows]] * TASKS)
        driver.committer.rehearse(EpochNumber(epoch), receipts)
        started_s = time.perf_counter()
        driver.committer.commit(EpochNumber(epoch), receipts)
        mine.append(1000 * (time.perf_counter() - started_s))
    taken += mine
    return statistics.median(mine)


def _transactional(bootstrap: str, name: str) -> Any:
    made = confluent_kafka.Producer({"bootstrap.servers": bootstrap, "transactional.id": name})
    made.init_transactions(30)
    return made


def _peer_commit_ms(peers: list[Any], topic: str) -> float:
    for peer in peers:
        peer.begin_transaction()
        for number in range(100):
            peer.produce(topic, b"x" * 100, str(number))
        peer.flush(30)
    started_s = time.perf_counter()
    for peer in peers:
        peer.commit_transaction(30)
    return 1000 * (time.perf_counter() - started_s)


def _fresh_ms(driver: Driver, epoch: int, rows: pa.RecordBatch) -> float:
    """A task whose id nobody has used before."""
    handout = driver.committer.begin(Begin(epoch=EpochNumber(epoch)))
    started_s = time.perf_counter()
    receipt = driver.task(epoch, 0, [rows], handout, is_first=False)
    spent_ms = 1000 * (time.perf_counter() - started_s)
    driver.commit(epoch, [receipt])
    return spent_ms


def exactly_once_cost() -> Comparison:
    """A second's worth of rows an epoch, against the same batches without any transaction."""
    comparison = Comparison(
        name="kafka_exactly_once_cost",
        peer_name="the same batches without transactions, at least once",
        unit="rows/s",
        is_rate=True,
    )
    epochs = itertools.count()
    rows = rows_of(100) * ROUNDS_A_SECOND
    with apache() as bootstrap, Client(bootstrap, clock=SystemClock()) as client:
        topic = new_topic(bootstrap)
        driver = Driver(bootstrap=bootstrap, topic=topic, options={"value": "value"})
        comparison.run(
            lambda: _ours_per_s(driver, next(epochs), rows),
            lambda: _plain_per_s(client, topic, rows),
            rounds=2 * ROUNDS,
        )
        driver.committer.close()
    return comparison


def _plain_per_s(client: Client, topic: str, rows: list[pa.RecordBatch]) -> float:
    started_s = time.perf_counter()
    turn, under_way = 0, []
    for batch in rows:
        for chunk in batches.split(Columns(value=batch.column(1)), 1 << 20):
            turn += 1
            target = Leader(topic, turn % PARTITIONS)
            parts = batches.encode(chunk, default_timestamp_ms=int(time.time() * 1000))
            data = PartitionProduceData(index=target.partition, records=b"".join(parts))
            request = ProduceRequest(
                acks=-1,
                timeout_ms=30_000,
                topic_data=[TopicProduceData(name=topic, partition_data=[data])],
            )
            under_way.append(client.submit(Ask(request=request, to=target)))
    for pending in under_way:
        assert pending.result().responses[0].partition_responses[0].error_code == 0
    return sum(batch.num_rows for batch in rows) / (time.perf_counter() - started_s)


RUNS: Mapping[str, Callable[[], Comparison]] = {
    "kafka_writer_100b": partial(writer, 100),
    "kafka_writer_1k": partial(writer, 1000),
    "kafka_commit": commit,
    "kafka_exactly_once_cost": exactly_once_cost,
}
