"""What a fresh Python worker loads to prepare files: neither a catalog nor the driver's part.

pyiceberg's own writer of parquet loads Arrow's datasets, and these load pandas.
"""

from __future__ import annotations

import pyarrow as pa
from sinks.worker_modules import ours, worker_modules

from epochal.contract import Begin, Task
from epochal.terms import EpochNumber

MODULES = {
    "client",
    "data_files",
    "errors",
    "partitions",
    "pyiceberg_private",
    "sink",
    "table_files",
    "types",
    "writer",
}


def test_a_task_loads_the_writer_and_no_catalog(warehouse, live, some, tmp_path):
    life = live(warehouse.sink(warehouse.create()))
    handout = life.committer.begin(Begin(epoch=EpochNumber(0)))
    rows = some(1, 2)
    task = Task(handle=life.next_handle(0, 0), schema=rows.schema, handout=handout)
    batch: pa.RecordBatch = rows.to_batches()[0]
    loaded = worker_modules(tmp_path, life.sink, task, batch)
    assert {name for name in ours(loaded) if name.startswith("sinks.iceberg.")} == {
        f"sinks.iceberg.{name}" for name in MODULES
    }
    assert not {"pyiceberg.catalog", "sqlalchemy"} & loaded
