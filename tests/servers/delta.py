"""delta-spark, which is not ours: the jars by which Spark itself reads and writes Delta tables."""

from __future__ import annotations

from pathlib import Path

from servers.maven import dependencies

RELEASE = "4.4.0"
_JARS = (
    f"io.delta:delta-spark_4.2_2.13:{RELEASE}",
    f"io.delta:delta-storage:{RELEASE}",
    f"io.delta:delta-kernel-api:{RELEASE}",
    f"io.delta:delta-kernel-defaults:{RELEASE}",
    f"io.delta:delta-kernel-unitycatalog:{RELEASE}",
    "io.unitycatalog:unitycatalog-client:0.6.0",
    "io.unitycatalog:unitycatalog-hadoop:0.6.0",
)


def folder() -> Path:
    return dependencies(f"delta-spark-{RELEASE}", *_JARS, alone=True)


def jars() -> str:
    """For `spark.jars`."""
    return ",".join(str(path) for path in sorted(folder().glob("*.jar")))
