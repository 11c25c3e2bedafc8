"""Drivers of a Hudi table and files, each killed at another step, and what is there in the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from sinks.hudi import hudi_victim as victim
from sinks.hudi.hudi_stage import completions, leftovers, make_table

from epochal.coordinator import read_state
from epochal.logs import checkpoint_log
from epochal.sinks.files import read_epochs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.proof
_ENDS_WITHIN_S = 600
_TESTS = Path(__file__).parents[2]


def lived(root: Path, mode: str, step: str) -> str:
    """One life; the step at which it was killed, empty where it has written everything."""
    (root / "died").unlink(missing_ok=True)
    program = [sys.executable, victim.__file__, str(root), mode, step]
    paths = [str(_TESTS), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with (root / "output").open("wb") as output:
        ended = subprocess.run(
            program, stdout=output, stderr=output, env=env, check=False, timeout=_ENDS_WITHIN_S
        )
    if ended.returncode == 0:
        return ""
    assert ended.returncode == -signal.SIGKILL, (root / "output").read_text()[-4000:]
    return (root / "died").read_text()


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["cow", "mor"])
@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_every_row_is_there_once_wherever_drivers_are_killed(
    hudi_spark: SparkSession, tmp_path: Path, kind: str, mode: str
) -> None:
    (tmp_path / "in").mkdir()
    table = tmp_path / "table"
    order = "version" if mode == "upsert" else ""
    make_table(hudi_spark, table, kind, columns=victim.COLUMNS, partition="", order=order)
    steps = [*victim.STEPS, ""]
    found, written = [], []
    for epoch, step in enumerate(steps):
        victim.add_epoch(tmp_path, mode, epoch)
        written += [(n, epoch, n * 7 + epoch) for n in victim.ids_of(mode, epoch)]
        found.append(lived(tmp_path, mode, step))
    assert found == steps
    files = read_epochs(str(tmp_path / "files")).to_table().to_pylist()
    assert sorted(tuple(row.values()) for row in files) == sorted(written)
    last = {row[0]: row for row in written}
    read = hudi_spark.read.format("hudi").load(str(table)).select("id", "version", "value")
    assert sorted(map(tuple, read.collect())) == sorted(last.values())
    assert len(completions(table)) == len(steps)
    assert leftovers(hudi_spark, table) == []
    state = read_state(checkpoint_log(tmp_path / "checkpoint"))
    assert state is not None
    assert (state.is_stopped, state.unsettled) == (True, None)
