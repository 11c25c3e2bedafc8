"""The console inside another program, on a thread."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from epochal.console.app import console

_HOST = "127.0.0.1"
_SHUTDOWN_MAX_S = 1


@contextmanager
def served(root: str) -> Iterator[str]:
    """Serve a read-only console on a free loopback port until the block ends; yields its URL."""
    # The socket listens already: requests before the server is up wait and are not refused.
    with socket.create_server((_HOST, 0)) as listening:
        config = uvicorn.Config(
            console(root),
            log_level="warning",
            server_header=False,
            timeout_graceful_shutdown=_SHUTDOWN_MAX_S,
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(
            target=server.run, kwargs={"sockets": [listening]}, name="epochal-console", daemon=True
        )
        thread.start()
        try:
            yield f"http://{_HOST}:{listening.getsockname()[1]}/"
        finally:
            server.should_exit = True
            thread.join()
