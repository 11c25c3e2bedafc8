"""
A receiver in a process of its own, that can be killed and started again on the same port.

By `serve`, and not by the command line, whose imports take longer than most tests here.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from servers.ports import free_port

_LAUNCH = """
import json, sys
from pathlib import Path
from epochal.receiver.door import Door
from epochal.receiver.handlers import load_handler
from epochal.receiver.server import Tls, serve
told = json.loads(sys.argv[1])
door = Door(
    tokens=tuple(token.encode() for token in told["tokens"]),
    body_bytes_max=told["body_bytes_max"],
)
tls = told["tls"] and Tls(**{name: Path(path) for name, path in told["tls"].items()})
handler = told["handler"] and load_handler(told["handler"])
serve(
    Path(told["data"]), host="127.0.0.1", port=told["port"], door=door, tls=tls or None,
    handler=handler or None, keeps_rows=told["keeps_rows"],
    ready=lambda address: print("ready", flush=True),
)
"""


class ReceiverServer:
    """One receiver over one folder. `kill` and `start` may follow each other at will."""

    def __init__(
        self,
        data: Path,
        *,
        tokens: tuple[str, ...] = (),
        handler: str | None = None,
        keeps_rows: bool = True,
        body_bytes_max: int = 64 * 1024 * 1024,
        tls: dict[str, str] | None = None,
    ) -> None:
        self.data = data
        self.port = free_port()
        self._tokens = tokens
        self._told = {
            "data": str(data),
            "port": self.port,
            "tokens": tokens,
            "handler": handler,
            "keeps_rows": keeps_rows,
            "body_bytes_max": body_bytes_max,
            "tls": tls,
        }
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"{'https' if self._told['tls'] else 'http'}://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Returns when it listens."""
        self._process = subprocess.Popen(
            [sys.executable, "-c", _LAUNCH, json.dumps(self._told)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        if self._process.stdout is None or self._process.stdout.readline() != b"ready\n":
            _, said = self._process.communicate()
            raise RuntimeError(f"the receiver did not start:\n{said.decode()[-2000:]}")

    def kill(self) -> None:
        """As a machine that loses power."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.communicate()
            self._process = None

    def get(self, path: str, **params: Any) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self._tokens[0]}"} if self._tokens else {}
        reply = httpx.get(self.url + path, params=params, headers=headers)
        found: dict[str, Any] = reply.raise_for_status().json()
        return found

    def rows(self, sink: str, **params: Any) -> list[dict[str, Any]]:
        """What a reader sees of one sink."""
        after, found = 0, []
        while after is not None:
            page = self.get("/rows", after=after, sink=sink, **params)
            found += [one["row"] for one in page["rows"]]
            after = page["next"]
        return found

    def await_death(self) -> None:
        """Until a `kill` from another thread has done its work."""
        for _ in range(1000):
            if self._process is None:
                return
            time.sleep(0.01)
        raise RuntimeError("the receiver was not killed")
