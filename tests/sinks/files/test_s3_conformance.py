"""Files on S3 meet the suite, with uploads and with manifests, and survive crashes at any call."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pyarrow as pa
import pytest
from servers.s3 import SECRET

from epochal.logs import MemoryLog
from epochal.sinks.files import Files, read_epochs
from epochal.sinks.files.sink import MANIFESTS, S3
from epochal.testing.conformance import SinkConformance, Target
from epochal.testing.crash import Setting, crash_at_every_call


class OnS3(SinkConformance):
    @pytest.fixture(autouse=True)
    def _a_folder_of_its_own(self, folder):
        self.folder = folder


class TestUploads(OnS3):
    def make(self, tmp_path):
        return Target(
            # A small buffer: memory must not grow once it is full.
            sink=self.folder.sink(buffer_bytes_max=4 << 20),
            visible=self.folder.rows,
            leftovers=self.folder.leftovers,
            secrets=[SECRET],
            unreachable=lambda: unreachable(self.folder),
            misconfigured={"a missing bucket": missing_bucket(self.folder)},
            cannot=S3.cannot,
        )


class TestManifests(OnS3):
    def make(self, tmp_path):
        folder = self.folder
        return Target(
            # A small buffer: memory must not grow once it is full.
            sink=folder.sink(uploads="manifest", buffer_bytes_max=4 << 20),
            visible=lambda: whole(folder),
            leftovers=lambda: [*folder.leftovers(), *unnamed(folder)],
            secrets=[SECRET],
            unreachable=lambda: unreachable(folder, uploads="manifest"),
            misconfigured={"a missing bucket": missing_bucket(folder, uploads="manifest")},
            cannot=MANIFESTS.cannot,
        )


def unreachable(folder, **options):
    away = {**folder.server.options(), "endpoint_url": "http://127.0.0.1:1"}
    return nullcontext(folder.sink(storage_options=away, **options))


def missing_bucket(folder, **options):
    return Files("s3://nowhere/out", storage_options=folder.server.options(), **options)


def whole(folder):
    table = read_epochs(folder.url, storage_options=folder.server.options()).to_table()
    return table.to_pylist() if table.num_columns else []


def unnamed(folder):
    """Data that no manifest names."""
    keys = folder.ours()
    named = {
        file["path"]
        for key in keys
        if key.startswith("epochs/")
        for line in folder.content(key, is_ours=True).splitlines()
        for file in json.loads(line)["files"]
    }
    return [key for key in keys if key.startswith("data/") and key not in named]


@pytest.mark.parametrize("uploads", ["multipart", "manifest"])
def test_a_crash_at_any_call_leaves_every_row_visible_once(s3, folder, uploads):
    made = []

    def fresh() -> Setting:
        here = type(folder)(s3, f"{folder.name}/{uploads}/{len(made)}")
        made.append(here)
        log, sink = MemoryLog(), here.sink(uploads=uploads)
        rows = [pa.record_batch({"id": [at]}) for at in range(2)]
        return Setting(
            log=lambda: log,
            sinks=lambda: [sink],
            epochs=[[[rows[0]], [rows[1]]]],
            visible=lambda name: here.rows() if uploads == "multipart" else whole(here),
            leftovers=lambda: [*here.leftovers(), *unnamed(here)],
            schema=rows[0].schema,
        )

    report = crash_at_every_call(fresh, second=False, effects_only=True)
    assert report.runs > 15
