"""
A receiver in a process of its own, that can be killed and started again on the same port.

By `serve`, and not by the command line, whose imports take longer than most tests here.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from servers.ports import free_port
from servers.processes import ServerProcess

_LAUNCH = """
import json, sys
from pathlib import Path
from epochal.receiver.server import Access
from epochal.receiver.handlers import load_handler
from epochal.receiver.server import Tls, serve
options = json.loads(sys.argv[1])
access = Access(
    tokens=tuple(token.encode() for token in options["tokens"]),
    body_bytes_max=options["body_bytes_max"],
)
tls = options["tls"] and Tls(**{name: Path(path) for name, path in options["tls"].items()})
handler = options["handler"] and load_handler(options["handler"])
serve(
    Path(options["data"]), host="127.0.0.1", port=options["port"], access=access, tls=tls or None,
    handler=handler or None, keeps_rows=options["keeps_rows"],
    ready=lambda address: None,
)
"""


_ANSWER_WITHIN_S = 60.0
"""Not httpx's five seconds: a machine that runs three tests at a time may stand still longer."""


_DIES_WITHIN_S = 60.0


class ReceiverServer(ServerProcess):
    """One receiver over one folder."""

    title = "the receiver"

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
        data.mkdir(parents=True, exist_ok=True)
        super().__init__(data)
        self.port = free_port()
        self._tokens = tokens
        self._settings = {
            "data": str(data),
            "port": self.port,
            "tokens": tokens,
            "handler": handler,
            "keeps_rows": keeps_rows,
            "body_bytes_max": body_bytes_max,
            "tls": tls,
        }

    @property
    def url(self) -> str:
        return f"{'https' if self._settings['tls'] else 'http'}://127.0.0.1:{self.port}"

    def _command(self) -> list[str]:
        return [sys.executable, "-c", _LAUNCH, json.dumps(self._settings)]

    def _is_ready(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def get(self, path: str, **params: Any) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self._tokens[0]}"} if self._tokens else {}
        reply = httpx.get(self.url + path, params=params, headers=headers, timeout=_ANSWER_WITHIN_S)
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
        deadline = time.monotonic() + _DIES_WITHIN_S
        while time.monotonic() < deadline:
            if self._process is None:
                return
            time.sleep(0.01)
        raise RuntimeError("the receiver was not killed")
