"""
A MariaDB of the tests' own, from Debian's package mariadb-server.

It listens on a loopback port and can be killed and started again like a machine that lost power.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pymysql
from servers.ports import free_port
from servers.processes import NoServer, ServerProcess, as_nobody
from servers.programs import NoProgram, program

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


def _programs() -> tuple[str, str]:
    try:
        return program("mariadbd", "mariadb-server"), program(
            "mariadb-install-db", "mariadb-server"
        )
    except NoProgram as error:
        raise NoServer(str(error)) from error


def _room() -> str | None:
    """Memory, where there is a file system of it: every CREATE and DROP TABLE syncs a folder."""
    memory = Path("/dev/shm")
    return str(memory) if os.access(memory, os.W_OK) else None


class MariaDBServer(ServerProcess):
    """One server in one folder."""

    title = "mariadbd"
    process_options = as_nobody()

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        self._daemon, install = _programs()
        super().__init__(Path(tempfile.mkdtemp(prefix="epochal-mariadb-", dir=_room())))
        if os.geteuid() == 0:
            shutil.chown(self.folder, "nobody")
        self.data = self.folder / "data"
        self._settings = {**_SETTINGS, **(settings or {})}
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
            cwd=self.folder,
            **self.process_options,
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

    def _command(self) -> list[str]:
        return [
            self._daemon,
            "--no-defaults",
            f"--datadir={self.data}",
            f"--port={self.port}",
            f"--socket={self.folder / 'socket'}",
            f"--pid-file={self.folder / 'pid'}",
            # A server that starts deletes temporary tables of others from a shared folder.
            f"--tmpdir={self.folder}",
            *(f"--{key}={value}" for key, value in self._settings.items()),
        ]

    def _is_ready(self) -> bool:
        try:
            self.connect().close()
        except (pymysql.MySQLError, OSError):
            return False
        return True

    def stop(self, by: signal.Signals = signal.SIGTERM) -> None:
        super().stop(by)
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def running_server(settings: Mapping[str, str] | None = None) -> Iterator[MariaDBServer]:
    """A server for the time of a block; whatever happens, its process ends with the block."""
    server = MariaDBServer(settings)
    try:
        server.start()
        yield server
    finally:
        server.stop()
