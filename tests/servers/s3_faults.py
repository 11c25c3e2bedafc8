"""
An HTTP proxy before an S3 server that can be told to fail: throttle, break, be slow, lose answers.

What the server behind it lacks (lifecycle rules, encryption) can be answered here too.
"""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TypeAlias

_HOP_HEADERS = {"connection", "keep-alive", "transfer-encoding", "content-length"}


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    """With its query."""
    headers: dict[str, str]

    @property
    def verb(self) -> str:
        """S3's own word for it, of those that matter here."""
        query = self.path.partition("?")[2]
        if self.method == "POST":
            return "complete" if "uploadId=" in query else "create"
        if self.method == "PUT":
            return "part" if "uploadId=" in query else "put"
        if self.method == "GET":
            lists = {"uploads": "uploads", "lifecycle": "lifecycle", "list-type=2": "list"}
            return next((word for sign, word in lists.items() if sign in query), "get")
        return {"HEAD": "head", "DELETE": "abort" if "uploadId=" in query else "delete"}[
            self.method
        ]


@dataclass(frozen=True)
class Answer:
    """Instead of the server's."""

    status: int
    code: str = ""
    body: bytes = b""

    def content(self) -> bytes:
        return self.body or f"<Error><Code>{self.code}</Code></Error>".encode()


@dataclass(frozen=True)
class Lost:
    """The server does what it was asked, and nobody hears its answer."""


@dataclass(frozen=True)
class Torn:
    """An answer that ends in its middle."""

    status: int


@dataclass(frozen=True)
class Late:
    seconds: float


Fault: TypeAlias = "Answer | Lost | Torn | Late | None"


@dataclass
class Faults:
    """What is to happen to which requests; also what came by."""

    seen: list[Request] = field(default_factory=list)
    fault: Callable[[Request], Fault] = lambda request: None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def once(self, verb: str, fault: Fault, *, times: int = 1) -> None:
        """The next requests of this kind, and then no more."""
        left = times

        def choose(request: Request) -> Fault:
            nonlocal left
            with self._lock:
                if request.verb != verb or not left:
                    return None
                left -= 1
                return fault

        self.fault = choose

    def count(self, verb: str) -> int:
        return sum(request.verb == verb for request in self.seen)


class _Proxy(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, to: int) -> None:
        super().__init__(("127.0.0.1", 0), _Requests)
        self.to = to
        self.faults = Faults()


class _Requests(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Proxy

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        request = Request(self.command, self.path, dict(self.headers))
        self.server.faults.seen.append(request)
        fault = self.server.faults.fault(request)
        if isinstance(fault, Answer):
            self._answer(fault.status, {}, fault.content())
            return
        if isinstance(fault, Torn):
            self._tear(fault.status)
            return
        if isinstance(fault, Late):
            time.sleep(fault.seconds)
        self._pass_on(body, is_lost=isinstance(fault, Lost))

    def _pass_on(self, body: bytes, *, is_lost: bool) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.to, timeout=30)
        try:
            # The Host header stays: it is part of what was signed.
            connection.request(self.command, self.path, body=body, headers=dict(self.headers))
            found = connection.getresponse()
            content = found.read()
        except OSError:
            self.close_connection = True
            return
        finally:
            connection.close()
        if is_lost:
            self.close_connection = True
            return
        length = found.headers.get("Content-Length", "0")
        self._answer(found.status, dict(found.headers), content, length)

    def _tear(self, status: int) -> None:
        self.send_response_only(status)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"6\r\n<Error")
        self.close_connection = True

    def _answer(self, status: int, headers: dict[str, str], body: bytes, length: str = "") -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in _HOP_HEADERS:
                self.send_header(name, value)
        is_head = self.command == "HEAD"
        self.send_header("Content-Length", length if is_head and length else str(len(body)))
        self.end_headers()
        if not is_head:
            self.wfile.write(body)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _serve  # noqa: N815  the library's names

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the library's name
        """Say nothing."""


@contextmanager
def faulty(port: int) -> Iterator[tuple[str, Faults]]:
    """The address of a proxy before the server at a port, and its switches."""
    proxy = _Proxy(port)
    thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{proxy.server_port}", proxy.faults
    finally:
        proxy.shutdown()
        thread.join()
        proxy.server_close()
