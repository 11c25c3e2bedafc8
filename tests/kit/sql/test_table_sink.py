"""Imports of a declared sink: neither its writer nor its committer comes along."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import sys
from epochal.sinks.{0} import {1}
print(" ".join(sys.modules))
"""


@pytest.mark.parametrize(
    ("package", "sink"), [("postgres", "Postgres"), ("mysql", "MySQL"), ("oracle", "Oracle")]
)
def test_a_declared_sink_loads_neither_writer_nor_committer(package, sink):
    code = CODE.format(package, sink)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    ours = {f"epochal.sinks.{package}.{name}" for name in ("writer", "check", "pool")}
    shared = {f"epochal.kit.sql.{name}" for name in ("committer", "staged", "prepared", "writer")}
    assert not loaded & {*ours, *shared, "sqlalchemy"}
