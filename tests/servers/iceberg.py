"""
A REST catalog of the tests' own: Iceberg's reference implementation, from Maven's jars.

The adapter and the servlet are those that Iceberg tests its own client against (they are in the
jar with its tests); a few lines of Java put them behind a Jetty that listens on loopback only. Its
tables are in SQLite and a folder, so they outlive SIGKILL. A server that can't be had fails the
tests that ask for it, with the reason.
"""

from __future__ import annotations

import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from servers.maven import dependencies
from servers.ports import free_port
from servers.programs import jdk_java

RELEASE = "1.10.0"
ROOT = Path(__file__).resolve().parent.parent.parent
SOURCE = ROOT / "tests" / "sinks" / "iceberg" / "java" / "Rest.java"
_READY_WITHIN_S = 120.0
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


class RestCatalog:
    """One process over one folder. `kill` and `start` may follow each other any number of times."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        quick = ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx256m"]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(jdk_java(), *quick, "-cp", f"{jars()}/*", str(SOURCE)),
                    *(str(self.port), str(self._folder)),
                ],
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + _READY_WITHIN_S
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the REST catalog did not start:\n{self._log()}")
            time.sleep(0.1)

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/v1/config", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def _log(self) -> str:
        return (self._folder / "log").read_text(errors="replace")[-2000:]


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
