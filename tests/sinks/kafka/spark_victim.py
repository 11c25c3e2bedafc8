"""
A driver to be killed: from a Kafka topic to another one and to files, in one decision.

    python spark_victim.py <folder> <bootstrap>

Each input row moves an amount: the topic gets what is taken, the files get what is given. It starts
Spark, waits for a line on stdin with the step of its death (none: to the end of the source), and
reads at most a few rows an epoch.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
for folder in (HERE.parent.parent, HERE.parent.parent / "broker"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from client_jars import spark_jars  # noqa: E402  found by the lines above

import epochal as ep  # noqa: E402  the same
from epochal.spark.local_session import local_builder  # noqa: E402
from epochal.terms import Limits  # noqa: E402

SOURCE, TAKEN, GROUP = "moves", "taken", "lag-of-moves"
ROWS_AN_EPOCH = 40


def connect() -> Any:
    builder = (
        local_builder("kafka-victim", threads=2)
        .config("spark.jars", spark_jars())
        # It lives for seconds: the second compiler would cost more than it gives.
        .config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
    )
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def sinks(root: Path, bootstrap: str) -> list[Any]:
    return [
        ep.Kafka(
            bootstrap,
            topic=TAKEN,
            key="id",
            select=["id", "-amount AS amount", "at"],
            value=ep.json("*"),
            commit_offsets=GROUP,
            name="taken",
        ),
        ep.Files(str(root / "given"), select=["id", "amount"], name="given"),
    ]


def run(spark: Any, root: Path, bootstrap: str, death: str) -> None:
    step, _, count = death.partition("#")

    def watch(at: str, epoch: int | None) -> None:
        nonlocal left
        if at == step:
            left -= 1
            if left == 0:
                (root / "died.txt").write_text(death)
                os.kill(os.getpid(), signal.SIGKILL)

    left = int(count or 1)
    moves = (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", bootstrap)
        .option("subscribe", SOURCE)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", ROWS_AN_EPOCH)
        .load()
        .selectExpr(
            "CAST(CAST(key AS STRING) AS BIGINT) AS id",
            "CAST(CAST(value AS STRING) AS BIGINT) AS amount",
            "timestamp AS at",
        )
    )
    # Tasks write in some lives, the driver itself in others.
    limits = Limits(driver_rows_max=random.choice((0, 2_000)))
    pipeline = ep.Pipeline("moves", sinks(root, bootstrap), watch=watch, limits=limits)
    pipeline.start(moves, root / "checkpoint", availableNow=True).awaitTermination()


if __name__ == "__main__":
    session = connect()
    run(session, Path(sys.argv[1]), sys.argv[2], sys.stdin.readline().strip())
