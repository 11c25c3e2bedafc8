"""What a Spark session knows about file systems, asked through the JVM beside the driver."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from epochal.errors import Misconfigured

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Java: TypeAlias = Any
"""An object that lives in Spark's JVM."""

_BY_DEFAULT = re.compile(r"core-default\.xml|from AWS_")


def jvm_of(spark: SparkSession) -> Java:
    """The JVM beside this driver; a Spark Connect session has none."""
    jvm = getattr(spark, "_jvm", None)
    if jvm is None:
        raise Misconfigured(
            "this Spark session has no JVM of its own, so its file systems are out of reach",
            hint="run the driver in Spark's classic mode, or keep the epoch log where the driver "
            "reaches it: a folder, s3://…, gs://…, abfss://… or sqlite:///path",
        )
    return jvm


def hadoop_conf(spark: SparkSession) -> Java:
    """Hadoop's settings as Spark's own checkpoints see them."""
    return spark._jsparkSession.sessionState().newHadoopConf()


def qualified(spark: SparkSession, path: str) -> str:
    """A path without a scheme as Spark reads it: in its default file system, which may be HDFS."""
    file_system = jvm_of(spark).org.apache.hadoop.fs.FileSystem
    default = str(file_system.getDefaultUri(hadoop_conf(spark)).toString())
    if default.startswith("file:"):
        return path
    if not path.startswith("/"):
        raise Misconfigured(
            f"the checkpoint {path} is relative, and Spark's default file system is {default}",
            hint=f"write the whole path, such as {default.rstrip('/')}/folder/{path}",
        )
    return default.rstrip("/") + path


def is_set_by_a_person(spark: SparkSession, keys: Sequence[str]) -> bool:
    """Whether one of these settings is neither Hadoop's default nor Spark's copy of a variable."""
    if getattr(spark, "_jvm", None) is None:
        return False
    conf = hadoop_conf(spark)
    sources = [source for key in keys for source in conf.getPropertySources(key) or ()]
    return any(not _BY_DEFAULT.search(source) for source in sources)
