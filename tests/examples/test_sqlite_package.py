"""examples/epochal-sqlite, installed like any other package: its suite, Spark, every command."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "epochal-sqlite"

FILE = """\
pipeline: orders
checkpoint: {folder}/chk
source: {{format: json, path: {folder}/in, schema: "id BIGINT, name STRING"}}
sinks:
  - {{kind: sqlite, path: {folder}/shop.db, table: orders, name: by_kind}}
  - {{kind: "epochal_sqlite:SQLite", path: {folder}/other.db, table: orders, name: by_class}}
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder that the package was installed into, with nothing taken from the network."""
    source = tmp_path_factory.mktemp("source") / "epochal-sqlite"
    shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns("__pycache__", "test_*"))
    folder = tmp_path_factory.mktemp("site")
    uv = next(found for found in (shutil.which("uv"), ROOT / ".venv-uv" / "bin" / "uv") if found)
    install = [str(uv), "pip", "install", "--offline", "--no-deps", "--no-build-isolation"]
    where = ["--python", sys.executable, "--target", str(folder), str(source)]
    subprocess.run([*install, *where], check=True, capture_output=True)
    return folder


@pytest.fixture
def python(installed, tmp_path):
    """Runs Python in an empty folder, where the example is found as an installed package only."""

    def python(*words, code=0):
        done = subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(installed)},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    return python


def test_the_suite_that_comes_with_it_passes(python, tmp_path):
    shutil.copy(EXAMPLE / "test_epochal_sqlite.py", tmp_path)
    assert " passed" in python("-m", "pytest", "-q", "-p", "no:cacheprovider")


@pytest.fixture
def databases(tmp_path):
    for name in ("shop.db", "other.db"):
        with closing(sqlite3.connect(tmp_path / name)) as db:
            db.execute("CREATE TABLE orders (id INTEGER, name TEXT)")

    def rows():
        found = []
        for name in ("shop.db", "other.db"):
            with closing(sqlite3.connect(tmp_path / name)) as db:
                found.append(sorted(id_ for (id_,) in db.execute("SELECT id FROM orders")))
        return found

    return rows


def test_a_session_writes_to_it_without_spark(python, databases, tmp_path):
    program = """\
import pyarrow as pa
from epochal import Session
from epochal_sqlite import SQLite

schema = pa.schema({"id": pa.int64(), "name": pa.string()})
sinks = [SQLite(path="shop.db", table="orders"), SQLite(path="other.db", table="orders")]
with Session("orders", sinks=sinks, log="log", schema=schema) as session:
    for epoch in range(3):
        session.begin(epoch)
        session.write([{"id": epoch, "name": "row"}])
        session.commit()
"""
    (tmp_path / "program.py").write_text(program, encoding="utf-8")
    python("program.py")
    assert databases() == [[0, 1, 2], [0, 1, 2]]


def test_spark_writes_to_it_and_every_command_reaches_it(python, databases, tmp_path):
    (tmp_path / "in").mkdir()
    lines = "".join(json.dumps({"id": at, "name": f"row {at}"}) + "\n" for at in range(5))
    (tmp_path / "in" / "rows.json").write_text(lines, encoding="utf-8")
    (tmp_path / "p.yaml").write_text(FILE.format(folder=tmp_path), encoding="utf-8")

    def epochal(*words, code=0):
        return python("-m", "epochal.cli", *words, code=code)

    assert "into by_kind, by_class: no mistake" in epochal("validate", "p.yaml")
    assert '"const": "sqlite"' in epochal("validate", "--schema")
    epochal("run", "p.yaml", "--available-now", "--quiet")
    assert databases() == [[0, 1, 2, 3, 4]] * 2
    assert "orders" in epochal("status", "chk")
    for verb in ("doctor", "verify", "grants"):
        output = epochal(verb, "p.yaml")
        assert "by_kind" in output, output
        assert "by_class" in output, output
    epochal("recover", "p.yaml", "--dry-run")
    resolve = ("resolve", "finish", "p.yaml", "--sink", "by_kind", "--epoch", "0", "--dry-run")
    assert "already" in epochal(*resolve)
    assert "ledger entry" in epochal("drop", "p.yaml", "--dry-run")
