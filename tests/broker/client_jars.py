"""Jars of Java clients, each alone: what they need is named too."""

from __future__ import annotations

from pathlib import Path

from servers.maven import dependencies

_COMPRESSION = (
    "com.github.luben:zstd-jni:1.5.6-4",
    "org.lz4:lz4-java:1.8.0",
    "org.xerial.snappy:snappy-java:1.1.10.5",
    "org.slf4j:slf4j-api:1.7.36",
)

# The token provider can't be had for Spark 4.2 yet; the one before it serves.
_SPARK = (
    "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0",
    "org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.1.0-preview1",
    "org.apache.kafka:kafka-clients:3.9.2",
    "org.apache.commons:commons-pool2:2.13.1",
)


def spark_jars() -> str:
    """Spark's Kafka source and sink, as `spark.jars` takes them."""
    folder = dependencies("spark-kafka", *_SPARK, alone=True)
    return ",".join(str(path) for path in sorted(folder.glob("*.jar")))


def client_jars(release: str) -> Path:
    """The Java clients of a release."""
    clients = f"org.apache.kafka:kafka-clients:{release}"
    return dependencies(f"kafka-clients-{release}", clients, *_COMPRESSION, alone=True)
