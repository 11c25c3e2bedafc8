"""What a fresh Python worker loads to prepare rows for a service, in both modes."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
from sinks.http.conftest import TOKEN
from sinks.life import DriverLife
from sinks.worker_modules import ours, worker_modules

from epochal.contract import Task
from epochal.sinks.http import Http

ROWS = pa.record_batch({"id": pa.array([1, 2], pa.int64()), "name": ["a", "b"]})


def loaded_by(folder: Path, sink: Http) -> set[str]:
    handle = DriverLife(sink=sink).next_handle(0, 0)
    return worker_modules(folder, sink, Task(handle=handle, schema=ROWS.schema), ROWS)


def test_a_task_of_two_phases_loads_neither_committer_nor_check_nor_pandas(receiver, tmp_path):
    loaded = loaded_by(tmp_path, Http(receiver.url, token=TOKEN))
    assert "pandas" not in loaded
    assert {name for name in ours(loaded) if name.startswith("sinks.http.")} == {
        "sinks.http.client",
        "sinks.http.errors",
        "sinks.http.sink",
        "sinks.http.writer",
    }


def test_a_task_of_keyed_calls_loads_no_http_client(tmp_path):
    sink = Http("http://localhost:1/", mode="idempotency-key", spool=tmp_path / "spool")
    loaded = loaded_by(tmp_path, sink)
    assert not loaded & {"pandas", "httpx"}
    assert {name for name in ours(loaded) if name.startswith("sinks.http.")} == {
        "sinks.http.errors",
        "sinks.http.sink",
        "sinks.http.writer",
    }
