"""What a fresh Python worker loads to prepare rows for a topic."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
from kafka_broker import Broker, some
from sinks.worker_modules import ours, worker_modules

from epochal.contract import Task


def test_a_task_loads_neither_what_the_driver_needs_nor_pandas(
    kafka: Broker, tmp_path: Path
) -> None:
    life = kafka.life(kafka.topic(partitions=2), key="id")
    rows: pa.Table = some(1, 2, None)
    life.committer.check(rows.schema)
    handle = life.next_handle(0, 0)
    task = Task(handle=handle, schema=rows.schema, handout=life.begin(0))
    (batch,) = rows.to_batches()
    loaded = worker_modules(tmp_path, life.sink, task, batch)
    assert "pandas" not in loaded
    assert {name for name in ours(loaded) if name.startswith("sinks.kafka.")} == {
        "sinks.kafka.batch_sender",
        "sinks.kafka.client",
        "sinks.kafka.errors",
        "sinks.kafka.receipts",
        "sinks.kafka.records",
        "sinks.kafka.sink",
        "sinks.kafka.transactional_ids",
        "sinks.kafka.transactions",
        "sinks.kafka.values",
        "sinks.kafka.writer",
    }
    assert not [name for name in ours(loaded) if name.startswith(("coordinator", "logs", "spark"))]
