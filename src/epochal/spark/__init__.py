"""All that knows Spark: the pipeline door, the data source door, and what a task knows of itself.

This module is imported in every Python worker, so it imports nothing by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from epochal.spark.options import SinkMaker


def register(spark: SparkSession, sinks: Mapping[str, SinkMaker] | None = None) -> None:
    """
    Make `df.writeStream.format("epochal")` known to a session. Needs PySpark 4.1 or newer.

    `sinks` says what makes the sink of `option("sink", …)`; by default `files`. By registering
    again, a driver that was fenced takes its pipelines over again.
    """
    from epochal.spark.versions import (  # noqa: PLC0415  see above
        DATA_SOURCE_OLDEST,
        require_supported,
    )

    require_supported(oldest=DATA_SOURCE_OLDEST)
    from epochal.spark.source import register_source  # noqa: PLC0415  see above

    register_source(spark, sinks)
