"""Jars of Java clients, from Maven, each alone: what they need is named too."""

from __future__ import annotations

import fcntl
import subprocess
from collections.abc import Iterable
from pathlib import Path

from servers.kafka import ROOT

_POM = """<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>epochal.tests</groupId><artifactId>clients</artifactId><version>1</version>
  <dependencies>
{dependencies}
  </dependencies>
</project>
"""
_DEPENDENCY = """    <dependency>
      <groupId>{group}</groupId><artifactId>{artifact}</artifactId><version>{version}</version>
      <exclusions>
        <exclusion><groupId>*</groupId><artifactId>*</artifactId></exclusion>
      </exclusions>
    </dependency>"""
_COMPRESSION = (
    ("com.github.luben", "zstd-jni", "1.5.6-4"),
    ("org.lz4", "lz4-java", "1.8.0"),
    ("org.xerial.snappy", "snappy-java", "1.1.10.5"),
    ("org.slf4j", "slf4j-api", "1.7.36"),
)


def client_jars(release: str) -> Path:
    """The Java clients of a release."""
    clients = ("org.apache.kafka", "kafka-clients", release)
    return fetched(f"kafka-clients-{release}", (clients, *_COMPRESSION))


def fetched(name: str, wanted: Iterable[tuple[str, str, str]]) -> Path:
    """The folder with these jars, fetched at the first call."""
    home = ROOT / ".cache" / name
    home.mkdir(parents=True, exist_ok=True)
    done = home / "complete"
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            listed = [
                _DEPENDENCY.format(group=group, artifact=artifact, version=version)
                for group, artifact, version in wanted
            ]
            (home / "pom.xml").write_text(_POM.format(dependencies="\n".join(listed)))
            command = ["mvn", "-q", "-B", "dependency:copy-dependencies"]
            where = ["-DincludeScope=runtime", f"-DoutputDirectory={home / 'jars'}"]
            subprocess.run([*command, *where], cwd=home, check=True, timeout=600)
            done.touch()
    return home / "jars"
