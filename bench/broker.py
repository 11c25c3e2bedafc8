"""[broker_txn_1, broker_txn_8, broker_txn_32, broker_txn_32_fsync, broker_end_txn,
broker_produce_{100,1000}, broker_fetch_{100,1000}, broker_fetch_committed_{100,1000},
broker_consume_{100,1000}, broker_consume_committed_{100,1000}, broker_open_txns, broker_recovery]
Our broker against Apache Kafka, both started here, measured in turn.

    python -m bench.broker [name …]     prints one JSON object a line
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
from confluent_kafka import Consumer, TopicPartition

from bench import broker_load
from bench.harness import Comparison, report, say
from epochal.broker.embedded import BrokerProcess
from epochal.clock import SystemClock
from epochal.kafka.batch_format import ANYBODY, BIT_TRANSACTIONAL, Producer, with_header
from epochal.kafka.client import Ask, Client
from epochal.kafka.cluster import Coordinator, Leader
from epochal.kafka.messages.end_txn import EndTxnRequest
from epochal.kafka.messages.fetch import FetchPartition, FetchRequest, FetchTopic
from epochal.kafka.messages.init_producer_id import InitProducerIdRequest
from epochal.kafka.messages.produce import (
    PartitionProduceData,
    ProduceRequest,
    TopicProduceData,
)

PEER = "Apache Kafka 4.3.1, one broker, acks=all"
ROUNDS = 3
TXN_SECONDS = 4.0
BATCH_BYTES = 500_000
BATCHES = 300
TXN_BATCHES = 10
RECORD_BYTES = (100, 1000)
JVM = (
    "-Xmx1G",
    "-Xms1G",
    "-server",
    "-XX:+UseG1GC",
    "-XX:MaxGCPauseMillis=20",
    "-XX:InitiatingHeapOccupancyPercent=35",
    "-XX:+ExplicitGCInvokesConcurrent",
    "-Djava.awt.headless=true",
)
"""As Apache Kafka's own scripts start it."""
OPEN_TRANSACTIONS = 10_000
PACE, PACED_PRODUCERS = 1000.0, 8
END_TXN_MS_MAX = 50.0
"""At 1,000 transactions a second."""
TESTS = Path(__file__).resolve().parent.parent / "tests"


@contextmanager
def apache() -> Iterator[str]:
    sys.path.insert(0, str(TESTS))
    from servers.kafka import KafkaServer  # noqa: PLC0415  of the tests, found by the line above

    with tempfile.TemporaryDirectory() as folder:
        server = KafkaServer(Path(folder), jvm=JVM)
        server.start()
        try:
            yield server.address()
        finally:
            server.kill()


@contextmanager
def ours(*, fsync: bool = False) -> Iterator[BrokerProcess]:
    """Apache Kafka does not sync before it answers; by default, neither does ours here."""
    with tempfile.TemporaryDirectory() as folder:
        process = BrokerProcess(folder, fsync=fsync)
        process.start()
        try:
            yield process
        finally:
            process.stop()


def _transactions(address: str, producers: int, beside: dict[str, object]) -> float:
    rate, p99_ms, again = broker_load.run(address, producers, TXN_SECONDS, "bench")
    beside |= {"end_txn_p99_ms": round(p99_ms, 2), "asked_again": again}
    return rate


def _better_protocol(address: str, producers: int) -> float:
    """The faster of both: with the newer one Apache Kafka asks clients to try again after 20 ms."""
    return max(
        broker_load.run(address, producers, TXN_SECONDS / 2, "bench", is_newer=is_newer)[0]
        for is_newer in (True, False)
    )


def _produce(address: str, record_bytes: int) -> float:
    """MB a second of plain batches on one connection, a few under way at a time."""
    count = BATCH_BYTES // record_bytes
    now_ms = int(time.time() * 1000)
    section = _records(os.urandom(BATCH_BYTES), record_bytes)
    parts = with_header(section, 0, count, (now_ms, now_ms), ANYBODY)
    records = b"".join(bytes(part) for part in parts)
    with Client(address, clock=SystemClock()) as client:
        client.topic("produce")
        asks = [
            Ask(
                request=ProduceRequest(
                    acks=-1,
                    timeout_ms=30_000,
                    topic_data=[
                        TopicProduceData(
                            name="produce",
                            partition_data=[PartitionProduceData(index=0, records=records)],
                        )
                    ],
                ),
                to=Leader("produce", 0),
            )
        ] * BATCHES
        started = time.perf_counter()
        under_way = []
        for ask in asks:
            under_way.append(client.submit(ask))
            if len(under_way) >= 5:
                _check(under_way.pop(0).result())
        for pending in under_way:
            _check(pending.result())
        return BATCHES * len(records) / (time.perf_counter() - started) / 1e6


def _check(answer: object) -> None:
    (part,) = answer.responses[0].partition_responses  # type: ignore[attr-defined]
    assert part.error_code == 0, part


