"""A task by itself: writes many rows, and prints by how much its memory grew at the most, in MB.

python memory_victim.py <pickled sink and task> <rows>
"""

from __future__ import annotations

import pickle
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

_BATCH_ROWS = 10_000
_TEXT = "x" * 100
_STATUS = Path("/proc/self/status")
_FORGET_THE_PEAK = "5"


def megabytes(what: str) -> float:
    (line,) = [line for line in _STATUS.read_text().splitlines() if line.startswith(what)]
    return int(line.split()[1]) / 1024


def batch(first: int) -> pa.RecordBatch:
    ids = pa.array(range(first, first + _BATCH_ROWS), pa.int64())
    return pa.record_batch({"id": ids, "name": pa.array([_TEXT] * _BATCH_ROWS)})


def main() -> None:
    sink, task = pickle.loads(Path(sys.argv[1]).read_bytes())
    # What a driver loads when it connects is no matter of rows.
    warming = sink.writer(replace(task, handle=replace(task.handle, attempt=0)))
    warming.write(batch(0).slice(0, 1))
    warming.prepare()
    writer = sink.writer(task)
    Path("/proc/self/clear_refs").write_text(_FORGET_THE_PEAK)
    before = megabytes("VmRSS")
    for first in range(0, int(sys.argv[2]), _BATCH_ROWS):
        writer.write(batch(first))
    receipt = writer.prepare()
    sys.stdout.write(f"{receipt.rows} {round(megabytes('VmHWM') - before)}")


main()
