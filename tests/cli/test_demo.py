"""`epochal demo`, run as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from epochal.demo.audit import audit
from epochal.demo.killing import STEPS, plan_killings
from epochal.demo.place import ORDERS, Place

COMMAND = [sys.executable, "-m", "epochal.cli"]


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> tuple[Path, dict[str, object]]:
    """One demonstration with kills, its folder kept."""
    root = tmp_path_factory.mktemp("demo") / "kept"
    sizes = ["--rows", "3000", "--epochs", "6", "--kills", "2", "--seed", "11"]
    done = subprocess.run(
        [*COMMAND, "demo", *sizes, "--json", "--keep", str(root)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return root, json.loads(done.stdout)


def test_every_row_is_there_once_after_the_kills(kept):
    _, told = kept
    assert told["rows"] == 3000
    assert told["epochs"] == 6
    assert told["kills"] == 2
    losses = {name: told[name] for name in ("lost", "duplicated", "torn_epochs", "left_in_doubt")}
    assert losses == {"lost": 0, "duplicated": 0, "torn_epochs": 0, "left_in_doubt": 0}


def test_the_audit_objects_to_a_lost_file_and_to_a_doubled_one(kept):
    root, _ = kept
    place = Place(root)
    file = next(place.target(ORDERS).glob("*.parquet"))
    table = pq.read_table(file)
    double = place.target(ORDERS) / "double.parquet"
    pq.write_table(table, double)
    assert audit(place, rows=3000, parts=6).duplicated == table.num_rows
    double.unlink()
    away = file.rename(root / "away")
    found = audit(place, rows=3000, parts=6)
    assert (found.lost, found.torn_epochs) == (table.num_rows, 1)
    assert not found.is_clean
    away.rename(file)


def test_the_audit_objects_to_what_is_left_in_doubt(kept):
    root, _ = kept
    place = Place(root)
    prepared = place.target(ORDERS) / "_epochal" / "prepared"
    uid = json.loads(_newest_record(place).split(b"\n")[1])["state"]["uid"]
    tag = next(iter(place.sinks())).name
    from epochal.terms import sink_tag

    left = prepared / f"epochal-{uid}-g1-e0-s{sink_tag(tag)}-p0-t7"
    left.mkdir(parents=True)
    (left / "rows.parquet").write_bytes(b"x")
    assert audit(place, rows=3000, parts=6).left_in_doubt == 1


def _newest_record(place: Place) -> bytes:
    return max((place.checkpoint / "epochal" / "log").glob("*.json")).read_bytes()


def test_a_seed_repeats_the_same_killings():
    assert list(plan_killings(9, 4)) == list(plan_killings(9, 4))
    assert {killing.step for killing in plan_killings(200, 1)} == set(STEPS)


def test_a_folder_that_is_not_empty_is_refused(tmp_path):
    (tmp_path / "mine").write_text("precious")
    done = subprocess.run(
        [*COMMAND, "demo", "--keep", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "is not empty" in done.stderr
    assert (tmp_path / "mine").read_text() == "precious"


def test_help_names_every_verb():
    told = subprocess.run([*COMMAND, "--help"], capture_output=True, text=True, check=True).stdout
    assert all(verb in told for verb in ("demo", "adopt", "fork", "rename"))


def test_an_error_is_one_message_with_its_hint_and_no_traceback(tmp_path):
    done = subprocess.run(
        [*COMMAND, "adopt", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "\nhint: " in done.stderr
    assert "Traceback" not in done.stderr
