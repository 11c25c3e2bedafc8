"""`epochal verify --stream`: the source of a pipeline in Python is read again by its own query."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

JOB = """
import epochal as ep
from epochal.spark.local_session import local_session

pipeline = ep.Pipeline(
    "lake",
    sinks=[
        ep.Files("out", format="jsonl", name="all"),
        ep.Files("odd", format="jsonl", name="odd", where="id % 2 = 1"),
    ],
    checkpoint="chk",
)


def stream(spark):
    reader = spark.readStream.schema("id bigint, v string").option("maxFilesPerTrigger", 1)
    return reader.json("in").selectExpr("id", "upper(v) v")


if __name__ == "__main__":
    pipeline.start(stream(local_session("lake", threads=2)), availableNow=True).awaitTermination()
    pipeline.close()
"""


class Lake:
    """A folder as the source, and a module that declares a pipeline and makes its stream."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "jobs.py").write_text(JOB)
        (root / "in").mkdir()

    def add(self, name: str, *ids: int) -> None:
        lines = [json.dumps({"id": n, "v": f"v{n}"}) for n in ids]
        (self.root / "in" / name).write_text("\n".join(lines))

    def run(self) -> None:
        done = self._python("jobs.py")
        assert done.returncode == 0, done.stderr[-4000:]

    def verify(self) -> tuple[int, dict]:
        done = self._python(
            "-m", "epochal.cli", "verify", "jobs:pipeline", "--stream", "jobs:stream", "--json"
        )
        assert done.stdout, done.stderr[-4000:]
        return done.returncode, json.loads(done.stdout)

    def lose_a_row(self) -> None:
        """Edit a file that a decided epoch wrote."""
        written = max((self.root / "out").glob("epochal-*"), key=lambda file: file.stat().st_size)
        lines = written.read_text().splitlines(keepends=True)
        written.write_text("".join(lines[1:]))

    def _python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=self.root,
            capture_output=True,
            text=True,
            check=False,
            timeout=900,
        )


def verdicts(some: list[dict], rows: str) -> list[tuple]:
    return [(one["sink"], one["verdict"], one["decided_rows"], one[rows]) for one in some]


@pytest.mark.timeout(1200)
def test_the_stream_of_a_python_pipeline_is_read_again_and_a_row_gone_from_a_target_is_missed(
    tmp_path,
):
    lake = Lake(tmp_path)
    lake.add("0.json", 1, 2, 3)
    lake.add("1.json", 4, 5)
    lake.run()
    lake.add("2.json", 6)  # of no epoch yet
    lake.lose_a_row()

    code, report = lake.verify()
    agreed = [("all", "agrees", 5, 5), ("odd", "agrees", 3, 3)]
    assert (code, verdicts(report["sources"], "source_rows")) == (1, agreed)
    assert all(one["source_hash"] == one["decided_hash"] for one in report["sources"])
    assert verdicts(report["sinks"], "visible_rows") == [("all", "differs", 5, 4), agreed[1]]
    assert report["sinks"][0]["differences"][0] == "1 row missing: 5 decided, 4 visible"
