"""A program: a Spark that reaches a bucket by `s3a://` writes to it, and its driver dies often."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from epochal.coordinator.journal import read_state
from epochal.logs import checkpoint_log
from epochal.sinks.files import Files, read_epochs, whole_objects
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
    sink = Files(name="f", **given["sink"])
    with pytest.MonkeyPatch.context() as patched:
        killer = Killer(patched)
        pipeline = Pipeline("bucket", [sink], watch=killer.watch)
        seen = []
        for epoch, step in enumerate(given["steps"]):
            killer.at = (step, epoch)
            assert killer.run(pipeline, stream, root / "checkpoint"), step
            seen.append(rows_of(given["sink"]))
        # Else what is aborted stays listed, as tasks of such jobs may write on.
        patched.setattr(whole_objects, "LATE_TASKS_S", 0.0)
        assert not killer.run(pipeline, stream, root / "checkpoint")
        identity = pipeline._run.coordinator.identity("f")
        in_doubt = sink.committer(identity, pipeline.limits).in_doubt()
        killer.close()
    by_spark = read_epochs(
        given["sink"]["path"], storage_options=given["sink"]["storage_options"], spark=spark
    )
    found = {
        "seen": seen,
        "rows": rows_of(given["sink"]),
        "by_spark": sorted([row.n, row.p] for row in by_spark.collect()),
        "writer": read_state(checkpoint_log(root / "checkpoint")).sinks["f"]["writer"],
        "in_doubt": [one.name for one in in_doubt],
    }
    spark.stop()
    return found


def rows_of(sink: dict[str, Any]) -> list[list[Any]]:
    rows = read_epochs(sink["path"], storage_options=sink["storage_options"]).to_table()
    return sorted([row["n"], row["p"]] for row in rows.to_pylist())


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[2] / "spark"))
    sys.stdout.write(json.dumps(main(json.loads(sys.argv[1]))) + "\n")
