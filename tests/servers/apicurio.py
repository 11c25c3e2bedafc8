"""
A schema registry that is not ours: Apicurio, from Maven's archive, on loopback, in memory.

Clients of Confluent's registry speak to it by a part of its interface that is made for them.
Releases up to 3.0 run on Java 17, later ones need 21.
"""

from __future__ import annotations

import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from servers.jvm import QUICK
from servers.maven import unpacked
from servers.ports import free_port
from servers.processes import ServerProcess
from servers.programs import program

RELEASE = "3.0.9"


class Apicurio(ServerProcess):
    title = "Apicurio Registry"
    ready_within_s = 180.0

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.port = free_port()
        self.management_port = free_port()

    @property
    def url(self) -> str:
        """As a client of Confluent's registry is given it."""
        return f"http://127.0.0.1:{self.port}/apis/ccompat/v7"

    def _command(self) -> list[str]:
        settings = {
            "quarkus.http.host": "127.0.0.1",
            "quarkus.http.port": self.port,
            "quarkus.management.host": "127.0.0.1",
            "quarkus.management.port": self.management_port,
        }
        home = unpacked(
            f"apicurio-{RELEASE}", f"io.apicurio:apicurio-registry-app:{RELEASE}:tar.gz:all"
        )
        (jar,) = home.glob("*-runner.jar")
        java = [program("java", "default-jre-headless"), *QUICK, "-Xmx512m"]
        return [*java, *(f"-D{key}={value}" for key, value in settings.items()), "-jar", str(jar)]

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/subjects", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


@contextmanager
def running_apicurio() -> Iterator[Apicurio]:
    """A registry for the time of a block."""
    with tempfile.TemporaryDirectory(prefix="epochal-apicurio-") as folder:
        server = Apicurio(Path(folder))
        try:
            server.start()
            yield server
        finally:
            server.kill()
