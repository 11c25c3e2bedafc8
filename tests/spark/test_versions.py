"""Workers and machines that can't run a pipeline are named before anything is claimed."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

JOB = """
import epochal as ep
from pyspark.sql import SparkSession

spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", False).getOrCreate()
rows = spark.readStream.format("rate").load()
ep.Pipeline("p", sinks=[ep.Files("out")]).start(rows, checkpoint="chk")
"""


def test_workers_that_run_another_python_are_refused_with_the_variable_to_set(tmp_path):
    bare = tmp_path / "bare"
    venv.create(bare, with_pip=False, symlinks=True)
    ran = subprocess.run(
        [sys.executable, "-c", JOB],
        cwd=tmp_path,
        env={**os.environ, "PYSPARK_PYTHON": str(bare / "bin" / "python")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1
    assert f"workers run {bare}/bin/python, which has no epochal" in ran.stderr
    assert f"PYSPARK_PYTHON={sys.executable}" in ran.stderr
    assert not Path(tmp_path, "chk").exists()


def test_a_machine_without_java_is_told_how_to_get_one(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"}
    command = [sys.executable, "-m", "epochal.cli"]
    subprocess.run([*command, "init", "orders.yaml"], cwd=tmp_path, check=True)
    ran = subprocess.run(
        [*command, "run", "orders.yaml"],
        cwd=tmp_path,
        env={**environment, "PATH": "/nowhere"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1
    assert "no Java was found" in ran.stderr
    assert "Traceback" not in ran.stderr
