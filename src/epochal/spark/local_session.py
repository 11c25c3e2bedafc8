"""A local Spark session for small and frequent epochs: laptops, demonstrations, tests."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from epochal.spark.error_text import query_loggers
from epochal.spark.versions import UNIX_SOCKETS, require_startable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOG_SETTINGS = Path(__file__).with_name("log4j2.properties")
_DEBUG = "EPOCHAL_DEBUG"
_KEEPS_LOG = ("SPARK_CONF_DIR", _DEBUG)
"""Set where Spark's log is configured already, or wanted whole."""
_STREAMING = "org.apache.spark.sql.execution.streaming"


def fast_checkpoints(version: str) -> str:
    """
    The class that writes Spark's checkpoint in half the time on a local disk: the default renames
    through checksummed files. It moved with Spark 4.1.
    """
    is_before = version.startswith(("3.", "4.0."))
    folder = _STREAMING if is_before else f"{_STREAMING}.checkpointing"
    return f"{folder}.FileSystemBasedCheckpointFileManager"


def local_builder(name: str, *, threads: int) -> SparkSession.Builder:
    """A builder with these settings; later settings override them."""
    require_startable()
    import pyspark  # noqa: PLC0415  this package is importable without it
    from pyspark.sql import SparkSession  # noqa: PLC0415  the same

    # Workers must run the Python that has this package, not the first one on the path.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    return (
        SparkSession.builder.master(f"local[{threads}]")
        .appName(name)
        .config("spark.ui.enabled", False)
        .config("spark.ui.showConsoleProgress", False)
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", threads)
        .config(UNIX_SOCKETS, True)
        .config(
            "spark.sql.streaming.checkpointFileManagerClass", fast_checkpoints(pyspark.__version__)
        )
    )


def quiet(builder: SparkSession.Builder) -> SparkSession.Builder:
    """The same with little on stderr, for a command that reports errors itself."""
    if _DEBUG not in os.environ:
        for logger in query_loggers():
            logger.setLevel(logging.CRITICAL)
    if any(name in os.environ for name in _KEEPS_LOG):
        return builder
    return builder.config(
        "spark.driver.extraJavaOptions", f"-Dlog4j2.configurationFile={_LOG_SETTINGS.as_uri()}"
    )


def log_uncaught_exceptions() -> None:
    """
    Let what ends a thread of the JVM go to Spark's log, and not to stderr with its stack trace: a
    signal to the process group stops Spark's context before the threads that need it.
    """
    from pyspark import SparkContext  # noqa: PLC0415  the same

    jvm: Any = SparkContext._jvm
    handler = jvm.org.apache.spark.util.SparkUncaughtExceptionHandler(False)
    jvm.java.lang.Thread.setDefaultUncaughtExceptionHandler(handler)


def local_session(name: str, *, threads: int) -> SparkSession:
    return local_builder(name, threads=threads).getOrCreate()


def quiet_session(name: str, *, threads: int) -> SparkSession:
    return quiet(local_builder(name, threads=threads)).getOrCreate()
