"""Spark writes to S3, its driver gets SIGKILL after the decision, and another one goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

from sinks.files import s3_victim

from epochal.sinks.files import read_epochs


def test_a_killed_driver_leaves_every_row_once_in_the_bucket(spark, folder, tmp_path):
    (tmp_path / "in").mkdir()
    for epoch in range(3):
        file = tmp_path / "in" / f"{epoch}.json"
        file.write_text("\n".join(json.dumps({"n": epoch * 10 + at}) for at in range(10)))
        os.utime(file, (1_700_000_000 + epoch,) * 2)
    sink = {"path": folder.url, "storage_options": folder.server.options()}
    (tmp_path / "sink.json").write_text(json.dumps(sink))
    command = [sys.executable, s3_victim.__file__, str(tmp_path), "decided"]
    # Into a file: the JVM outlives its driver for a moment, and would keep a pipe open.
    with (tmp_path / "told").open("wb") as told:
        died = subprocess.run(command, stdout=told, stderr=told, check=False, timeout=240)
    assert died.returncode == -signal.SIGKILL, (tmp_path / "told").read_text()[-2000:]
    assert sorted(row["n"] for row in folder.rows()) == list(range(10))
    assert folder.uploads(), "what is decided waits to be completed"
    s3_victim.run(spark, tmp_path, lambda at, epoch: None)
    assert sorted(row["n"] for row in folder.rows()) == list(range(30))
    rows = read_epochs(folder.url, storage_options=folder.server.options()).to_table()
    assert sorted(rows["n"].to_pylist()) == list(range(30))
    assert folder.leftovers() == []
