"""Drivers killed at any moment, without Spark: a topic and files, whose totals stay equal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import session_victim as victim
from kafka_broker import Broker, await_nothing_open

from epochal.sinks.files import read_epochs
from epochal.terms import sink_tag

KILLS = int(os.environ.get("EPOCHAL_TEST_KAFKA_KILLS", "8"))


@pytest.mark.timeout(1800)
def test_every_row_is_moved_once_however_often_the_driver_dies(
    kafka: Broker, tmp_path: Path
) -> None:
    topic = kafka.topic(partitions=3)
    command = [sys.executable, victim.__file__, str(tmp_path), kafka.bootstrap, topic]
    ran = subprocess.run(
        [*command, str(KILLS), "7"], capture_output=True, text=True, timeout=1700, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    epochs = int(ran.stdout)
    wanted = {number: number % 97 for number in range(epochs * victim.ROWS)}
    taken = sorted((row["id"], row["amount"]) for row in kafka.rows(topic))
    given = read_epochs(str(tmp_path / "given")).to_table().to_pylist()
    assert taken == sorted(wanted.items())
    assert sorted((row["id"], row["amount"]) for row in given) == sorted(wanted.items())
    # One that a driver was killed in before it had claimed is ended by the broker.
    await_nothing_open(kafka, sink_tag("taken"))
