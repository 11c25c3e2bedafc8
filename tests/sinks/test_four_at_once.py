"""PostgreSQL, Kafka, Iceberg and HTTP under one decision, and a driver that is killed at random."""

import json
import random
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest
from confluent_kafka import Consumer
from confluent_kafka.admin import AdminClient, NewTopic
from pyiceberg.catalog import load_catalog
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField, StringType
from servers.postgres import running_server
from servers.receiver import ReceiverServer
from sinks.four_victim import ROWS, rows

from epochal.testing import broker

EPOCHS = 8
KILLS = 4
SEED = 20_261


@pytest.fixture
def places(tmp_path):
    """Four targets, empty, and where a driver finds them."""
    lake = {
        "type": "sql",
        "uri": f"sqlite:///{tmp_path}/lake.db",
        "warehouse": f"file://{tmp_path}",
    }
    catalog = load_catalog("lake", **lake)
    catalog.create_namespace("shop")
    fields = (NestedField(1, "id", LongType()), NestedField(2, "name", StringType()))
    catalog.create_table("shop.orders", schema=Schema(*fields))
    receiver = ReceiverServer(tmp_path / "receiver")
    with ExitStack() as stack:
        stack.callback(catalog.close)
        stack.callback(receiver.kill)
        receiver.start()
        postgres = stack.enter_context(running_server())
        bootstrap = stack.enter_context(broker())
        with psycopg.connect(postgres.url(), autocommit=True) as connection:
            connection.execute("CREATE TABLE orders (id bigint, name text)")
        admin = AdminClient({"bootstrap.servers": bootstrap})
        admin.create_topics([NewTopic("orders", 3)])["orders"].result(30)
        yield (
            {
                "postgres": postgres.url(),
                "kafka": bootstrap,
                "lake": json.dumps(lake),
                "http": receiver.url,
                "log": str(tmp_path / "log"),
            },
            receiver,
        )


def live(at, steps, epochs=EPOCHS):
    """One life of the driver; how it ended."""
    victim = Path(__file__).with_name("four_victim.py")
    command = [sys.executable, str(victim), json.dumps(at), str(epochs), str(steps)]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=900)


def visible(at, receiver):
    """What readers of each target see, by sink: ids, sorted."""
    with psycopg.connect(at["postgres"]) as connection:
        postgres = [one for (one,) in connection.execute("SELECT id FROM orders")]
    catalog = load_catalog("lake", **json.loads(at["lake"]))
    iceberg = catalog.load_table("shop.orders").scan().to_arrow()["id"].to_pylist()
    catalog.close()
    return {
        "postgres": sorted(postgres),
        "kafka": sorted(_consumed(at["kafka"])),
        "iceberg": sorted(iceberg),
        "http": sorted(row["id"] for row in receiver.rows("http")),
    }


def _consumed(bootstrap):
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": f"readers-{random.random()}",
            "isolation.level": "read_committed",
            "auto.offset.reset": "earliest",
            "enable.partition.eof": True,
        }
    )
    consumer.subscribe(["orders"])
    found, ended = [], set()
    while len(ended) < 3:
        message = consumer.poll(30)
        assert message is not None, "the topic has no end within 30 s"
        if message.error():
            ended.add(message.partition())
        else:
            found.append(json.loads(message.value())["id"])
    consumer.close()
    return found


@pytest.mark.proof
def test_each_epoch_is_in_all_four_or_in_none_whatever_is_killed(places):
    at, receiver = places
    chance = random.Random(SEED)
    for kill in range(KILLS):
        steps = chance.randint(1, 40)
        ended = live(at, steps)
        assert ended.returncode in (0, -signal.SIGKILL), f"life {kill}: {ended.stderr}"
    # At rest: a life that only finishes what was decided and clears up what was not.
    assert (rest := live(at, 0, epochs=0)).returncode == 0, rest.stderr
    seen = visible(at, receiver)
    assert len({tuple(ids) for ids in seen.values()}) == 1, {k: len(v) for k, v in seen.items()}
    assert len(seen["postgres"]) % ROWS == 0

    assert (last := live(at, 0)).returncode == 0, last.stderr
    expected = sorted(row["id"] for epoch in range(EPOCHS) for row in rows(epoch))
    assert visible(at, receiver) == dict.fromkeys(seen, expected)
