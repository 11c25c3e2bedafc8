"""What Spark needs to reach a bucket itself: hadoop-aws and the parts of Amazon's SDK that it uses.

The SDK's bundle, which hadoop-aws asks for, is hundreds of megabytes: its modules do as well.
"""

from __future__ import annotations

from collections.abc import Mapping

from servers.maven import dependencies
from servers.s3 import ACCESS_KEY, SECRET, S3Server

HADOOP = "3.5.0"
"""As the PySpark in the lock brings it."""
_SDK = {HADOOP: "2.35.4", "3.4.2": "2.29.52"}
_MODULES = ("apache-client", "s3-transfer-manager", "sts")


def jars(hadoop: str = HADOOP) -> str:
    """For `spark.jars`."""
    modules = [f"software.amazon.awssdk:{name}:{_SDK[hadoop]}" for name in _MODULES]
    folder = dependencies(
        f"s3a-{hadoop}",
        f"org.apache.hadoop:hadoop-aws:{hadoop}",
        *modules,
        without=("software.amazon.awssdk:bundle",),
    )
    return ",".join(str(path) for path in sorted(folder.glob("*.jar")))


def settings(server: S3Server) -> Mapping[str, str]:
    """Spark's settings by which `s3a://` means this server."""
    provider = "org.apache.hadoop.fs.s3a.SimpleAWSCredentialsProvider"
    given = {
        "endpoint": server.url,
        "endpoint.region": "us-east-1",
        "path.style.access": "true",
        "connection.ssl.enabled": "false",
        "access.key": ACCESS_KEY,
        "secret.key": SECRET,
        "aws.credentials.provider": provider,
    }
    return {f"spark.hadoop.fs.s3a.{name}": value for name, value in given.items()}
