"""
The Spark job of a demonstration: the process that is killed.

It prints each step of each epoch as one JSON line on stdout. With `--die-at` it sends itself
SIGKILL right after that step: a signal from another process can't hit a step as exactly.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path

from epochal.demo.workspace import PIPELINE, SCHEMA, Workspace
from epochal.spark.local_session import local_session
from epochal.spark.pipeline import Pipeline
from epochal.terms import EpochNumber


class StepPrinter:
    """Prints every step, and kills this process at the one that `--die-at` names."""

    def __init__(self, die_at: str | None) -> None:
        step, _, epochs = (die_at or "").partition("/")
        self._step = step
        self._epochs_left = int(epochs or 0)

    def __call__(self, step: str, epoch: EpochNumber | None) -> None:
        sys.stdout.write(json.dumps({"step": step, "epoch": epoch}) + "\n")
        sys.stdout.flush()
        if self._step and step.startswith(self._step):
            self._epochs_left -= 1
            if self._epochs_left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)


def run(workspace: Workspace, die_at: str | None) -> None:
    spark = local_session("epochal demo", threads=2)
    orders = (
        spark.readStream.schema(SCHEMA)
        .option("maxFilesPerTrigger", 1)
        .parquet(str(workspace.source))
    )
    pipeline = Pipeline(PIPELINE, sinks=workspace.sinks(), watch=StepPrinter(die_at))
    query = pipeline.start(orders, checkpoint=str(workspace.checkpoint), availableNow=True)
    query.awaitTermination()
    spark.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description="a driver of the demonstration")
    parser.add_argument("root", type=Path)
    parser.add_argument("--die-at", metavar="STEP/COUNT")
    options = parser.parse_args()
    run(Workspace(options.root), options.die_at)


if __name__ == "__main__":
    main()
