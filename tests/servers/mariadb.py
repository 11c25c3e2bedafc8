"""
A MariaDB of the tests' own, from Debian's package mariadb-server.

It listens on a loopback port and can be killed and started again like a machine that lost power. A
server that can't be had fails the tests that ask for it, with the reason: a skipped proof is none.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pymysql
from servers.ports import free_port
from servers.programs import NoProgram, program

_READY_WITHIN_S = 60.0
_SETTINGS: Mapping[str, str] = {
    "bind-address": "127.0.0.1",
    "skip-name-resolve": "1",
    "max-connections": "120",
    "innodb-buffer-pool-size": "64M",
    "innodb-log-file-size": "64M",
    "innodb-stats-persistent": "0",
    # A killed server keeps what the kernel has: only a machine's crash needs the disk, and two
    # noisy cores need the time.
    "innodb-flush-method": "nosync",
    "skip-log-bin": "1",
    "local-infile": "1",
    "character-set-server": "utf8mb4",
}


class NoServer(Exception):
    """Why there is no MariaDB to prove anything on."""


def _programs() -> tuple[str, str]:
    try:
        return program("mariadbd", "mariadb-server"), program(
            "mariadb-install-db", "mariadb-server"
        )
    except NoProgram as error:
        raise NoServer(str(error)) from error


def _as_nobody() -> dict[str, Any]:
    """MariaDB refuses to run as root: then it runs as nobody."""
    if os.geteuid() != 0:
        return {}
    nobody = pwd.getpwnam("nobody")
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


def _room() -> str | None:
    """Memory, where there is a file system of it: every CREATE and DROP TABLE syncs a folder."""
    memory = Path("/dev/shm")
    return str(memory) if os.access(memory, os.W_OK) else None


class MariaDBServer:
    """One server in one folder. `kill` and `start` may follow each other any number of times."""

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        self._daemon, install = _programs()
        self._folder = Path(tempfile.mkdtemp(prefix="epochal-mariadb-", dir=_room()))
        if os.geteuid() == 0:
            shutil.chown(self._folder, "nobody")
        self.data = self._folder / "data"
        self._log = self._folder / "log"
        self._settings = {**_SETTINGS, **(settings or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()
        done = subprocess.run(
            [
                install,
                "--no-defaults",
                f"--datadir={self.data}",
                "--auth-root-authentication-method=normal",
                "--skip-test-db",
                "--innodb-log-file-size=64M",
                "--innodb-flush-method=nosync",
            ],
            check=False,
            capture_output=True,
            cwd=self._folder,
            **_as_nobody(),
        )
        if done.returncode:
            raise NoServer(
                f"mariadb-install-db: {done.stdout.decode()[-1500:]}{done.stderr[-500:]!r}"
            )

    def url(self, *, database: str = "mysql", user: str = "root", port: int = 0) -> str:
        return f"mysql://{user}@127.0.0.1:{port or self.port}/{database}"

    def connect(self, **options: Any) -> pymysql.Connection[Any]:
        given = {"user": "root", "charset": "utf8mb4", "autocommit": True, **options}
        return pymysql.connect(host="127.0.0.1", port=self.port, connect_timeout=10, **given)

    def start(self) -> None:
        words = [f"--{key}={value}" for key, value in self._settings.items()]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    self._daemon,
                    "--no-defaults",
                    f"--datadir={self.data}",
                    f"--port={self.port}",
                    f"--socket={self._folder / 'socket'}",
                    f"--pid-file={self._folder / 'pid'}",
                    *words,
                ],
                stdout=log,
                stderr=log,
                cwd=self._folder,
                **_as_nobody(),
            )
        deadline = time.monotonic() + _READY_WITHIN_S
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise NoServer(f"mariadbd did not start:\n{self._log.read_text()[-2000:]}")
            time.sleep(0.02)

    def _is_ready(self) -> bool:
        try:
            self.connect().close()
        except (pymysql.MySQLError, OSError):
            return False
        return True

    def kill(self) -> None:
        """SIGKILL, as when the machine dies."""
        process = self._require_running()
        process.kill()
        process.wait()
        self._process = None

    def restart(self) -> None:
        self.kill()
        self.start()

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                self.kill()
            self._process = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def _require_running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise NoServer("the server is not running")
        return self._process


@contextmanager
def running_server(settings: Mapping[str, str] | None = None) -> Iterator[MariaDBServer]:
    """A server for the time of a block; whatever happens, its process ends with the block."""
    server = MariaDBServer(settings)
    try:
        server.start()
        yield server
    finally:
        server.stop()
