"""The data source door to Kafka: every task has an id of its own, and a driver that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import source_victim as victim
from kafka_place import Place

from epochal.sinks.kafka import Kafka
from epochal.spark.options import from_options
from epochal.terms import sink_tag

TAG = sink_tag(victim.NAME)
ROWS = 10


def add_epoch(root: Path, epoch: int, rows: int = ROWS) -> list[int]:
    """One file is one epoch; the file source takes older ones first."""
    ids = list(range(epoch * ROWS, epoch * ROWS + rows))
    scratch = root / f"{epoch}.json"
    scratch.write_text("\n".join(json.dumps({"id": n, "name": f"n{n}"}) for n in ids))
    os.utime(scratch, (1_700_000_000 + epoch, 1_700_000_000 + epoch))
    scratch.rename(root / "in" / scratch.name)
    return ids


def start(root: Path, place: Place, topic: str) -> subprocess.Popen[str]:
    """A driver of its own, warm and waiting for the word."""
    with (root / "driver.txt").open("a") as told:
        command = [sys.executable, victim.__file__, str(root), place.bootstrap, topic]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=told, stderr=told, text=True)


def live(driver: subprocess.Popen[str], root: Path, death: str = "") -> None:
    (root / "died.txt").unlink(missing_ok=True)
    driver.communicate(f"{death}\n", timeout=900)
    wanted = -signal.SIGKILL if death else 0
    if driver.returncode != wanted:
        pytest.fail((root / "driver.txt").read_text()[-4000:])
    assert not death or (root / "died.txt").read_text() == death


def test_a_driver_killed_around_its_decision_leaves_every_row_visible_once(
    place: Place, tmp_path: Path
) -> None:
    topic = place.topic(partitions=3)
    (tmp_path / "in").mkdir()
    drivers = [start(tmp_path, place, topic) for _ in range(2)]
    try:
        ids = add_epoch(tmp_path, 0)
        live(drivers[0], tmp_path, "rehearse")
        undecided = place.open_transactions(TAG)
        assert len(undecided) == victim.TASKS
        assert not any("-slot" in name for name in undecided), "a planner has no pool of ids"
        drivers.append(start(tmp_path, place, topic))

        live(drivers[1], tmp_path, "commit")
        decided = place.open_transactions(TAG)
        assert len(decided) == victim.TASKS
        assert not set(decided) & set(undecided), "each attempt has ids of its own"
        assert place.ids(topic) == [], "decided, and not yet committed"

        ids += [*add_epoch(tmp_path, 1, rows=0), *add_epoch(tmp_path, 2)]
        live(drivers[2], tmp_path)
    finally:
        for driver in drivers:
            driver.kill()
            driver.communicate()
    assert place.ids(topic) == ids
    assert place.open_transactions(TAG) == []
    spool = tmp_path / "checkpoint" / "epochal" / "spool"
    assert spool.is_dir()
    assert not [path for path in spool.rglob("*") if path.is_file()]


def test_an_option_that_is_true_or_a_text_is_told_apart() -> None:
    plain = {"bootstrap": "b:9092", "topic": "t"}
    assert from_options(Kafka, {**plain, "spool": "true"}).spool is True
    assert from_options(Kafka, {**plain, "spool": "/mnt/spool"}).spool == "/mnt/spool"
    assert not from_options(Kafka, {**plain, "spool": "false"}).spool
