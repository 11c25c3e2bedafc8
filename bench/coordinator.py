"""[coordinator] Epochs a second of the coordinator alone, against the machine's own fsync rate."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path

import pyarrow as pa

from bench.harness import Comparison, stopwatch
from epochal.coordinator import Environment
from epochal.session import Session
from epochal.sinks.memory import Memory
from epochal.terms import EpochNumber

EPOCHS = 300
ROUNDS = 5
SCHEMA = pa.schema([("id", pa.int64())])
BATCH = pa.record_batch([pa.array([1])], schema=SCHEMA)


class _DecideToVisible:
    """Times from the durable decision to the last sink's commit."""

    def __init__(self) -> None:
        self.ms: list[float] = []
        self._decided_s = 0.0

    def __call__(self, step: str, _epoch: EpochNumber | None) -> None:
        if step == "decided":
            self._decided_s = time.perf_counter()
        elif step == "settled":
            self.ms.append((time.perf_counter() - self._decided_s) * 1000)


def run() -> Comparison:
    watch = _DecideToVisible()
    comparison = Comparison(
        name="coordinator",
        peer_name="write and fsync of one file, then of its folder",
        unit="epochs/s",
        is_rate=True,
    )
    comparison.run(lambda: _epochs_per_s(watch), _fsyncs_per_s, rounds=ROUNDS)
    ordered = sorted(watch.ms)
    comparison.beside = {
        "decide_to_visible_p50_ms": round(statistics.median(ordered), 3),
        "decide_to_visible_p99_ms": round(ordered[int(len(ordered) * 0.99)], 3),
    }
    return comparison


def _epochs_per_s(watch: _DecideToVisible) -> float:
    with (
        tempfile.TemporaryDirectory() as folder,
        Session(
            "bench",
            sinks=[Memory()],
            log=Path(folder) / "log",
            schema=SCHEMA,
            environment=Environment(on_step=watch),
        ) as session,
        stopwatch() as seconds,
    ):
        for epoch in range(EPOCHS):
            session.begin(epoch)
            session.write(BATCH)
            session.commit()
        return EPOCHS / seconds()


def _fsyncs_per_s() -> float:
    """What one durable record costs at the very least: a new file and its name in the folder."""
    with tempfile.TemporaryDirectory() as name, stopwatch() as seconds:
        folder = os.open(name, os.O_RDONLY)
        for number in range(EPOCHS):
            file = os.open(Path(name) / str(number), os.O_CREAT | os.O_WRONLY, 0o600)
            os.write(file, b"x" * 1024)
            os.fsync(file)
            os.close(file)
            os.fsync(folder)
        os.close(folder)
        return EPOCHS / seconds()
