"""
Drivers without Spark, killed at any moment: each epoch goes to a topic and to files.

    python session_victim.py <folder> <bootstrap> <topic> <kills> <seed>

Everything is imported once; each driver is a fork that gets SIGKILL after a random while. The last
one writes two epochs more and ends; the number of epochs is printed.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import pyarrow as pa

from epochal.session import Session
from epochal.sinks.files import Files
from epochal.sinks.kafka import Kafka
from epochal.terms import Limits

ROWS = 30
SCHEMA = pa.schema([pa.field("id", pa.int64()), pa.field("amount", pa.int64())])


def rows_of(epoch: int) -> pa.RecordBatch:
    ids = range(epoch * ROWS, (epoch + 1) * ROWS)
    return pa.record_batch({"id": ids, "amount": [n % 97 for n in ids]}, schema=SCHEMA)


def drive(folder: Path, bootstrap: str, topic: str, *, epochs_more: int | None) -> int:
    """Epoch after epoch until the end, or until this process is killed."""
    sinks = [
        Kafka(bootstrap, topic=topic, key="id", name="taken"),
        Files(str(folder / "given"), name="given"),
    ]
    limits = Limits(sweep_every_s=0.5)
    log = folder / "log"
    with Session("moves", sinks=sinks, schema=SCHEMA, log=log, limits=limits) as session:
        end = None if epochs_more is None else session.next_epoch + epochs_more
        while end is None or session.next_epoch < end:
            epoch = int(session.next_epoch)
            session.begin(epoch, offsets=str(epoch))
            # In two pieces: a driver may die with half of an epoch written.
            batch = rows_of(epoch)
            session.write(batch.slice(0, ROWS // 2))
            session.write(batch.slice(ROWS // 2))
            session.commit()
        return int(session.next_epoch)


def kill_one(chance: random.Random, run: list[str]) -> None:
    child = os.fork()
    if child == 0:
        drive(Path(run[0]), run[1], run[2], epochs_more=None)
        os._exit(1)
    time.sleep(chance.uniform(0.05, 1.2))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
        raise SystemExit(f"a driver ended by itself: {os.waitstatus_to_exitcode(status)}")


if __name__ == "__main__":
    run, kills, seed = sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5])
    chances = random.Random(seed)
    for _ in range(kills):
        kill_one(chances, run)
    sys.stdout.write(str(drive(Path(run[0]), run[1], run[2], epochs_more=2)))
