"""`epochal verify --source` of a pipeline's file, whose Kafka source is read again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from broker.client_jars import spark_jars
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from epochal.testing import broker

FILE = """\
pipeline: orders
checkpoint: {root}/chk
source:
  format: kafka
  options:
    kafka.bootstrap.servers: {bootstrap}
    subscribe: orders
    startingOffsets: earliest
    maxOffsetsPerTrigger: "3"
steps:
  - select: ["CAST(value AS STRING) v", "partition p"]
  - sql: SELECT upper(v) AS v, p FROM input WHERE v <> 'skipped'
sinks:
  - {{kind: files, path: "{root}/out", name: all}}
  - {{kind: files, path: "{root}/first", name: first, where: p = 0}}
trigger: {{available_now: true}}
spark:
  jars: [{jars}]
"""


class Shop:
    """A topic, and the file of a pipeline that reads it."""

    def __init__(self, root: Path, bootstrap: str) -> None:
        self._settings = {"bootstrap.servers": bootstrap}
        self._admin = AdminClient(self._settings)
        self.root = root
        self.file = root / "orders.yaml"
        self.file.write_text(FILE.format(root=root, bootstrap=bootstrap, jars=spark_jars()))

    def make_topic(self) -> None:
        self._admin.create_topics([NewTopic("orders", 2)])["orders"].result(30)

    def lose_topic(self) -> None:
        self._admin.delete_topics(["orders"])["orders"].result(30)

    def produce(self, *values: str) -> None:
        producer = Producer(self._settings)
        for at, value in enumerate(values):
            producer.produce("orders", value, partition=at % 2)
        assert producer.flush(30) == 0

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "epochal.cli", *arguments]
        return subprocess.run(
            command, cwd=self.root, capture_output=True, text=True, check=False, timeout=900
        )

    def verify(self) -> tuple[int, dict]:
        done = self.run("verify", str(self.file), "--source", "--json")
        assert done.stdout, done.stderr[-4000:]
        return done.returncode, json.loads(done.stdout)


@pytest.fixture
def shop(tmp_path):
    with broker() as bootstrap:
        made = Shop(tmp_path, bootstrap)
        made.make_topic()
        yield made


def verdicts(report: dict) -> list[tuple]:
    return [(one["sink"], one["verdict"], one["source_rows"]) for one in report["sources"]]


def test_a_topic_is_read_again_and_another_one_of_its_name_is_noticed(shop):
    shop.produce("a", "b", "c", "d", "skipped", "e", "f", "g")
    done = shop.run("run", str(shop.file), "--quiet")
    assert done.returncode == 0, done.stderr[-4000:]

    # Partition 0 is as it was; in the other one a row has changed.
    shop.lose_topic()
    shop.make_topic()
    shop.produce("a", "b", "c", "d", "skipped", "e", "f", "G!", "of no epoch yet")
    code, report = shop.verify()
    assert (code, verdicts(report)) == (1, [("all", "differs", 7), ("first", "agrees", 3)])
    is_same = {one["sink"]: one["source_hash"] == one["decided_hash"] for one in report["sources"]}
    assert is_same == {"all": False, "first": True}
    assert [one["visible_rows"] for one in report["sinks"]] == [7, 3]
