"""What a fresh Python worker loads to prepare files: neither the driver's part nor pandas."""

from __future__ import annotations

import pyarrow as pa
from sinks.delta.conftest import ORDERS
from sinks.worker_modules import ours, worker_modules

from epochal.contract import Begin, Task
from epochal.terms import EpochNumber


def test_a_task_loads_the_writer_and_neither_deltalake_nor_pandas(orders, tmp_path, some):
    life = orders.life()
    life.start(some(1))
    handout = life.committer.begin(Begin(epoch=EpochNumber(0)))
    task = Task(handle=life.next_handle(0, 0), schema=ORDERS, handout=handout)
    batch: pa.RecordBatch = some(1, 2).to_batches()[0]
    loaded = worker_modules(tmp_path, life.sink, task, batch)
    assert [name for name in ours(loaded) if name.startswith("sinks.delta.")] == [
        "sinks.delta.sink",
        "sinks.delta.table_files",
        "sinks.delta.writer",
    ]
    assert not {"deltalake", "pandas"} & loaded
