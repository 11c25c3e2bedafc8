"""What Spark needs to reach a bucket itself: hadoop-aws and the parts of Amazon's SDK that it uses.

The SDK's bundle, which hadoop-aws asks for, is hundreds of megabytes: its modules do as well.
"""

from __future__ import annotations

import fcntl
import subprocess
from collections.abc import Mapping
from pathlib import Path

from servers.programs import program
from servers.s3 import ACCESS_KEY, ROOT, SECRET, S3Server

HADOOP = "3.5.0"
"""As the PySpark in the lock brings it."""
_SDK = "2.35.4"
_MODULES = ("apache-client", "s3-transfer-manager", "sts")
_POM = """<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>epochal.tests</groupId><artifactId>s3a</artifactId><version>1</version>
  <dependencies>
    <dependency>
      <groupId>org.apache.hadoop</groupId><artifactId>hadoop-aws</artifactId>
      <version>{hadoop}</version>
      <exclusions><exclusion>
        <groupId>software.amazon.awssdk</groupId><artifactId>bundle</artifactId>
      </exclusion></exclusions>
    </dependency>
    {modules}
  </dependencies>
</project>
"""
_MODULE = (
    "<dependency><groupId>software.amazon.awssdk</groupId>"
    "<artifactId>{name}</artifactId><version>{version}</version></dependency>"
)


def jars() -> str:
    """For `spark.jars`, fetched through Maven at the first call."""
    home = ROOT / ".cache" / f"s3a-{HADOOP}"
    home.mkdir(parents=True, exist_ok=True)
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (home / "complete").exists():
            _fetch(home)
            (home / "complete").touch()
    return ",".join(str(path) for path in sorted((home / "jars").glob("*.jar")))


def _fetch(home: Path) -> None:
    modules = "".join(_MODULE.format(name=name, version=_SDK) for name in _MODULES)
    (home / "pom.xml").write_text(_POM.format(hadoop=HADOOP, modules=modules))
    copy = ["dependency:copy-dependencies", "-DincludeScope=runtime"]
    ran = subprocess.run(
        [program("mvn", "maven"), "-q", "-B", *copy, f"-DoutputDirectory={home / 'jars'}"],
        cwd=home,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if ran.returncode:
        raise RuntimeError(f"Maven could not fetch hadoop-aws:\n{ran.stdout}{ran.stderr}")


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
