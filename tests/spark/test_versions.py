"""Workers and machines that can't run a pipeline are named before anything is claimed."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from epochal.errors import Misconfigured
from epochal.spark.connect import require_server

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


def error_of_run(folder: Path, **environment: str) -> str:
    kept = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"}
    command = [sys.executable, "-m", "epochal.cli"]
    subprocess.run([*command, "init", "orders.yaml"], cwd=folder, check=True)
    ran = subprocess.run(
        [*command, "run", "orders.yaml"],
        cwd=folder,
        env={**kept, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1
    assert "Traceback" not in ran.stderr
    return ran.stderr


def test_a_machine_without_java_is_told_how_to_get_one(tmp_path):
    assert "no Java was found" in error_of_run(tmp_path, PATH="/nowhere")


def test_a_java_that_is_too_old_is_named_with_its_version(tmp_path):
    java = tmp_path / "jdk" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.touch(mode=0o755)
    java.parent.with_name("release").write_text('JAVA_VERSION="1.8.0_402"\n')
    error = error_of_run(tmp_path, JAVA_HOME=str(tmp_path / "jdk"))
    assert f"{java} is Java 8, and PySpark" in error


def test_a_file_is_not_run_by_the_spark_connect_server_of_the_environment(tmp_path):
    error = error_of_run(tmp_path, SPARK_REMOTE="sc://spark.example:15002")
    assert "SPARK_REMOTE is set" in error
    assert "unset SPARK_REMOTE" in error


def test_without_pyspark_the_extra_is_named(tmp_path):
    (tmp_path / "pyspark.py").write_text("raise ModuleNotFoundError('hidden', name='pyspark')")
    error = error_of_run(tmp_path, PYTHONPATH=str(tmp_path))
    assert 'pip install "epochal[spark]"' in error


def test_a_server_of_spark_connect_before_4_0_is_refused():
    session: Any = SimpleNamespace(version="3.5.9", session_id="of an older server")
    with pytest.raises(Misconfigured, match=r"Spark Connect of 3\.5\.9(.|\n)*4\.0 or newer"):
        require_server(session)
