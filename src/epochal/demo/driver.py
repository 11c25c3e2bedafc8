"""
The process that gets killed: an ordinary Spark job with one pipeline.

It tells each step of each epoch as one JSON line on stdout. Asked for with `--die-at`, it kills
itself right after that step, which no signal from outside can hit as exactly.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path

from epochal.demo.place import PIPELINE, Place
from epochal.demo.source import SCHEMA
from epochal.spark.local_session import local_session
from epochal.spark.pipeline import Pipeline
from epochal.terms import EpochNumber


class StepTeller:
    """Tells steps, and dies at the one it was told to die at."""

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


def run(place: Place, die_at: str | None) -> None:
    spark = local_session("epochal demo", threads=2)
    orders = (
        spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(place.source))
    )
    pipeline = Pipeline(PIPELINE, sinks=place.sinks(), watch=StepTeller(die_at))
    query = pipeline.start(orders, checkpoint=str(place.checkpoint), availableNow=True)
    query.awaitTermination()
    spark.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description="one driver of the demonstration")
    parser.add_argument("root", type=Path)
    parser.add_argument("--die-at", metavar="STEP/COUNT")
    asked = parser.parse_args()
    run(Place(asked.root), asked.die_at)


if __name__ == "__main__":
    main()
