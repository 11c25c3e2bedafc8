"""What a plain reader of each target sees, by that target's own client and nothing of ours."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping

import pyarrow as pa
import pyarrow.dataset as ds

from epochal.demo.place import AMOUNTS, EVENTS, ORDERS, TABLE, TOPIC, Place
from epochal.errors import EpochalError
from epochal.terms import SinkName

_SILENCE_S = 60.0


def read_table(place: Place) -> pa.Table:
    import psycopg  # noqa: PLC0415  the demo's extra

    with psycopg.connect(place.addresses.postgres) as connection:
        there = connection.execute("SELECT to_regclass(%s)", (TABLE,)).fetchone()
        if there is None or there[0] is None:
            return _rows([], [])
        found = connection.execute(f"SELECT id, part FROM {TABLE}").fetchall()  # noqa: S608  ours
    return _rows([number for number, _ in found], [part for _, part in found])


def read_topic(place: Place) -> pa.Table:
    """All committed records, to the end of every partition."""
    from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition  # noqa: PLC0415  an extra

    consumer = Consumer(
        {
            "bootstrap.servers": place.addresses.kafka,
            "group.id": f"audit-{uuid.uuid4()}",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
        }
    )
    try:
        partitions = consumer.list_topics(TOPIC, timeout=30).topics[TOPIC].partitions
        consumer.assign([TopicPartition(TOPIC, number, OFFSET_BEGINNING) for number in partitions])
        values = _drain(consumer, len(partitions))
    finally:
        consumer.close()
    told = [json.loads(value) for value in values]
    return _rows([row["id"] for row in told], [row["part"] for row in told])


def _drain(consumer: object, partitions: int) -> list[bytes]:
    from confluent_kafka import KafkaError  # noqa: PLC0415  an extra

    values: list[bytes] = []
    ended: set[int] = set()
    heard_s = time.monotonic()
    while len(ended) < partitions:
        # It waits for all of these messages, or for the whole time.
        messages = consumer.consume(num_messages=10_000, timeout=0.2)  # type: ignore[attr-defined]
        if messages:
            heard_s = time.monotonic()
        elif time.monotonic() - heard_s > _SILENCE_S:
            raise EpochalError(f"the broker has said nothing for {_SILENCE_S:.0f} s")
        for message in messages:
            if message.error() is None:
                values.append(message.value())
            elif message.error().code() == KafkaError._PARTITION_EOF:
                ended.add(message.partition())
            else:
                raise EpochalError(f"the topic can't be read: {message.error()}")
    return values


def read_folder(place: Place) -> pa.Table:
    # Like every reader of a folder, a dataset passes over names that begin with "_" or ".".
    if not place.amounts.exists():
        return _rows([], [])
    return ds.dataset(place.amounts, format="csv").to_table(columns=["id", "part"])


def _rows(ids: list[int], parts: list[int]) -> pa.Table:
    return pa.table({"id": pa.array(ids, pa.int64()), "part": pa.array(parts, pa.int64())})


READERS: Mapping[SinkName, Callable[[Place], pa.Table]] = {
    ORDERS: read_table,
    EVENTS: read_topic,
    AMOUNTS: read_folder,
}
