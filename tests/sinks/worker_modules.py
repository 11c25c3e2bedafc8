"""Modules that a fresh Python worker loads to prepare rows: a worker pays for every import."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pyarrow as pa

from epochal.contract import Sink, Task

_WORKER = """
import json, pickle, sys
with open(sys.argv[1], "rb") as file:
    sink, task, rows = pickle.load(file)
writer = sink.writer(task)
writer.write(rows)
receipt = writer.prepare()
print(json.dumps({"rows": receipt.rows, "modules": sorted(sys.modules)}))
"""


def worker_modules(folder: Path, sink: Sink, task: Task, rows: pa.RecordBatch) -> set[str]:
    """All modules that `writer`, `write` and `prepare` of a sink load, in a new process."""
    given = folder / "worker.pickle"
    given.write_bytes(pickle.dumps((sink, task, rows)))
    done = subprocess.run(
        [sys.executable, "-c", _WORKER, str(given)], capture_output=True, check=False, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["rows"] == rows.num_rows
    return set(found["modules"])


def ours(modules: set[str]) -> list[str]:
    """Those of this package, without the generated messages of Kafka's protocol."""
    return sorted(
        name.removeprefix("epochal.")
        for name in modules
        if name.startswith("epochal.") and ".kafka.messages." not in name
    )
