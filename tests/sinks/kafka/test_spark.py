"""Consume, transform, produce on Spark, killed again and again; and what Spark makes of a row."""

from __future__ import annotations

import datetime as dt
import decimal
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import confluent_kafka
import pytest
import spark_victim as victim
from confluent_kafka import TopicPartition
from kafka_broker import Broker, open_transactions, reader_of

from epochal.errors import Misconfigured
from epochal.kafka.cluster import Controller
from epochal.kafka.messages.create_topics import CreatableTopic, CreateTopicsRequest
from epochal.sinks.files import read_epochs
from epochal.sinks.kafka import Kafka
from epochal.sinks.kafka import json as as_json
from epochal.spark.pipeline import Pipeline
from epochal.terms import sink_tag

DEATHS = ["prepared", "decided", "committed taken", "settled", "begun#2"]
STEPS = ["claimed", "begun", "prepared", "rehearsed", "gated", "decided", "committed taken"]
STEPS += ["committed given", "settled"]
KILLS = int(os.environ.get("EPOCHAL_TEST_KAFKA_KILLS", len(DEATHS)))
ROWS_A_LIFE = 2 * victim.ROWS_AN_EPOCH


def deaths() -> list[str]:
    """Those that matter most; with more kills asked for, steps by a seeded chance."""
    chance = random.Random(7)
    more = [
        f"{chance.choice(STEPS[1:])}#{chance.choice((1, 1, 2))}" for _ in range(KILLS - len(DEATHS))
    ]
    return [*DEATHS[:KILLS], *more]


@pytest.mark.proof
@pytest.mark.timeout(3600)
def test_a_killed_pipeline_moves_every_row_once_and_the_total_stays(
    kafka: Broker, tmp_path: Path
) -> None:
    for topic in (victim.SOURCE, victim.TAKEN):
        wanted = CreatableTopic(name=topic, num_partitions=3, replication_factor=1)
        kafka.client.ask(CreateTopicsRequest(topics=[wanted], timeout_ms=20_000), Controller())
    lives = [*deaths(), ""]
    assert list(_lives(kafka, tmp_path, lives)) == lives
    wanted = {number: number % 97 for number in range(ROWS_A_LIFE * len(lives))}
    taken = [json.loads(message.value()) for message in kafka.messages(victim.TAKEN)]
    given = read_epochs(str(tmp_path / "given")).to_table().to_pylist()
    assert sorted(row["id"] for row in taken) == sorted(wanted)
    assert sorted((row["id"], row["amount"]) for row in given) == sorted(wanted.items())
    assert sum(row["amount"] for row in taken) + sum(row["amount"] for row in given) == 0
    assert open_transactions(kafka.client, sink_tag("taken")) == []
    assert _group_offsets(kafka) == _ends(kafka)


def _lives(kafka: Broker, root: Path, lives: list[str]) -> Iterator[str]:
    """Drivers one after the other, each with rows of its own; the next one warms up meanwhile."""
    drivers = [_start(kafka, root)]
    try:
        for number, death in enumerate(lives):
            if number + 1 < len(lives):
                drivers.append(_start(kafka, root))
            _produce(kafka, range(number * ROWS_A_LIFE, (number + 1) * ROWS_A_LIFE))
            yield _live(root, drivers[number], death)
    finally:
        for driver in drivers:
            driver.kill()
            driver.communicate()


def _start(kafka: Broker, root: Path) -> subprocess.Popen[str]:
    with (root / "driver.txt").open("a") as output:
        command = [sys.executable, victim.__file__, str(root), kafka.bootstrap]
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=output, text=True
        )


def _live(root: Path, driver: subprocess.Popen[str], death: str) -> str:
    note = root / "died.txt"
    note.unlink(missing_ok=True)
    driver.communicate(f"{death}\n", timeout=900)
    if driver.returncode == 0:
        return ""
    if driver.returncode != -signal.SIGKILL:
        pytest.fail((root / "driver.txt").read_text()[-4000:])
    return note.read_text()


def _produce(kafka: Broker, numbers: range) -> None:
    writer = confluent_kafka.Producer({"bootstrap.servers": kafka.bootstrap})
    for number in numbers:
        writer.produce(victim.SOURCE, key=str(number), value=str(number % 97))
    assert writer.flush(30) == 0


def _group_offsets(kafka: Broker) -> list[int]:
    reader = confluent_kafka.Consumer(
        {"bootstrap.servers": kafka.bootstrap, "group.id": victim.GROUP}
    )
    found = reader.committed([TopicPartition(victim.SOURCE, index) for index in range(3)], 20)
    reader.close()
    return [part.offset for part in found]


def _ends(kafka: Broker) -> list[int]:
    reader = reader_of(kafka.bootstrap, committed=True)
    parts = [TopicPartition(victim.SOURCE, index) for index in range(3)]
    return [reader.get_watermark_offsets(part, timeout=60)[1] for part in parts]


