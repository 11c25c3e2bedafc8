"""
A standby driver to be killed: the plain pipeline of `victim`, with files, a table and a topic.

    python standby_victim.py <folder> <URL of the lease, "" beside the log, "lie" always its own>

The file `order` of the folder says how the driver that works is to end, and at which step: "kill
decided", "freeze prepared". The first driver that comes to that step takes the order and carries it
out. The file `stop` ends every driver cleanly. Each notes its role in `<pid>.role`.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import victim
from pyspark.sql import DataFrame

from epochal.spark.pipeline import Pipeline

ORDER = "order"
STOP = "stop"


class Lie:
    """A lease that everybody holds."""

    location = "a lie"
    look_every_s = renew_every_s = 0.2

    def acquire(self, holder: str) -> bool:
        return bool(holder)

    def renew(self) -> bool:
        return True

    def release(self) -> None: ...

    def close(self) -> None: ...


def main(root: Path, lease: str) -> None:
    spark = victim.connect()

    def watch(step: str, epoch: int | None) -> None:
        order = root / ORDER
        if not order.exists():
            return
        how, _, wanted = order.read_text().partition(" ")
        if step == wanted:
            try:
                order.rename(root / f"{os.getpid()}.died")
            except FileNotFoundError:
                return
            victim.end(how, spark)

    def numbers() -> DataFrame:
        reader = spark.readStream.schema("id bigint, at bigint").option("maxFilesPerTrigger", 1)
        return victim.plain(reader.json(str(root / "in")))

    pipeline = Pipeline(
        "plain",
        victim.sinks_of(root, "plain"),
        gates=[lambda epoch: epoch.rows("files") == epoch.rows("topic")],
        watch=watch,  # type: ignore[arg-type]
    )
    standby = pipeline.start(
        numbers, root / "plain", standby=Lie() if lease == "lie" else lease or True
    )
    note = root / f"{os.getpid()}.role"
    while standby.isActive:
        note.write_text(standby.role.value)
        if (root / STOP).exists():
            standby.stop()
        time.sleep(0.05)
    note.write_text("ended")
    standby.awaitTermination()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
