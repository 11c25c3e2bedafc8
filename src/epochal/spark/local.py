"""A Spark for one machine, set up for small and frequent epochs: laptops, demonstrations, tests."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Spark's default renames through checksummed files; on a local disk this one takes half the time.
_FAST_CHECKPOINTS = (
    "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
)


def local_session(name: str, *, threads: int) -> SparkSession:
    from pyspark.sql import SparkSession  # noqa: PLC0415  this room is importable without it

    # Workers must run the Python that has this package, not the first one on the path.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    return (
        SparkSession.builder.master(f"local[{threads}]")
        .appName(name)
        .config("spark.ui.enabled", False)
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", threads)
        .config("spark.sql.streaming.checkpointFileManagerClass", _FAST_CHECKPOINTS)
        .getOrCreate()
    )
