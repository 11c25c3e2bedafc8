"""
A script that is interrupted: first by Ctrl-C, then by the end of Spark's JVM.

    python interrupted.py <folder>

Prints JSON, a line at a time: that it is in an epoch, and after each interruption what is left.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark import SparkContext

from epochal.sinks.files import Files
from epochal.spark.local_session import local_session
from epochal.spark.pipeline import Pipeline


def say(what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def started(spark: Any, root: Path, mark: str) -> tuple[Pipeline, Any]:
    """A query whose tasks have begun, and would take long. A cancelled task may begin late."""
    task = root / mark

    def slowly(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            task.touch()
            time.sleep(60)
            yield batch

    stream = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 10).load()
    stream = stream.mapInArrow(slowly, stream.schema)
    sinks = [Files(str(root / name), name=name) for name in ("a", "b")]
    pipeline = Pipeline("interrupted", sinks)
    query = pipeline.start(stream, root / "checkpoint")
    while not task.exists():
        time.sleep(0.05)
    return pipeline, query


def main(root: Path) -> None:
    spark = local_session("interrupted", threads=2)
    pipeline, query = started(spark, root, "first")
    try:
        say("is in an epoch")
        # Not in a call to Spark: there PySpark's own handler of Ctrl-C fails, with a stack trace.
        threading.Event().wait()
    except KeyboardInterrupt:
        while query.isActive:
            time.sleep(0.05)
    pipeline.close()
    error = pipeline.error
    say({"active": query.isActive, "exception": query.exception(), "error": error and str(error)})
    pipeline, _ = started(spark, root, "second")
    say("is in an epoch again")
    SparkContext._gateway.proc.kill()
    while pipeline.error is None:
        time.sleep(0.05)
    error = pipeline.error
    say({"class": type(error).__name__, "message": error.message, "hint": error.hint})
    ending = threading.Thread(target=pipeline.close, daemon=True)
    ending.start()
    ending.join(30)
    sys.exit(ending.is_alive())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
