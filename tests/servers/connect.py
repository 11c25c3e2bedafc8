"""A Spark Connect server of the tests' own, from the classes of the installed PySpark."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pyspark
from servers.ports import free_port
from servers.processes import ServerProcess

_HOME = Path(pyspark.__file__).parent
_SETTINGS = {
    "spark.connect.grpc.binding.address": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.log.level": "WARN",
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.enabled": "false",
}


def _java() -> str:
    home = os.environ.get("JAVA_HOME")
    return str(Path(home, "bin", "java")) if home else shutil.which("java") or "java"


class ConnectServer(ServerProcess):
    title = "Spark Connect"
    ready_within_s = 180.0

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.port = free_port()
        # Python workers would load PySpark from a zip file, which is compiled at each start: they
        # have ten seconds to connect.
        self.process_options = {
            "env": {name: value for name, value in os.environ.items() if name != "SPARK_HOME"},
            "start_new_session": True,
        }

    @property
    def url(self) -> str:
        return f"sc://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def _command(self) -> Sequence[str]:
        """The command that Spark's own launcher makes of the arguments of spark-submit."""
        settings = {**_SETTINGS, "spark.connect.grpc.binding.port": str(self.port)}
        made = subprocess.run(
            [
                *(_java(), "-Xshare:auto", "-cp", f"{_HOME}/jars/*"),
                *("org.apache.spark.launcher.Main", "org.apache.spark.deploy.SparkSubmit"),
                *("--class", "org.apache.spark.sql.connect.service.SparkConnectServer"),
                *("--master", "local[2]"),
                *(part for one in settings.items() for part in ("--conf", "=".join(one))),
                "spark-internal",
            ],
            env={**os.environ, "SPARK_HOME": str(_HOME), "SPARK_SCALA_VERSION": "2.13"},
            capture_output=True,
            text=True,
            check=True,
        )
        return made.stdout.partition("\0\n")[2].rstrip("\0").split("\0")

    def _is_ready(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0
