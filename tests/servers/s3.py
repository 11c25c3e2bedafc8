"""
An S3 server of the tests' own: s3proxy on loopback, from Maven's jar, its objects in a folder.

It stands for S3 in what the sink relies on: incomplete multipart uploads are invisible, listed by
prefix, completed from any process and outlive SIGKILL; If-None-Match is honoured. It has no
lifecycle rules and no encryption: those answers come from `s3_faults`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from servers.jvm import QUICK
from servers.maven import artifact
from servers.ports import free_port
from servers.processes import ServerProcess
from servers.programs import program

RELEASE = "4.1.0"
ACCESS_KEY = "somebody"
SECRET = "hunter2hunter2"
_SETTINGS = """s3proxy.endpoint=http://127.0.0.1:{port}
s3proxy.authorization=aws-v2-or-v4
s3proxy.identity={identity}
s3proxy.credential={credential}
jclouds.provider=filesystem-nio2
jclouds.filesystem.basedir={folder}
"""


def jar() -> Path:
    return artifact(f"s3proxy-{RELEASE}", f"org.gaul:s3proxy:{RELEASE}:jar:jar-with-dependencies")


class S3Server(ServerProcess):
    title = "s3proxy"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.port = free_port()
        (folder / "objects").mkdir()
        settings = _SETTINGS.format(
            port=self.port, identity=ACCESS_KEY, credential=SECRET, folder=folder / "objects"
        )
        (folder / "s3proxy.conf").write_text(settings)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def options(self, url: str = "") -> Mapping[str, str]:
        """A sink's storage_options for this server, or for what stands before it."""
        return {
            "endpoint_url": url or self.url,
            "region": "us-east-1",
            "addressing_style": "path",
            "access_key_id": ACCESS_KEY,
            "secret_access_key": SECRET,
        }

    @cached_property
    def client(self) -> Any:
        """A client of the tests' own: what it sees, any reader sees."""
        return boto3.client(
            "s3",
            endpoint_url=self.url,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET,
            region_name="us-east-1",
            config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1}),
        )

    def _command(self) -> list[str | Path]:
        java = program("java", "default-jre-headless")
        quick = [*QUICK, "-Xmx512m", "-DLOG_LEVEL=error"]
        return [java, *quick, "-jar", jar(), "--properties", self.folder / "s3proxy.conf"]

    def _is_ready(self) -> bool:
        try:
            self.client.list_buckets()
        except (BotoCoreError, ClientError):
            return False
        return True


@contextmanager
def running_s3() -> Iterator[S3Server]:
    """A server for the time of a block, with the bucket `lake`."""
    with tempfile.TemporaryDirectory(prefix="epochal-s3-") as folder:
        server = S3Server(Path(folder))
        try:
            server.start()
            server.client.create_bucket(Bucket="lake")
            yield server
        finally:
            server.kill()
