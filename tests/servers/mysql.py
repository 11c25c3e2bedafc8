"""A MariaDB and a MySQL of the tests' own.

MariaDB is Debian's package mariadb-server. MySQL is in Debian's suite unstable only: it is unpacked
with its own C library, and the data of a new server is made once, to be copied.

Each listens on a loopback port and can be killed and started again like a machine that lost power.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pymysql
from servers.ports import free_port
from servers.processes import NoServer, ServerProcess, as_nobody
from servers.programs import NoProgram, fetched, program, unpack, unpacked_command

_SETTINGS: Mapping[str, str] = {
    "bind-address": "127.0.0.1",
    "max-connections": "120",
    "innodb-buffer-pool-size": "64M",
    "innodb-stats-persistent": "0",
    "skip-log-bin": "1",
    "local-infile": "1",
    "character-set-server": "utf8mb4",
}
_MARIADB: Mapping[str, str] = {
    "skip-name-resolve": "1",
    "innodb-log-file-size": "64M",
    # A killed server keeps what the kernel has: only a machine's crash needs the disk, and two
    # noisy cores need the time.
    "innodb-flush-method": "nosync",
}
_MYSQL: Mapping[str, str] = {
    "secure-file-priv": "NULL",
    "mysqlx": "OFF",
    "innodb-redo-log-capacity": "64M",
    "performance-schema": "OFF",
}


def _room() -> str | None:
    """Memory, where there is a file system of it: every CREATE and DROP TABLE syncs a folder."""
    memory = Path("/dev/shm")
    return str(memory) if os.access(memory, os.W_OK) else None


class DatabaseProcess(ServerProcess):
    """One server in one folder."""

    own_settings: ClassVar[Mapping[str, str]]

    def __init__(self, settings: Mapping[str, str | None] | None = None) -> None:
        super().__init__(Path(tempfile.mkdtemp(prefix=f"epochal-{self.title}-", dir=_room())))
        self.data = self.folder / "data"
        given = {**_SETTINGS, **self.own_settings, **(settings or {})}
        self._settings = {key: value for key, value in given.items() if value is not None}
        self.port = free_port()
        try:
            self._make_data()
        except NoProgram as error:
            raise NoServer(str(error)) from error

    @abstractmethod
    def _make_data(self) -> None: ...

    @abstractmethod
    def _program(self) -> list[str]: ...

    def url(self, *, database: str = "mysql", user: str = "root", port: int = 0) -> str:
        return f"mysql://{user}@127.0.0.1:{port or self.port}/{database}"

    def connect(self, **options: Any) -> pymysql.Connection[Any]:
        given = {"user": "root", "charset": "utf8mb4", "autocommit": True, **options}
        return pymysql.connect(host="127.0.0.1", port=self.port, connect_timeout=10, **given)

    def _command(self) -> list[str]:
        return [
            *self._program(),
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


class MariaDBServer(DatabaseProcess):
    title = "mariadbd"
    process_options = as_nobody()
    own_settings = _MARIADB

    def _make_data(self) -> None:
        if os.geteuid() == 0:
            shutil.chown(self.folder, "nobody")
        words = [
            f"--datadir={self.data}",
            "--auth-root-authentication-method=normal",
            "--skip-test-db",
            "--innodb-log-file-size=64M",
            "--innodb-flush-method=nosync",
        ]
        install = program("mariadb-install-db", "mariadb-server")
        _run([install, "--no-defaults", *words], cwd=self.folder, **self.process_options)

    def _program(self) -> list[str]:
        return [program("mariadbd", "mariadb-server"), "--no-defaults"]


class MySQLServer(DatabaseProcess):
    title = "mysqld"
    own_settings = _MYSQL

    def _make_data(self) -> None:
        shutil.copytree(_mysql() / "data", self.data)
        (self.data / "auto.cnf").unlink()  # the name of the server, which is new

    def _program(self) -> list[str]:
        return _mysqld(_mysql())


def _mysql() -> Path:
    """The folder with MySQL in it, and with the data of a server that was never started."""
    return fetched("mysql", _fetch_mysql, lock="mysql")


def _fetch_mysql(home: Path) -> None:
    unpack("mysql-server-core", "unstable", home / "root")
    words = ["--initialize-insecure", f"--datadir={home / 'data'}"]
    _run([*_mysqld(home), *words, "--innodb-redo-log-capacity=64M"], cwd=home)


def _mysqld(home: Path) -> list[str]:
    installed = home / "root/usr"
    return [
        *unpacked_command(home / "root", "usr/sbin/mysqld"),
        "--no-defaults",
        f"--basedir={installed}",
        f"--lc-messages-dir={installed / 'share/mysql'}",
        f"--character-sets-dir={installed / 'share/mysql/charsets'}",
        # Root is asked to say so. Another user could not enter a clone in root's home.
        *(["--user=root"] if os.geteuid() == 0 else []),
    ]


def _run(words: Sequence[str], **options: Any) -> None:
    done = subprocess.run(words, check=False, capture_output=True, **options)
    if done.returncode:
        said = (done.stdout + done.stderr).decode(errors="replace")
        raise NoServer(f"{words[0]} failed: {said[-2000:]}")


@contextmanager
def running_server(
    settings: Mapping[str, str | None] | None = None,
    kind: type[DatabaseProcess] = MariaDBServer,
) -> Iterator[DatabaseProcess]:
    """A server for the time of a block; whatever happens, its process ends with the block."""
    server = kind(settings)
    try:
        server.start()
        yield server
    finally:
        server.stop()
