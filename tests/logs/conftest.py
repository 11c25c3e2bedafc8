"""Storages to put epoch logs in, and a small S3 server that can be told to fail."""

from __future__ import annotations

import os
import re
import threading
import uuid
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest
from obstore.store import LocalStore, MemoryStore

from epochal.contract import EpochLog
from epochal.logs import open_log
from epochal.logs.memory import MemoryLog
from epochal.logs.objects import ObjectsLog

SECRET = "hunter2hunter2"
HDFS = os.environ.get("EPOCHAL_TEST_HDFS")
"""A namenode to judge against, where there is one: hdfs://host:port"""

STORAGES = ["memory", "files", "objects-memory", "objects-local", "objects-s3", "sqlite", "hadoop"]
Opener = Callable[[], EpochLog]


class FakeS3(ThreadingHTTPServer):
    """Just enough of S3 for a log. Divergences: one bucket, no signatures, nothing on disk."""

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

    def answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
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

    def list(self, prefix: str) -> bytes:
        keys = sorted(key for key in self.server.objects if key.startswith(prefix))
        entries = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(self.server.objects[key])}</Size>"
            "<LastModified>1970-01-01T00:00:00.000Z</LastModified></Contents>"
            for key in keys
            if "/" not in key.removeprefix(prefix)
        )
        return f"<ListBucketResult>{entries}</ListBucketResult>".encode()

    def handle_request(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = urlsplit(self.path)
        self.key = unquote(parts.path).removeprefix("/bucket").removeprefix("/")
        if self.server.fault(self):
            return
        if self.command == "PUT":
            self.answer(self.store(self.body))
        elif self.command == "POST":
            keys = re.findall(r"<Key>(.*?)</Key>", self.body.decode())
            for key in keys:
                self.server.objects.pop(key, None)
            deleted = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
            self.answer(200, f"<DeleteResult>{deleted}</DeleteResult>".encode())
        elif not self.key:
            self.answer(200, self.list(parse_qs(parts.query)["prefix"][0]))
        elif self.key in self.server.objects:
            self.answer(200, self.server.objects[self.key])
        else:
            self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")

    do_GET = do_HEAD = do_POST = do_PUT = handle_request  # noqa: N815  the library's names

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the library's name
        """Say nothing."""


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeS3]:
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


def _url(storage: str, tmp_path: Path) -> str:
    return {
        "files": f"{tmp_path}/chk/epochal/log",
        "objects-s3": "s3://bucket/chk/epochal/log",
        "sqlite": f"sqlite://{tmp_path}/log.db",
        "hadoop": f"hadoop+file://{tmp_path}/chk/epochal/log",
        "hdfs": f"{HDFS}/epochal-tests/{uuid.uuid4().hex}",
    }[storage]


@pytest.fixture(params=[*STORAGES, *(["hdfs"] if HDFS else [])])
def storage(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def reopen(storage: str, tmp_path: Path, request: pytest.FixtureRequest) -> Opener:
    """Opens the same log again and again, each time anew where it outlives its object."""
    if storage == "memory":
        kept = MemoryLog()
        return lambda: kept
    if storage == "objects-memory":
        store = MemoryStore()
        return lambda: ObjectsLog(store, place="memory:///")
    if storage == "objects-local":
        folder = LocalStore(tmp_path / "log", mkdir=True)
        return lambda: ObjectsLog(folder, place=f"{tmp_path}/log")
    if storage == "objects-s3":
        request.getfixturevalue("s3")
    spark = request.getfixturevalue("spark") if storage in {"hadoop", "hdfs"} else None
    url = _url(storage, tmp_path)
    return lambda: open_log(url, spark=spark)


@pytest.fixture
def log(reopen: Opener) -> EpochLog:
    return reopen()