def _produce_in_transactions(address: str, record_bytes: int) -> None:
    """The same batches, ten to a transaction; every fifth transaction is aborted."""
    count, name = BATCH_BYTES // record_bytes, "bench-fetch"
    section = _records(os.urandom(BATCH_BYTES), record_bytes)
    with Client(address, clock=SystemClock()) as client:
        asked = InitProducerIdRequest(transactional_id=name, transaction_timeout_ms=60_000)
        given = client.ask(asked, Coordinator(name), is_repeatable=True)
        producer_id, epoch = given.producer_id, given.producer_epoch
        for number in range(BATCHES // TXN_BATCHES):
            for batch in range(TXN_BATCHES):
                who = Producer(
                    producer_id=producer_id,
                    producer_epoch=epoch,
                    base_sequence=batch * count,
                    is_transactional=True,
                )
                now_ms = int(time.time() * 1000)
                parts = with_header(section, BIT_TRANSACTIONAL, count, (now_ms, now_ms), who)
                data = PartitionProduceData(index=0, records=b"".join(bytes(p) for p in parts))
                topic = TopicProduceData(name="produce", partition_data=[data])
                wanted = ProduceRequest(
                    transactional_id=name, acks=-1, timeout_ms=30_000, topic_data=[topic]
                )
                client.ask(
                    wanted,
                    Leader("produce", 0),
                    is_repeatable=True,
                    code_of=lambda a: a.responses[0].partition_responses[0].error_code,
                )
            end = EndTxnRequest(
                transactional_id=name,
                producer_id=producer_id,
                producer_epoch=epoch,
                committed=number % 5 != 4,
            )
            ended = client.ask(
                end, Coordinator(name), is_repeatable=True, code_of=lambda a: a.error_code
            )
            producer_id, epoch = ended.producer_id, ended.producer_epoch


def _records(data: bytes, record_bytes: int) -> bytes:
    """The records of a batch, without keys."""
    parts = []
    for number in range(len(data) // record_bytes):
        value = data[number * record_bytes : (number + 1) * record_bytes - 10]
        body = b"\x00\x00" + _varint(number) + b"\x01" + _varint(len(value)) + value + b"\x00"
        parts.append(_varint(len(body)) + body)
    return b"".join(parts)


def _varint(value: int) -> bytes:
    value <<= 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _fetch(address: str, *, is_committed: bool = False) -> float:
    """MB a second, from the first offset to the last, on one connection."""
    offset, end, size = 0, 1, 0
    with Client(address, clock=SystemClock()) as client:
        client.topic("produce")
        started = time.perf_counter()
        while offset < end:
            part = FetchPartition(partition=0, fetch_offset=offset, partition_max_bytes=4 << 20)
            request = FetchRequest(
                max_wait_ms=100,
                min_bytes=1,
                max_bytes=4 << 20,
                isolation_level=int(is_committed),
                topics=[FetchTopic(topic="produce", partitions=[part])],
            )
            answer = client.ask(request, Leader("produce", 0))
            partition = answer.responses[0].partitions[0]
            end = partition.high_watermark
            records = bytes(partition.records or b"")
            whole, offset = _whole(records, offset)
            size += whole
        return size / (time.perf_counter() - started) / 1e6


def _whole(records: bytes, offset: int) -> tuple[int, int]:
    at = 0
    while at + 61 <= len(records):
        length = 12 + int.from_bytes(records[at + 8 : at + 12], "big")
        if at + length > len(records):
            break
        base = int.from_bytes(records[at : at + 8], "big")
        offset = base + int.from_bytes(records[at + 23 : at + 27], "big") + 1
        at += length
    return at, offset


def _consume(address: str, *, is_committed: bool = False) -> float:
    """MB of values a second, as a program sees it that consumes by librdkafka."""
    level = "read_committed" if is_committed else "read_uncommitted"
    consumer = Consumer(
        {
            "bootstrap.servers": address,
            "group.id": "bench",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "isolation.level": level,
        }
    )
    consumer.assign([TopicPartition("produce", 0, 0)])
    started, size, is_over = time.perf_counter(), 0, False
    while not is_over:
        for message in consumer.consume(10_000, timeout=1.0):
            # An error is the end of the partition.
            is_over = is_over or message.error() is not None
            size += 0 if is_over else len(message.value())
    took_s = time.perf_counter() - started
    consumer.close()
    return size / took_s / 1e6


def transactions(number: int, *, fsync: bool = False) -> Comparison:
    name = f"broker_txn_{number}" + ("_fsync" if fsync else "")
    found = Comparison(name=name, peer_name=PEER, unit="transactions/s", is_rate=True)
    beside: dict[str, object] = {}
    with ours(fsync=fsync) as process, apache() as peer:
        for address in (process.address, peer):
            broker_load.make_topic(address, "bench", number)
        found.run(
            lambda: _transactions(process.address, number, beside),
            lambda: _better_protocol(peer, number),
            rounds=ROUNDS,
        )
        used = psutil.Process(process.pid)
        busy = used.cpu_times()
        beside["broker_cpu_s"] = round(busy.user + busy.system, 2)
        beside["broker_rss_mb"] = round(used.memory_info().rss / 1e6, 1)
    found.beside = beside
    return found


def end_txn() -> Comparison:
    """Ours alone: how long EndTxn takes at a pace that leaves the broker time."""
    found = Comparison(name="broker_end_txn", peer_name="the limit", unit="ms", is_rate=False)
    with ours() as process:
        broker_load.make_topic(process.address, "bench", PACED_PRODUCERS)
        for number in range(ROUNDS + 1):
            rate, p99_ms, again = broker_load.run(
                process.address, PACED_PRODUCERS, TXN_SECONDS, "bench", rate=PACE
            )
            say(f"broker_end_txn: round {number}: p99 {p99_ms:.3g} ms at {rate:.0f}/s")
            found.ours.append(p99_ms)
            found.beside = {"transactions_s": round(rate), "asked_again": again}
    found.ours = found.ours[1:]
    found.peer = [END_TXN_MS_MAX] * len(found.ours)
    return found


def produce_and_fetch(kind: str, record_bytes: int) -> Comparison:
    name = f"broker_{kind}_{record_bytes}"
    found = Comparison(name=name, peer_name=PEER, unit="MB/s", is_rate=True)
    measure: dict[str, Callable[[str], float]] = {
        "produce": partial(_produce, record_bytes=record_bytes),
        "fetch": _fetch,
        "fetch_committed": partial(_fetch, is_committed=True),
        "consume": _consume,
        "consume_committed": partial(_consume, is_committed=True),
    }
    with ours() as process, apache() as peer:
        for address in (process.address, peer):
            broker_load.make_topic(address, "produce", 1)
            fill = _produce_in_transactions if kind.endswith("_committed") else _produce
            fill(address, record_bytes)
        run = measure[kind]
        found.run(lambda: run(process.address), lambda: run(peer), rounds=ROUNDS)
        found.beside = {"broker_rss_mb": round(_rss_mb(process.pid), 1)}
    return found


def _rss_mb(pid: int) -> float:
    return float(psutil.Process(pid).memory_info().rss) / 1e6


def open_transactions(name: str) -> Comparison:
    """Ours alone: memory of ten thousand open transactions, and the start that brings them back."""
    limit, unit = (100.0, "MB") if name == "broker_open_txns" else (5.0, "s")
    found = Comparison(name=name, peer_name="the limit", unit=unit, is_rate=False)
    with tempfile.TemporaryDirectory() as folder:
        process = BrokerProcess(folder)
        started = time.perf_counter()
        process.start()
        first_start_s = time.perf_counter() - started
        broker_load.make_topic(process.address, "open", 8)
        before = _rss_mb(process.pid)
        open_many(process.address)
        grown = _rss_mb(process.pid) - before
        process.kill()
        started = time.perf_counter()
        process.start()
        recovery_s = time.perf_counter() - started
        process.stop()
    found.ours = [grown if unit == "MB" else recovery_s]
    found.peer = [limit]
    found.beside = {"start_s": round(first_start_s, 2), "idle_mb": round(before, 1)}
    return found


def open_many(address: str) -> None:
    with Client(address, clock=SystemClock()) as client:
        asks = [
            Ask(
                request=InitProducerIdRequest(
                    transactional_id=f"open-{number}", transaction_timeout_ms=900_000
                ),
                to=Coordinator(f"open-{number % 8}"),
            )
            for number in range(OPEN_TRANSACTIONS)
        ]
        writes = []
        for number, given in enumerate(client.ask_all(asks)):
            who = Producer(
                producer_id=given.producer_id,  # type: ignore[union-attr]
                producer_epoch=0,
                base_sequence=0,
                is_transactional=True,
            )
            now_ms = int(time.time() * 1000)
            parts = with_header(broker_load.record_of(b"x"), 0x10, 1, (now_ms, now_ms), who)
            records = b"".join(bytes(part) for part in parts)
            data = PartitionProduceData(index=number % 8, records=records)
            request = ProduceRequest(
                transactional_id=f"open-{number}",
                acks=-1,
                timeout_ms=10_000,
                topic_data=[TopicProduceData(name="open", partition_data=[data])],
            )
            writes.append(Ask(request=request, to=Leader("open", number % 8)))
        for answer in client.ask_all(writes):
            _check(answer)


RUNS: dict[str, Callable[[], Comparison]] = {
    **{f"broker_txn_{number}": partial(transactions, number) for number in (1, 8, 32)},
    "broker_txn_32_fsync": partial(transactions, 32, fsync=True),
    "broker_end_txn": end_txn,
    **{
        f"broker_{kind}_{size}": partial(produce_and_fetch, kind, size)
        for kind in ("produce", "fetch", "fetch_committed", "consume", "consume_committed")
        for size in RECORD_BYTES
    },
    "broker_open_txns": partial(open_transactions, "broker_open_txns"),
    "broker_recovery": partial(open_transactions, "broker_recovery"),
}


def main() -> int:
    for name in sys.argv[1:] or RUNS:
        say(f"{name} …")
        report(RUNS[name]())
    return 0


if __name__ == "__main__":
    sys.exit(main())
