"""A real PgBouncer in transaction mode before a server of the tests."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from servers.ports import free_port
from servers.postgres import PostgresServer
from servers.processes import NoServer, as_nobody
from servers.programs import program

_READY_WITHIN_S = 60.0


@contextmanager
def running_pgbouncer(server: PostgresServer, *, pool_size: int = 4) -> Iterator[int]:
    """Its port. Every transaction may run in another session of the server."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="epochal-pgbouncer-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "users").write_text('"postgres" ""\n')
        (folder / "ini").write_text(
            "[databases]\n"
            f"* = host=127.0.0.1 port={server.port}\n"
            "[pgbouncer]\n"
            f"listen_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\n"
            f"auth_type = trust\nauth_file = {folder / 'users'}\npool_mode = transaction\n"
            f"default_pool_size = {pool_size}\nserver_round_robin = 1\n"
            "ignore_startup_parameters = extra_float_digits,options\n"
        )
        command = [program("pgbouncer", "pgbouncer"), "-q", str(folder / "ini")]
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, **as_nobody()
        )
        try:
            _wait(server, port, process)
            yield port
        finally:
            process.terminate()
            process.wait(timeout=20)
            if process.stderr is not None:
                process.stderr.close()


def _wait(server: PostgresServer, port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _READY_WITHIN_S
    while True:
        try:
            psycopg.connect(server.url(port=port), connect_timeout=5).close()
        except psycopg.OperationalError as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise NoServer(f"pgbouncer does not answer: {error}") from error
            time.sleep(0.05)
        else:
            return
