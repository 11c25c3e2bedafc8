"""
[latency_*] From a row's arrival at the source to its visibility at the sink, against a foreachBatch
by hand into the same target.

The source is a Kafka topic, on a broker in its own process, into which another process writes at an
even rate. A row arrives when it is written there, and is visible when the write of its epoch has
returned: of ours with the commit, by hand with `save()`. The first seconds warm up and don't count.
One run goes through both triggers and both rates in one session, ours and by hand in turn.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from bench.broker import ours as embedded_broker
from bench.harness import Comparison, say
from bench.kafka import new_topic
from bench.postgres import TESTS, execute, postgres_server
from epochal.contract import Sink
from epochal.sinks.delta import Delta
from epochal.sinks.files import Files
from epochal.sinks.iceberg import Iceberg
from epochal.sinks.kafka import Kafka
from epochal.sinks.postgres import Postgres
from epochal.spark.local_session import local_builder
from epochal.spark.pipeline import Pipeline
from epochal.spark.versions import UNIX_SOCKETS

WARM_UP_S = 6.0
MEASURED_S = 12.0
PARTITIONS = 2
TRIGGERS = {"asap": "0 seconds", "1s": "1 second"}
RATES = (10_000, 100)
"""The first of them also warms the session up."""
_SEND_EVERY_S = 0.01
_VALUE = "x" * 100
_JDBC = "org.postgresql:postgresql:42.7.7"
_TABLE = "CREATE TABLE {} (id bigint, title text, at timestamptz)"

Visible = dict[int, float]
"""When each epoch became visible."""
Hand = Callable[[Any], None]


@dataclass
class Target:
    """One target, as ours writes to it and as people do by hand."""

    sink: Callable[[int], Sink]
    """Of the table, topic or folder with this number."""
    by_hand: Callable[[int], Hand]
    by_hand_name: str


@dataclass(frozen=True)
class Latency:
    """Of the rows of one measurement, in milliseconds."""

    p50: float
    p99: float


@dataclass
class Course:
    """A source, a session and a target for a few measurements."""

    spark: Any
    bootstrap: str
    target: Target
    number: int = 0

    def ours(self, trigger: str, rate: int) -> Latency:
        visible: Visible = {}

        def watch(step: str, epoch: int | None) -> None:
            if step == "settled" and epoch is not None:
                visible[epoch] = time.time()

        def start(frame: Any, checkpoint: str) -> Any:
            pipeline = Pipeline(
                f"latency {checkpoint}", [self.target.sink(self.number)], watch=watch
            )
            return pipeline.start(frame, checkpoint=checkpoint, processingTime=TRIGGERS[trigger])

        return self._measured(start, visible, rate)

    def by_hand(self, trigger: str, rate: int) -> Latency:
        visible: Visible = {}
        write = self.target.by_hand(self.number)

        def each(batch: Any, epoch: int) -> None:
            write(batch)
            visible[epoch] = time.time()

        def start(frame: Any, checkpoint: str) -> Any:
            writer = frame.writeStream.foreachBatch(each)
            writer = writer.trigger(processingTime=TRIGGERS[trigger])
            return writer.option("checkpointLocation", checkpoint).start()

        return self._measured(start, visible, rate)

    def _measured(self, start: Callable[[Any, str], Any], visible: Visible, rate: int) -> Latency:
        topic = new_topic(self.bootstrap, PARTITIONS)
        self.number += 1
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as checkpoint:
            query = start(self._frame(topic), checkpoint)
            try:
                _produce(self.bootstrap, topic, rate)
                query.processAllAvailable()
            finally:
                query.stop()
        latencies = sorted(_latencies_ms(query, visible, _arrivals(self.bootstrap, topic)))
        return Latency(statistics.median(latencies), latencies[len(latencies) * 99 // 100])

    def _frame(self, topic: str) -> Any:
        return (
            self.spark.readStream.format("kafka")
            .option("kafka.bootstrap.servers", self.bootstrap)
            .option("subscribe", topic)
            .option("startingOffsets", "earliest")
            .load()
            .selectExpr("offset AS id", "cast(value AS string) AS title", "timestamp AS at")
        )


def _produce(bootstrap: str, topic: str, rate: int) -> None:
    """In another process: this one has a driver to run."""
    command = [sys.executable, "-m", "bench.latency", bootstrap, topic, str(rate)]
    subprocess.run(command, check=True)


def _latencies_ms(
    query: Any, visible: Visible, arrivals: Mapping[int, list[float]]
) -> Iterator[float]:
    began_s = min(times[0] for times in arrivals.values()) + WARM_UP_S
    for progress in query.recentProgress:
        one = json.loads(progress.json)
        (source,) = one["sources"]
        if not source["numInputRows"]:
            continue
        for partition, end in _offsets(source["endOffset"]).items():
            start = _offsets(source["startOffset"]).get(partition, 0)
            for arrived_s in arrivals[partition][start:end]:
                if arrived_s >= began_s:
                    yield (visible[one["batchId"]] - arrived_s) * 1000


def _offsets(of: Any) -> dict[int, int]:
    read = json.loads(of) if isinstance(of, str) else of
    (partitions,) = (read or {"": {}}).values()
    return {int(partition): offset for partition, offset in partitions.items()}


def _arrivals(bootstrap: str, topic: str) -> dict[int, list[float]]:
    """When each row was written to the topic, by partition and offset."""
    from confluent_kafka import Consumer, TopicPartition  # noqa: PLC0415  of benchmarks only

    found: dict[int, list[float]] = {partition: [] for partition in range(PARTITIONS)}
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "bench"})
    try:
        consumer.assign([TopicPartition(topic, partition, 0) for partition in found])
        while some := consumer.consume(10_000, timeout=3.0):
            for message in some:
                found[message.partition()].append(message.timestamp()[1] / 1000)
    finally:
        consumer.close()
    return found


def _produce_here(bootstrap: str, topic: str, rate: int) -> None:
    from confluent_kafka import Producer  # noqa: PLC0415  of benchmarks only

    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 1})
    began_s = time.time()
    sent = 0
    while (passed_s := time.time() - began_s) < WARM_UP_S + MEASURED_S:
        for number in range(sent, int(passed_s * rate)):
            now_ms = int(time.time() * 1000)
            producer.produce(topic, _VALUE, partition=number % PARTITIONS, timestamp=now_ms)
        sent = max(sent, int(passed_s * rate))
        producer.poll(0)
        time.sleep(_SEND_EVERY_S)
    producer.flush()


# Targets


@contextmanager
def _files() -> Iterator[Target]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        yield Target(
            sink=lambda number: Files(f"{folder}/ours{number}"),
            by_hand=lambda number: (
                lambda batch: batch.write.mode("append").parquet(f"{folder}/theirs{number}")
            ),
            by_hand_name="foreachBatch with write.parquet",
        )


@contextmanager
def _postgres(strategy: str) -> Iterator[Target]:
    with postgres_server() as server:
        url = f"jdbc:postgresql://127.0.0.1:{server.port}/postgres?user=postgres"

        def sink(number: int) -> Sink:
            execute(server, _TABLE.format(f"ours{number}"))
            return Postgres(server.url(), table=f"public.ours{number}", strategy=strategy)

        def by_hand(number: int) -> Hand:
            execute(server, _TABLE.format(f"theirs{number}"))
            options = {"url": url, "driver": "org.postgresql.Driver", "dbtable": f"theirs{number}"}
            return lambda batch: batch.write.format("jdbc").options(**options).mode("append").save()

        yield Target(
            sink=sink, by_hand=by_hand, by_hand_name="foreachBatch with Spark's JDBC append"
        )


@contextmanager
def _kafka() -> Iterator[Target]:
    with embedded_broker() as broker:
        address = broker.address

        def by_hand(_number: int) -> Hand:
            options = {"kafka.bootstrap.servers": address, "topic": new_topic(address)}
            return lambda batch: (
                batch.selectExpr("title AS value").write.format("kafka").options(**options).save()
            )

        yield Target(
            sink=lambda _: Kafka(address, topic=new_topic(address), value="title"),
            by_hand=by_hand,
            by_hand_name="foreachBatch with Spark's Kafka writer, at least once",
        )


@contextmanager
def _delta() -> Iterator[Target]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        yield Target(
            sink=lambda number: Delta(f"{folder}/ours{number}", create_table="if_missing"),
            by_hand=lambda number: (
                lambda batch: (
                    batch.write.format("delta").mode("append").save(f"{folder}/theirs{number}")
                )
            ),
            by_hand_name="foreachBatch with delta-spark's append",
        )


@contextmanager
def _iceberg() -> Iterator[Target]:
    import pyarrow as pa  # noqa: PLC0415  of this target only
    from pyiceberg.catalog import load_catalog  # noqa: PLC0415

    schema = pa.schema(
        [("id", pa.int64()), ("title", pa.string()), ("at", pa.timestamp("us", tz="UTC"))]
    )
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        properties = {
            "type": "sql",
            "uri": f"sqlite:///{folder}/catalog.db",
            "warehouse": f"file://{folder}/warehouse",
        }
        catalog = load_catalog("lake", **properties)
        catalog.create_namespace("shop")

        def sink(number: int) -> Sink:
            catalog.create_table(f"shop.ours{number}", schema=schema)
            return Iceberg(f"lake.shop.ours{number}", properties=properties)

        def by_hand(number: int) -> Hand:
            catalog.create_table(f"shop.theirs{number}", schema=schema)
            return lambda batch: catalog.load_table(f"shop.theirs{number}").append(
                batch.toArrow().cast(schema)
            )

        yield Target(
            sink=sink, by_hand=by_hand, by_hand_name="foreachBatch with toArrow and pyiceberg"
        )


TARGETS = {
    "files": _files,
    "postgres_staged": partial(_postgres, "staged"),
    "postgres_prepared": partial(_postgres, "prepared"),
    "kafka": _kafka,
    "delta": _delta,
    "iceberg": _iceberg,
}


def _session(*, is_tcp: bool) -> Any:
    for folder in (TESTS, TESTS / "sinks" / "kafka", TESTS / "broker"):
        sys.path.insert(0, str(folder))
    import spark_victim  # type: ignore[import-not-found]  # noqa: PLC0415  found by the line above
    from servers.delta import jars  # noqa: PLC0415

    builder = (
        local_builder("bench", threads=PARTITIONS)
        .config("spark.jars", f"{spark_victim.spark_jars()},{jars()}")
        .config("spark.jars.packages", _JDBC)
        .config("spark.sql.extensions", "io.delta.sql.DeltaSparkSessionExtension")
        .config(
            "spark.sql.catalog.spark_catalog", "org.apache.spark.sql.delta.catalog.DeltaCatalog"
        )
        .config("spark.sql.streaming.numRecentProgressUpdates", 10_000)
        .config("spark.driver.memory", "2g")
    )
    if is_tcp:
        builder = builder.config(UNIX_SOCKETS, False)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def _compared(name: str, target: str, *, is_tcp: bool) -> Comparison:
    with ExitStack() as stack:
        spark = _session(is_tcp=is_tcp)
        stack.callback(spark.stop)
        course = Course(
            spark=spark,
            bootstrap=stack.enter_context(embedded_broker()).address,
            target=stack.enter_context(TARGETS[target]()),
        )
        comparison = Comparison(
            name=name, peer_name=course.target.by_hand_name, unit="ms (p50)", is_rate=False
        )
        course.ours("asap", RATES[0])
        course.by_hand("asap", RATES[0])
        for number, (trigger, rate) in enumerate(product(TRIGGERS, RATES)):
            if number % 2:
                ours, by_hand = course.ours(trigger, rate), course.by_hand(trigger, rate)
            else:
                by_hand, ours = course.by_hand(trigger, rate), course.ours(trigger, rate)
            comparison.ours.append(ours.p50)
            comparison.peer.append(by_hand.p50)
            row = {
                "ours": [round(ours.p50), round(ours.p99)],
                "by_hand": [round(by_hand.p50), round(by_hand.p99)],
                "of_by_hand": round(ours.p50 / by_hand.p50, 2),
            }
            comparison.beside[f"{trigger}_{rate}"] = row
            say(f"{name}: {trigger}, {rate} rows/s: {row}")
    return comparison


def _runs() -> Iterator[tuple[str, Callable[[], Comparison]]]:
    for target in TARGETS:
        for socket, is_tcp in (("", False), ("_tcp", True)):
            name = f"latency_{target}{socket}"
            yield name, partial(_compared, name, target, is_tcp=is_tcp)


RUNS = dict(_runs())

if __name__ == "__main__":
    _produce_here(sys.argv[1], sys.argv[2], int(sys.argv[3]))
