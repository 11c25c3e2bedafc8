"""Spark's own Kafka source and sink on our broker: streams, batches, isolation, going on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import confluent_kafka
import spark_client
from conftest_tools import MakeTopic
from servers.embedded import EmbeddedServer

COMMITTED, ABORTED = range(100), range(100, 150)


def test_spark_moves_committed_rows_once_from_topic_to_topic_and_goes_on_later(
    broker: EmbeddedServer, make_topic: MakeTopic, tmp_path: Path
) -> None:
    source, target = make_topic(partitions=3), make_topic(partitions=2)
    _transact(broker, source, COMMITTED)
    _transact(broker, source, ABORTED)
    result = _run_spark(broker, source, target, tmp_path)
    values = sorted(f"row-{number}" for number in COMMITTED)
    assert result["read_committed"] == values
    assert result["read_uncommitted"] == sorted([*values, *(f"row-{number}" for number in ABORTED)])
    assert result["epochs"][0] > 1
    assert result["epochs"][1] > 0
    found = _read(broker, target)
    assert sorted((int(one.key()), one.value().decode()) for one in found) == [
        (number, f"moved-row-{number}") for number in (*COMMITTED, *spark_client.MORE)
    ]
    headers = {int(one.key()): one.headers() for one in found}
    assert headers[7] == [("trace", b"7")]
    assert headers[1000] is None


def _transact(broker: EmbeddedServer, topic: str, numbers: range) -> None:
    writer = confluent_kafka.Producer(
        {"bootstrap.servers": broker.address(), "transactional.id": f"writer-{topic}"}
    )
    writer.init_transactions(20)
    writer.begin_transaction()
    for number in numbers:
        headers = [("trace", str(number).encode())]
        writer.produce(topic, key=str(number), value=f"row-{number}", headers=headers)
    if numbers == ABORTED:
        assert writer.flush(20) == 0
        writer.abort_transaction(20)
    else:
        writer.commit_transaction(20)


def _run_spark(broker: EmbeddedServer, source: str, target: str, folder: Path) -> dict[str, Any]:
    command = [sys.executable, spark_client.__file__, broker.address(), source, target]
    done = subprocess.run(
        [*command, str(folder / "checkpoint")],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _read(broker: EmbeddedServer, topic: str) -> list[Any]:
    reader = confluent_kafka.Consumer(
        {
            "bootstrap.servers": broker.address(),
            "group.id": f"reader-{topic}",
            "auto.offset.reset": "earliest",
            "enable.partition.eof": True,
        }
    )
    reader.subscribe([topic])
    found, ended = [], set()
    while len(ended) < 2:
        message = reader.poll(60)
        assert message is not None
        if message.error():
            ended.add(message.partition())
        else:
            found.append(message)
    reader.close()
    return found
