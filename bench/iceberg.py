"""
[iceberg_history] Commits as a table's history grows to 10,000, against the first hundred of them.
[iceberg_append_spark] A stream into a table, against iceberg-spark's own streaming sink.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.harness import Comparison, say, stopwatch
from epochal.contract import Begin, Task
from epochal.sinks.iceberg import Iceberg
from epochal.terms import EpochNumber, Generation, Identity, Limits, Uid

COMMITS = int(os.environ.get("EPOCHAL_BENCH_COMMITS", "10000"))
SNAPSHOTS_KEPT = 20
FEW = 100
ROUNDS = 8
ROOT = Path(__file__).resolve().parent.parent


def catalog_properties(folder: str) -> dict[str, str]:
    return {
        "type": "sql",
        "uri": f"sqlite:///{folder}/catalog.db",
        "warehouse": f"file://{folder}/warehouse",
    }


def history() -> Comparison:
    """No Spark: one file per epoch, and the driver's own part of it timed."""
    comparison = Comparison(
        name="iceberg_history",
        peer_name=f"the same at the first {FEW} commits",
        unit="s a commit",
        is_rate=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        took_s, cpu_s = _commits(
            Iceberg(
                "lake.shop.orders",
                properties=catalog_properties(folder),
                snapshots_kept=SNAPSHOTS_KEPT,
            )
        )
    comparison.peer = [statistics.median(took_s[FEW : 2 * FEW])]
    comparison.ours = [statistics.median(took_s[-FEW:])]
    comparison.beside = {
        "commits": COMMITS,
        "snapshots_kept": SNAPSHOTS_KEPT,
        "slowest_s": round(max(took_s[FEW:]), 3),
        "cpu_s_at_first": round(statistics.median(cpu_s[FEW : 2 * FEW]), 4),
        "cpu_s_at_last": round(statistics.median(cpu_s[-FEW:]), 4),
        "median_s_by_tenth": [
            round(statistics.median(took_s[at : at + COMMITS // 10]), 4)
            for at in range(0, COMMITS, COMMITS // 10)
        ],
    }
    return comparison


def _commits(sink: Iceberg) -> tuple[list[float], list[float]]:
    """Seconds and CPU seconds of each commit: the latter are what a busy machine leaves alone."""
    import pyarrow as pa  # noqa: PLC0415  only the driver of a comparison needs none of this
    from pyiceberg.catalog import load_catalog  # noqa: PLC0415

    rows = pa.record_batch({"id": [1, 2, 3], "name": ["a", "b", "c"]})
    catalog = load_catalog("lake", **dict(sink.address.properties))
    catalog.create_namespace("shop")
    catalog.create_table("shop.orders", schema=rows.schema)
    identity = Identity(
        pipeline="bench", uid=Uid("abcdefgh2345"), sink=sink.name, generation=Generation(1)
    )
    committer = sink.committer(identity, Limits())
    took_s, cpu_s = [], []
    for number in range(COMMITS):
        epoch = EpochNumber(number)
        handle = identity.handle(epoch, partition=0, attempt=number)
        task = Task(handle=handle, schema=rows.schema, handout=committer.begin(Begin(epoch=epoch)))
        writer = sink.writer(task)
        writer.write(rows)
        receipt = writer.prepare()
        began_s = time.process_time()
        with stopwatch() as seconds:
            committer.rehearse(epoch, [receipt])
            committer.commit(epoch, [receipt])
            took_s.append(seconds())
        cpu_s.append(time.process_time() - began_s)
        if number % (COMMITS // 10) == 0:
            say(f"iceberg_history: commit {number}: {took_s[-1] * 1000:.0f} ms")
    assert catalog.load_table("shop.orders").scan().count() == 3 * COMMITS
    committer.close()
    catalog.close()
    return took_s, cpu_s


def append_spark() -> Comparison:
    """
    Both in a PySpark of 4.1, the newest that Iceberg has a runtime for, in an environment of its
    own; Maven brings the runtime.
    """
    comparison = Comparison(
        name="iceberg_append_spark",
        peer_name="iceberg-spark's own streaming sink",
        unit="rows/s",
        is_rate=True,
    )
    python, runtime = _environment()
    with tempfile.TemporaryDirectory() as folder:
        ran = subprocess.run(
            [str(python), "-m", "bench.iceberg_spark", folder, str(runtime), str(ROUNDS)],
            cwd=ROOT,
            env={**os.environ, "PYSPARK_PYTHON": str(python)},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    figures: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    comparison.ours, comparison.peer, comparison.cpu_s = (
        figures[name] for name in ("ours", "peer", "cpu_s")
    )
    comparison.beside = {**figures["beside"], "iceberg": runtime.name}
    return comparison


def _environment() -> tuple[Path, Path]:
    """PySpark 4.1 beside pyiceberg, all else as the lock has it; and Iceberg's runtime for it."""
    sys.path.insert(0, str(ROOT / "tools"))
    import compat  # noqa: PLC0415  the scripts are no package
    import setup  # noqa: PLC0415

    venv = compat.VENVS / "iceberg-spark"
    python = venv / "bin" / "python"
    runtime = compat.iceberg_runtime("4.1")
    if python.exists():
        return python, runtime
    compat.VENVS.mkdir(exist_ok=True)
    compat.write_constraints()
    uv, env = setup.uv_command(), setup.uv_environment()
    setup.run(f"make {venv.name}", uv, "venv", "-q", "--python", setup.PYTHON, venv, env=env)
    setup.run(
        "install PySpark 4.1 and pyiceberg", uv, "pip", "install", "-q", "--python", python,
        "--constraints", compat.CONSTRAINTS, "--editable", f"{ROOT}[spark,iceberg]",
        "pyspark==4.1.*", "psutil", env=env,
    )  # fmt: skip
    return python, runtime


RUNS = {"iceberg_history": history, "iceberg_append_spark": append_spark}

if __name__ == "__main__":
    sys.exit("run it by `make bench ONLY=iceberg`")
