"""
A driver to be killed: files to a Kafka topic by `format("epochal")`, one file an epoch.

    python source_victim.py <folder> <bootstrap> <topic>

It starts Spark and waits for a line on stdin: the step of its death, or none to run to the end of
the source. Decisions are made in a process of their own, so that one kills the driver and its JVM.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epochal.sinks.kafka import Kafka
from epochal.spark import register
from epochal.spark.local import local_builder
from epochal.spark.options import from_options

NAME = "by-options"
TASKS = 2


@dataclass(frozen=True, kw_only=True)
class DyingKafka(Kafka):
    """Its committer kills the driver before the verb that a note on disk names, once."""

    folder: str = ""

    def committer(self, identity: Any, limits: Any) -> Any:
        committer: Any = super().committer(identity, limits)
        for verb in ("rehearse", "commit"):
            setattr(committer, verb, self._deadly(verb, getattr(committer, verb)))
        return committer

    def _deadly(self, verb: str, work: Callable[..., None]) -> Callable[..., None]:
        def deadly(*arguments: Any) -> None:
            death = Path(self.folder) / "death.txt"
            if death.exists() and death.read_text() == verb:
                death.rename(Path(self.folder) / "died.txt")
                victims = json.loads((Path(self.folder) / "pids.json").read_text())
                for pid in (*victims, os.getpid()):
                    os.kill(pid, signal.SIGKILL)
            work(*arguments)

        return deadly


def make(options: Mapping[str, str]) -> DyingKafka:
    made: DyingKafka = from_options(DyingKafka, options)
    return made


def connect() -> Any:
    # It lives for seconds: the second compiler would cost more than it gives.
    quick = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    builder = local_builder("source-victim", threads=TASKS)
    spark = builder.config("spark.driver.extraJavaOptions", quick).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def run(spark: Any, root: Path, bootstrap: str, topic: str) -> None:
    register(spark, {"kafka": make})
    reader = spark.readStream.schema("id bigint, name string").option("maxFilesPerTrigger", 1)
    writer = (
        reader.json(str(root / "in"))
        .repartition(TASKS)
        .writeStream.format("epochal")
        .options(pipeline="orders", sink="kafka", name=NAME, folder=str(root))
        .options(bootstrap=bootstrap, topic=topic, key="id", spool="true")
        .option("checkpointLocation", str(root / "checkpoint"))
    )
    writer.trigger(availableNow=True).start().awaitTermination()


if __name__ == "__main__":
    root = Path(sys.argv[1])
    session = connect()
    verb = sys.stdin.readline().strip()
    jvm = session.sparkContext._gateway.proc.pid
    (root / "pids.json").write_text(json.dumps([jvm, os.getpid()]))
    if verb:
        (root / "death.txt").write_text(verb)
    run(session, root, sys.argv[2], sys.argv[3])
