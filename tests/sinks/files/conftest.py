"""A bucket for the tests of this folder."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
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

    def every_key(self) -> list[str]:
        pages = self.server.client.get_paginator("list_objects_v2")
        found = pages.paginate(Bucket="lake", Prefix=f"{self.name}/")
        return [
            entry["Key"].removeprefix(f"{self.name}/")
            for page in found
            for entry in page.get("Contents", ())
        ]

    def content(self, key: str) -> bytes:
        answer = self.server.client.get_object(Bucket="lake", Key=f"{self.name}/{key}")
        content: bytes = answer["Body"].read()
        return content

    def uploads(self) -> list[tuple[str, str]]:
        found = self.server.client.list_multipart_uploads(Bucket="lake", Prefix=f"{self.name}/")
        return [(one["Key"], one["UploadId"]) for one in found.get("Uploads", ())]

    def shown(self) -> list[str]:
        """What a reader sees that passes over names with a leading underscore."""
        return [key for key in self.every_key() if not key.startswith("_")]

    def rows(self) -> list[dict[str, Any]]:
        """Every row that a plain reader of the folder sees."""
        return [
            row
            for key in self.shown()
            for row in pq.read_table(io.BytesIO(self.content(key))).to_pylist()
        ]

    def leftovers(self) -> list[object]:
        ours = ("_epochal/prepared/", "_epochal/scratch/")
        return [*self.uploads(), *(key for key in self.every_key() if key.startswith(ours))]


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    with running_s3() as server:
        yield server


@pytest.fixture
def folder(s3: S3Server) -> Folder:
    return Folder(s3, f"out {next(_numbers)}/ü")
