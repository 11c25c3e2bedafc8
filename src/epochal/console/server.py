"""The console beside a program that does something else, on a thread of its own."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from epochal.console.app import console

_HOST = "127.0.0.1"
_GOODBYE_MAX_S = 1


@contextmanager
def served(root: str) -> Iterator[str]:
    """A console that only shows, on a free port of loopback, while the block lasts: its address."""
    # Listening from here on: whoever asks before the server is up waits, and is not refused.
    with socket.create_server((_HOST, 0)) as listening:
        config = uvicorn.Config(
            console(root),
            log_level="warning",
            server_header=False,
            timeout_graceful_shutdown=_GOODBYE_MAX_S,
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
