"""Files meet the suite, in each format."""

import json
from pathlib import Path

import pyarrow.parquet as pq

from epochal.sinks.files import Files
from epochal.sinks.files.local import folder_beside
from epochal.sinks.files.sink import FOLDER
from epochal.testing.conformance import SinkConformance, Target


def hidden(folder: Path):
    """
    What undecided work might leave beside the folder: prepared attempts. The scratch file of a
    put that was killed is removed by a later one, when it is old enough to be nobody's.
    """
    beside = folder_beside(folder)
    kept = ("epochs", "schemas")
    return [
        str(path)
        for path in beside.rglob("*")
        if path.is_file()
        and path.relative_to(beside).parts[0] not in kept
        and not (path.parent == beside and path.suffix == ".tmp")
    ]


def files_seen(folder: Path):
    """What any reader sees, whatever names it passes over."""
    return [path for path in folder.rglob("*") if path.is_file()]


def taken(tmp_path: Path):
    path = tmp_path / "taken"
    path.write_text("somebody else's")
    return path


class TestParquet(SinkConformance):
    def make(self, tmp_path):
        folder = tmp_path / "out"
        return Target(
            # A small buffer: memory must not grow once it is full.
            sink=Files(str(folder), buffer_bytes_max=4 << 20),
            visible=lambda: [
                row for path in files_seen(folder) for row in pq.read_table(path).to_pylist()
            ],
            leftovers=lambda: hidden(folder),
            misconfigured={"a file in the place of the folder": Files(str(taken(tmp_path)))},
            cannot=FOLDER.cannot,
        )


class TestJsonLines(SinkConformance):
    def make(self, tmp_path):
        folder = tmp_path / "out"
        return Target(
            # A small buffer: memory must not grow once it is full.
            sink=Files(str(folder), format="jsonl", buffer_bytes_max=4 << 20),
            visible=lambda: [
                json.loads(line)
                for path in files_seen(folder)
                for line in path.read_text().split("\n")
                if line
            ],
            leftovers=lambda: hidden(folder),
            misconfigured={"a file in the place of the folder": Files(str(taken(tmp_path)))},
            cannot=FOLDER.cannot,
        )