def test_a_row_is_the_same_through_spark_and_without_it(kafka: Broker, spark, tmp_path) -> None:
    """What the JVM makes of key, value, headers and time, and what Arrow makes of the same row."""
    moment = dt.datetime(2026, 1, 31, 9, 30, 0, 123456, tzinfo=dt.UTC)
    columns = (
        "id bigint, name string, part int, at timestamp, day date, price decimal(10,2),"
        " ratio double, raw binary, tags array<string>, gone string,"
        " h array<struct<key: string, value: binary>>"
    )
    price, name = decimal.Decimal("19.90"), 'grüß "dich"\n'
    row = (7, name, 1, moment, moment.date(), price, 0.1, b"\x00\xff", ["a"], None)
    frame = spark.createDataFrame([(*row, [("trace", b"1")])], columns)
    taken = ["id", "name", "at", "day", "price", "ratio", "raw", "tags", "gone"]
    through, without = kafka.topic(partitions=2), kafka.topic(partitions=2)
    options = {
        "key": "name",
        "partition": "part",
        "timestamp": "at",
        "headers": "h",
        "value": as_json(*taken),
    }
    pipeline = Pipeline("rows", [kafka.sink(through, **options, name="rows")])
    pipeline.write(frame, run="once", checkpoint=str(tmp_path / "chk"))
    life = kafka.life(without, **options)
    life.write(0, frame.toArrow())
    (one,), (other,) = kafka.messages(through), kafka.messages(without)
    for message in (one, other):
        assert message.partition() == 1
        assert message.key() == name.encode()
        assert message.timestamp()[1] == int(moment.timestamp() * 1000)
        assert message.headers() == [("trace", b"1")]
    assert json.loads(one.value()) == json.loads(other.value())
    assert json.loads(one.value())["at"] == "2026-01-31T09:30:00.123456Z"
    assert json.loads(one.value())["gone"] is None


def test_rows_of_one_key_keep_their_order_within_an_epoch(kafka: Broker, spark, tmp_path) -> None:
    topic = kafka.topic(partitions=3)
    frame = spark.range(600).selectExpr("id % 5 AS who", "id AS turn").repartition(4)
    sink = kafka.sink(topic, key="who", order_by=["turn DESC"], name="ordered")
    Pipeline("ordered", [sink]).write(frame, run="once", checkpoint=str(tmp_path / "chk"))
    seen: dict[int, list[int]] = {}
    for message in sorted(kafka.messages(topic), key=lambda one: (one.partition(), one.offset())):
        row = json.loads(message.value())
        seen.setdefault(row["who"], []).append(row["turn"])
    assert len(seen) == 5
    assert all(turns == sorted(turns, reverse=True) for turns in seen.values())


MISSING = [
    {"key": "nothing"},
    {"key": "upper(nothing)"},
    {"value": "nothing"},
    {"value": as_json("id", "nothing")},
    {"headers": "nothing"},
    {"partition": "nothing"},
    {"timestamp": "nothing"},
    {"topic_from": "nothing"},
    {"key": "id", "order_by": "nothing DESC"},
    {"where": "nothing > 1"},
    {"select": ["id", "nothing"]},
    {"select": lambda rows: rows.select("nothing")},
]


@pytest.mark.parametrize("options", MISSING, ids=" ".join)
def test_a_column_that_is_missing_is_reported_before_anything_starts(
    spark, tmp_path, options, caplog
) -> None:
    """Without a stack of Spark's, with the option and the columns; no broker is asked, either."""
    stream = spark.readStream.format("rate").load().selectExpr("value AS id", "timestamp AS at")
    pipeline = Pipeline("columns", [Kafka("127.0.0.1:1", topic="t", name="to-t", **options)])
    option = list(options)[-1]
    starts = (
        lambda: pipeline.check(stream),
        lambda: pipeline.start(stream, checkpoint=tmp_path / "chk"),
    )
    for start in starts:
        with pytest.raises(Misconfigured, match="there is no column `nothing`") as caught:
            start()
        assert "sink 'to-t'" in caught.value.message
        assert f"{option}=" in caught.value.message
        assert "id, at" in caught.value.hint
        assert caught.value.__cause__ is None
    assert not (tmp_path / "chk").exists()
    assert not spark.streams.active
    assert caplog.records == [], "PySpark logs the error with its stack"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"value": "array(id)"}, r"value='array\(id\)' is of type"),
        ({"key": "array(id)"}, r"key='array\(id\)' is of type"),
        (
            {"partition": "string(id)"},
            r"partition must be an integer, and 'string\(id\)' is string",
        ),
        ({"key": "id +"}, r"key='id \+'.*PARSE_SYNTAX_ERROR"),
    ],
    ids=str,
)
def test_a_column_that_does_not_fit_is_reported_as_its_user_wrote_it(
    kafka: Broker, spark, options, expected
) -> None:
    pipeline = Pipeline("columns", [kafka.sink(kafka.topic(), **options)])
    with pytest.raises(Misconfigured, match=expected):
        pipeline.check(spark.range(3))
