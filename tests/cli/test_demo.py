"""`epochal demo`, run as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from epochal.demo.audit import audit
from epochal.demo.killing import STEPS, plan_killings
from epochal.demo.place import Place
from epochal.demo.readers import READERS
from epochal.demo.servers import forget, running_servers
from epochal.sinks.sql.names import staging_name
from epochal.terms import Handle, sink_tag

COMMAND = [sys.executable, "-m", "epochal.cli"]


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> Iterator[tuple[Path, dict[str, object]]]:
    """One demonstration with kills, its folder kept and its servers started again."""
    root = tmp_path_factory.mktemp("demo") / "kept"
    sizes = ["--rows", "3000", "--epochs", "6", "--kills", "1", "--seed", "11"]
    done = subprocess.run(
        [*COMMAND, "demo", *sizes, "--json", "--keep", str(root)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with running_servers(Place(root)):
        yield root, json.loads(done.stdout)
    forget(Place(root))


def test_every_row_is_there_once_after_the_kills(kept):
    _, told = kept
    assert told["rows"] == 3000
    assert told["epochs"] == 6
    assert told["kills"] == 1
    losses = {name: told[name] for name in ("lost", "duplicated", "torn_epochs", "left_in_doubt")}
    assert losses == {"lost": 0, "duplicated": 0, "torn_epochs": 0, "left_in_doubt": 0}


def test_each_target_shows_every_row_to_its_own_client(kept):
    root, _ = kept
    for read in READERS.values():
        assert sorted(read(Place(root))["id"].to_pylist()) == list(range(3000))


def test_the_audit_objects_to_lost_rows_and_to_doubled_ones(kept):
    root, _ = kept
    place = Place(root)
    with psycopg.connect(place.addresses.postgres, autocommit=True) as connection:
        connection.execute("INSERT INTO orders SELECT * FROM orders WHERE part = 3")
        assert audit(place, rows=3000, parts=6).duplicated == 500
        connection.execute("DELETE FROM orders WHERE part = 3")
    found = audit(place, rows=3000, parts=6)
    assert (found.lost, found.torn_epochs) == (500, 1)
    assert not found.is_clean


def test_the_audit_objects_to_what_is_left_in_doubt(kept):
    root, _ = kept
    place = Place(root)
    before = audit(place, rows=3000, parts=6).left_in_doubt
    uid = json.loads(_newest_record(place).split(b"\n")[1])["state"]["uid"]
    left = Handle(uid=uid, generation=1, epoch=0, sink=sink_tag("orders"), partition=0, attempt=7)
    with psycopg.connect(place.addresses.postgres, autocommit=True) as connection:
        connection.execute(f"CREATE TABLE epochal.{staging_name(left)} (id bigint)")
        assert audit(place, rows=3000, parts=6).left_in_doubt == before + 1 == 1
        connection.execute(f"DROP TABLE epochal.{staging_name(left)}")


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
    told = " ".join(done.stderr.replace("│", " ").split())
    assert "is not empty" in told
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
