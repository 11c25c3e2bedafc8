"""
A REST catalog of the tests' own: Iceberg's reference implementation, from Maven's jars.

The adapter and the servlet are those that Iceberg tests its own client against (they are in the
jar with its tests); a few lines of Java put them behind a Jetty that listens on loopback only. Its
tables are in SQLite and a folder, so they outlive SIGKILL.
"""

from __future__ import annotations

import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from servers.jvm import QUICK
from servers.maven import dependencies
from servers.ports import free_port
from servers.processes import ServerProcess
from servers.programs import jdk_java

RELEASE = "1.10.0"
ROOT = Path(__file__).resolve().parent.parent.parent
SOURCE = ROOT / "tests" / "sinks" / "iceberg" / "java" / "Rest.java"
_ARTIFACTS = (
    f"org.apache.iceberg:iceberg-core:{RELEASE}",
    f"org.apache.iceberg:iceberg-core:{RELEASE}:tests",
    "org.eclipse.jetty:jetty-servlet:11.0.25",
    "org.xerial:sqlite-jdbc:3.50.3.0",
    "org.apache.hadoop:hadoop-client-api:3.4.1",
    "org.apache.hadoop:hadoop-client-runtime:3.4.1",
    "commons-logging:commons-logging:1.3.5",
)


def jars() -> Path:
    """The folder with the server's jars."""
    return dependencies(f"iceberg-rest-{RELEASE}", *_ARTIFACTS)


def planned_by_java(*metadata: str) -> set[tuple[str, ...]]:
    """Metadata, file, rows, bytes and partition spec of all files, by Iceberg's own library."""
    source = SOURCE.with_name("Plan.java")
    program = [jdk_java(), *QUICK, "-Xmx256m", "-cp", f"{jars()}/*", str(source), *metadata]
    ran = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return {tuple(line.split("\t")) for line in ran.stdout.splitlines()}


class RestCatalog(ServerProcess):
    title = "the REST catalog"
    ready_within_s = 120.0

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.port = free_port()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _command(self) -> list[str]:
        program = [jdk_java(), *QUICK, "-Xmx256m", "-cp", f"{jars()}/*", str(SOURCE)]
        return [*program, str(self.port), str(self.folder)]

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/v1/config", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


@contextmanager
def running_rest_catalog() -> Iterator[RestCatalog]:
    """A catalog for the time of a block."""
    with tempfile.TemporaryDirectory(prefix="epochal-iceberg-") as folder:
        server = RestCatalog(Path(folder))
        try:
            server.start()
            yield server
        finally:
            server.kill()
