"""What a fresh Python worker loads to prepare files: neither the driver's part nor pandas."""

from __future__ import annotations

import pyarrow as pa
import pytest
from sinks.worker_modules import ours, worker_modules

from epochal.sinks.files import Files

MODULES = {"backend", "formats", "layout", "local", "sink", "target", "writer"}


@pytest.mark.parametrize("form", ["parquet", "jsonl", "csv"])
def test_a_task_loads_the_writer_and_one_back_end(drive, tmp_path, form):
    driver = drive(Files(tmp_path / "out", format=form, partition_by=["day"]))
    rows = pa.table({"id": [1, 2], "day": ["mon", "tue"]})
    task = driver.task(rows, 0)
    loaded = worker_modules(tmp_path, driver.sink, task, rows.to_batches()[0])
    assert {name for name in ours(loaded) if name.startswith("sinks.files.")} == {
        f"sinks.files.{name}" for name in MODULES
    }
    assert "pandas" not in loaded
