"""A bucket and a second file system for the tests of this folder."""

from __future__ import annotations

import io
import itertools
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from servers.s3 import S3Server, running_s3

from epochal.sinks.files import Files

_numbers = itertools.count()


@dataclass(frozen=True)
class Folder:
    """A folder of the bucket of its own, looked at with a client of its own."""

    server: S3Server
    name: str

    @property
    def url(self) -> str:
        return f"s3://lake/{self.name}"

    def sink(self, **options: Any) -> Files:
        return Files(self.url, **{"storage_options": self.server.options(), **options})

    def shown(self) -> list[str]:
        """What any reader of the folder sees."""
        return self._keys(f"{self.name}/")

    def ours(self) -> list[str]:
        """What is kept beside the folder."""
        return self._keys(f"{self.name}.epochal/")

    def _keys(self, prefix: str) -> list[str]:
        pages = self.server.client.get_paginator("list_objects_v2")
        return [
            entry["Key"].removeprefix(prefix)
            for page in pages.paginate(Bucket="lake", Prefix=prefix)
            for entry in page.get("Contents", ())
        ]

    def content(self, key: str, *, is_ours: bool = False) -> bytes:
        top = f"{self.name}.epochal" if is_ours else self.name
        answer = self.server.client.get_object(Bucket="lake", Key=f"{top}/{key}")
        content: bytes = answer["Body"].read()
        return content

    def uploads(self) -> list[tuple[str, str]]:
        """Of the folder, and of the one beside it."""
        found = self.server.client.list_multipart_uploads(Bucket="lake", Prefix=self.name)
        mine = (f"{self.name}/", f"{self.name}.epochal/")
        return [
            (one["Key"], one["UploadId"])
            for one in found.get("Uploads", ())
            if one["Key"].startswith(mine)
        ]

    def rows(self) -> list[dict[str, Any]]:
        """Every row that a plain reader of the folder sees."""
        return [
            row
            for key in self.shown()
            for row in pq.read_table(io.BytesIO(self.content(key))).to_pylist()
        ]

    def leftovers(self) -> list[object]:
        left = [key for key in self.ours() if key.startswith(("in-doubt/", "scratch/"))]
        return [*self.uploads(), *left]


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    with running_s3() as server:
        yield server


@pytest.fixture
def folder(s3: S3Server) -> Folder:
    return Folder(s3, f"out {next(_numbers)}/ü")


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A new folder on another file system than `tmp_path`: on the disk, or in memory."""
    others = (Path("/dev/shm"), Path(tempfile.gettempdir()), Path(__file__).parent)
    mine = tmp_path.stat().st_dev
    other = next((one for one in others if one.is_dir() and one.stat().st_dev != mine), None)
    assert other is not None, "this needs a second file system"
    with tempfile.TemporaryDirectory(prefix="epochal-elsewhere-", dir=other) as folder:
        yield Path(folder)
