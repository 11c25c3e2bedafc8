"""
A program: a Spark that reaches a bucket by `s3a://` writes files and a Delta table to it, and its
driver dies often.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder

from epochal.coordinator.journal import read_state
from epochal.logs import checkpoint_log
from epochal.sinks.delta import Delta
from epochal.sinks.files import Files, read_epochs, whole_objects
from epochal.spark.driver_write import DriverWrites
from epochal.spark.local_session import local_builder
from epochal.spark.pipeline import Pipeline


def main(given: dict[str, Any]) -> dict[str, Any]:
    """What is seen after each death and in the end, what wrote it, and what is left in doubt."""
    from spark_stage import Killer

    builder = local_builder("writer", threads=2)
    for name, value in given["settings"].items():
        builder.config(name, value)
    spark = builder.getOrCreate()
    root = Path(given["root"])
    reader = spark.readStream.schema("n bigint, p string").option("maxFilesPerTrigger", 1)
    stream = reader.json(str(root / "in")).repartition(2, "n")
    sinks = [Files(name="f", **given["sink"]), Delta(name="d", **given["delta"])]
    with pytest.MonkeyPatch.context() as patched:
        killer = Killer(patched)
        # Few rows are written by jobs too.
        patched.setattr(DriverWrites, "expected", lambda *_: None)
        pipeline = Pipeline("bucket", sinks, watch=killer.watch)
        seen: list[Any] = []
        seen_in_table: list[Any] = []
        for epoch, step in enumerate(given["steps"]):
            killer.at = (step, epoch)
            assert killer.run(pipeline, stream, root / "checkpoint"), step
            seen.append(rows_of(given["sink"]))
            seen_in_table.append(rows_of_table(given["delta"]))
        # Else what is aborted stays listed, as tasks of such jobs may write on.
        patched.setattr(whole_objects, "LATE_TASKS_S", 0.0)
        assert not killer.run(pipeline, stream, root / "checkpoint")
        in_doubt = [
            one.name
            for sink in sinks
            for one in sink.committer(
                pipeline._run.coordinator.identity(sink.name), pipeline.limits
            ).in_doubt()
        ]
        killer.close()
    by_spark = read_epochs(
        given["sink"]["path"], storage_options=given["sink"]["storage_options"], spark=spark
    )
    state = read_state(checkpoint_log(root / "checkpoint"))
    found = {
        "seen": seen,
        "seen_in_table": seen_in_table,
        "rows": rows_of(given["sink"]),
        "table": rows_of_table(given["delta"]),
        "by_spark": sorted([row.n, row.p] for row in by_spark.collect()),
        "writers": [state.sinks[name]["writer"] for name in ("f", "d")],
        "in_doubt": in_doubt,
    }
    spark.stop()
    return found


def rows_of(sink: dict[str, Any]) -> list[list[Any]]:
    rows = read_epochs(sink["path"], storage_options=sink["storage_options"]).to_table()
    return sorted([row["n"], row["p"]] for row in rows.to_pylist())


def rows_of_table(sink: dict[str, Any]) -> list[list[Any]]:
    options = sink["storage_options"]
    if not DeltaTable.is_deltatable(sink["table"], options):
        return []
    query = QueryBuilder().register("t", DeltaTable(sink["table"], storage_options=options))
    rows = pa.table(query.execute("SELECT n, p FROM t").read_all())
    return sorted([row["n"], row["p"]] for row in rows.to_pylist())


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[2] / "spark"))
    sys.stdout.write(json.dumps(main(json.loads(sys.argv[1]))) + "\n")
