"""The releases, kinds and settings of Spark: what is supported, refused, or advised."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from epochal.errors import Misconfigured

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

OLDEST = (4, 0)
NEWEST = (4, 3)
UNIX_SOCKETS = "spark.python.unix.domain.socket.enabled"
"""From Spark 4.1 on: without it rows cross to Python by TCP, which waits for acknowledgements."""


def require_supported(version: str | None = None) -> None:
    """Refuse a PySpark that is not tested. The installed one, if none is given."""
    if version is None:
        version = _installed()
    found = re.match(r"(\d+)\.(\d+)", version)
    minor = (0, 0) if found is None else (int(found[1]), int(found[2]))
    if OLDEST <= minor <= NEWEST:
        return
    raise Misconfigured(
        f"PySpark {version} is not supported here: {_text(OLDEST)} to {_text(NEWEST)} are",
        f'pip install "pyspark>={_text(OLDEST)},<{NEWEST[0]}.{NEWEST[1] + 1}"',
    )


def require_classic(spark: SparkSession) -> None:
    """Refuse Spark Connect: a decision must be taken in the process that runs foreachBatch."""
    if getattr(spark, "_jsparkSession", None) is None:
        raise Misconfigured(
            "this is a Spark Connect session: foreachBatch runs on the server, not in this driver",
            "run the driver in Spark's classic mode: unset SPARK_REMOTE, no .remote(…)",
        )


def require_streaming(frame: DataFrame) -> None:
    if not frame.isStreaming:
        raise Misconfigured(
            "this DataFrame is not a stream: it comes from spark.read, not from spark.readStream",
            'for a once-only load of a batch: pipeline.write(df, run="…", checkpoint=…)',
        )


def faster_settings(spark: SparkSession) -> tuple[str, ...]:
    """What would make epochs faster, and is not set in this session."""
    is_set = spark.sparkContext.getConf().get(UNIX_SOCKETS, "false").lower() == "true"
    if is_set or spark.version.startswith("4.0."):
        return ()
    return (f"{UNIX_SOCKETS}=true, when Spark is started, takes a third off a small epoch",)


def _installed() -> str:
    try:
        import pyspark  # noqa: PLC0415  this package is importable without it
    except ImportError:
        raise Misconfigured(
            "PySpark is not installed", 'pip install "epochal[spark]" in the driver\'s environment'
        ) from None
    return pyspark.__version__


def _text(minor: tuple[int, int]) -> str:
    return f"{minor[0]}.{minor[1]}"
