"""A driver to be killed: `python s3_victim.py <folder> <step>` dies at that step of epoch 1."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from epochal.sinks.files import Files
from epochal.spark.local_session import local_session
from epochal.spark.pipeline import Pipeline


def run(spark: Any, root: Path, watch: Callable[[str, int | None], None]) -> None:
    """Three files, each an epoch, to a bucket; the sink's options are in a file beside them."""
    options = json.loads((root / "sink.json").read_text())
    reader = spark.readStream.schema("n bigint").option("maxFilesPerTrigger", 1)
    pipeline = Pipeline("orders", [Files(**options)], watch=watch)
    query = pipeline.start(reader.json(str(root / "in")), root / "checkpoint", availableNow=True)
    query.awaitTermination()


if __name__ == "__main__":

    def die(at: str, epoch: int | None) -> None:
        if (at, epoch) == (sys.argv[2], 1):
            os.kill(os.getpid(), signal.SIGKILL)

    run(local_session("victim", threads=2), Path(sys.argv[1]), die)
