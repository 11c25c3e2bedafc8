"""A small S3 server in this process that can be told to fail."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import unescape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest

SECRET = "hunter2hunter2"


class FakeS3(ThreadingHTTPServer):
    """Just enough of S3 for a store. Divergences: one bucket, no signatures, nothing on disk."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Requests)
        self.objects: dict[str, bytes] = {}
        self.lock = threading.Lock()
        self.honours_conditions = True
        self.fault: Callable[[_Requests], bool] = lambda request: False
        """Called before a request is answered; True where it has dealt with it."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Requests(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeS3

    def answer_content(self, content: bytes) -> None:
        """The whole object, or the range that is asked for."""
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked is None:
            self.answer(200, content)
            return
        first, last = int(asked[1]), min(int(asked[2]), len(content) - 1)
        self.answer(206, content[first : last + 1], f"bytes {first}-{last}/{len(content)}")

    def answer(self, status: int, body: bytes = b"", content_range: str = "") -> None:
        self.send_response(status)
        if content_range:
            self.send_header("Content-Range", content_range)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"0"')
        self.send_header("Last-Modified", "Thu, 01 Jan 1970 00:00:00 GMT")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def store(self, body: bytes) -> int:
        with self.server.lock:
            is_conditional = "If-None-Match" in self.headers and self.server.honours_conditions
            if is_conditional and self.key in self.server.objects:
                return 412
            self.server.objects[self.key] = body
            return 200

    def list(self, prefix: str, after: str) -> bytes:
        with self.server.lock:
            listed = {k: len(v) for k, v in self.server.objects.items() if k.startswith(prefix)}
        found = {key: size for key, size in listed.items() if key > after}
        entries = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{found[key]}</Size>"
            "<LastModified>1970-01-01T00:00:00.000Z</LastModified></Contents>"
            for key in sorted(found)
            if "/" not in key.removeprefix(prefix)
        )
        rests = (key.removeprefix(prefix) for key in found)
        folders = "".join(
            f"<CommonPrefixes><Prefix>{escape(prefix + folder)}/</Prefix></CommonPrefixes>"
            for folder in sorted({rest.partition("/")[0] for rest in rests if "/" in rest})
        )
        return f"<ListBucketResult>{entries}{folders}</ListBucketResult>".encode()

    def handle_request(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = urlsplit(self.path)
        self.key = unquote(parts.path).removeprefix("/bucket").removeprefix("/")
        if self.server.fault(self):
            return
        if self.command == "PUT":
            self.answer(self.store(self.body))
        elif self.command == "POST":
            keys = [unescape(key) for key in re.findall(r"<Key>(.*?)</Key>", self.body.decode())]
            for key in keys:
                self.server.objects.pop(key, None)
            deleted = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
            self.answer(200, f"<DeleteResult>{deleted}</DeleteResult>".encode())
        elif not self.key:
            asked = parse_qs(parts.query)
            self.answer(200, self.list(asked["prefix"][0], asked.get("start-after", [""])[0]))
        elif self.key in self.server.objects:
            self.answer_content(self.server.objects[self.key])
        else:
            self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")

    do_GET = do_HEAD = do_POST = do_PUT = handle_request  # noqa: N815  the library's names

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the library's name
        """Say nothing."""


@contextmanager
def running_fake_s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeS3]:
    """A server, and an environment in which s3://bucket is there."""
    server = FakeS3()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    yield server
    server.shutdown()
    thread.join()
    server.server_close()
