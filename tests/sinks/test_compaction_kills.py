"""Compactions that are killed at any moment, beside pipelines that write."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from sinks import compact_victim
from sinks.delta.delta_stage import made
from sinks.delta.delta_stage import rows as rows_of_delta
from sinks.iceberg.conftest import Warehouse, orders
from sinks.life import Life

from epochal.sinks.delta import Delta

KILLS = 8


@pytest.fixture
def warehouse(tmp_path):
    opened = Warehouse(
        {
            "type": "sql",
            "uri": f"sqlite:///{tmp_path}/catalog.db",
            "warehouse": f"file://{tmp_path}/warehouse",
        }
    )
    yield opened
    opened.catalog.close()


@pytest.mark.proof
def test_rows_are_there_once_however_often_a_compaction_is_killed(tmp_path, warehouse):
    name = warehouse.create()
    made(tmp_path / "delta", orders().schema)
    lives = [Life(sink=warehouse.sink(name)), Life(sink=Delta(tmp_path / "delta"))]
    chance = random.Random(7)
    written = 0
    tests = str(Path(compact_victim.__file__).parent.parent)
    program = [sys.executable, compact_victim.__file__, str(tmp_path), name]
    for _ in range(KILLS):
        victim = subprocess.Popen(
            program,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": tests},
        )
        assert victim.stdout.readline(), victim.stderr.read().decode()[-2000:]
        for _ in range(chance.randrange(2, 8)):
            for life in lives:
                life.write(written, orders(2 * written, 2 * written + 1))
            written += 1
        for _ in range(chance.choice([0, 0, 1, 2])):
            victim.stdout.readline()  # a pass ends, and another one begins
        victim.send_signal(signal.SIGKILL)
        victim.communicate()
        expected = list(range(2 * written))
        assert warehouse.ids(name) == expected
        assert sorted(row["id"] for row in rows_of_delta(tmp_path / "delta", "id")) == expected
    assert any("epochal.compacted" in one for one in warehouse.history(name))
    for life in lives:
        life.fresh().committer.compact(target_bytes=2**20, is_dry_run=False)
        assert not life.committer.in_doubt()
        life.close()
    assert warehouse.ids(name) == expected
    assert len(list(warehouse.load(name).scan().plan_files())) == 1
