"""A small service with one endpoint that keeps idempotency keys, and can be made to fail."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class KeyedService(ThreadingHTTPServer):
    """Takes rows once per key; `calls` counts all requests of a key, `taken` is what it keeps."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Requests)
        self.lock = threading.Lock()
        self.calls: Counter[str] = Counter()
        self.taken: dict[str, list[dict[str, Any]]] = {}
        self.headers: list[dict[str, str]] = []
        self.at_once = 0
        self.at_once_most = 0
        self.answers: Callable[[_Requests, bytes], int | None] = lambda request, body: None
        """Asked before a row is taken: a status to answer instead, or None."""
        self.hangs_up: Callable[[str], bool] = lambda key: False
        """Asked after rows were taken: True loses the reply."""
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/orders"

    def rows(self) -> list[dict[str, Any]]:
        with self.lock:
            return [row for rows in self.taken.values() for row in rows]

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class _Requests(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: KeyedService

    def do_POST(self) -> None:
        service, key = self.server, self.headers["Idempotency-Key"] or ""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        with service.lock:
            service.calls[key] += 1
            service.headers.append(dict(self.headers))
            service.at_once += 1
            service.at_once_most = max(service.at_once_most, service.at_once)
        status = service.answers(self, body)
        with service.lock:
            service.at_once -= 1
            if status is None and key not in service.taken:
                service.taken[key] = _rows(body, self.headers["Content-Type"])
        if status is None and service.hangs_up(key):
            self.close_connection = True
            return
        self.send_response(status or 200)
        if status == 429:
            self.send_header("Retry-After", "0")
        content = json.dumps({"error": f"no: {dict(self.headers)}"} if status else {}).encode()
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: Any) -> None:
        """Quiet."""


def _rows(body: bytes, kind: str) -> list[dict[str, Any]]:
    if kind == "application/x-ndjson":
        return [json.loads(line) for line in body.splitlines()]
    found = json.loads(body)
    return found if isinstance(found, list) else [found]
