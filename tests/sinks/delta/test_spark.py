"""Real pipelines on Spark: beside delta-spark, which is not ours, and killed in every mode."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from deltalake import DeltaTable
from servers import delta
from sinks.delta import beside_spark, changes_victim
from sinks.delta.delta_stage import leftovers, rows

ODD = beside_spark.ODD


def by_text(pairs: list) -> list:
    return sorted((list(pair) for pair in pairs), key=repr)


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> tuple[dict, Path]:
    home = tmp_path_factory.mktemp("beside")
    program = [sys.executable, beside_spark.__file__, str(delta.folder()), str(home)]
    done = subprocess.run(program, check=False, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1]), home / "table"


def test_delta_spark_reads_what_the_pipeline_wrote(seen):
    found, _ = seen
    written = [(0, "mon"), (1, "tue"), (2, None), (3, ODD), (4, "mon"), (5, ODD)]
    assert found["written"] == by_text(written)
    assert found["skipping"] == [[4, "mon"]], "statistics hid a row"


def test_the_pipeline_goes_on_after_spark_changed_the_table(seen):
    found, folder = seen
    ours = [(0, "mon"), (2, None), (3, ODD), (4, "mon"), (5, ODD), (6, "thu"), (7, "wed")]
    theirs = [(100 + number, "thu") for number in range(10) if number != 5]
    assert found["after"] == by_text(ours + theirs)
    read = [(row["id"], row["day"]) for row in rows(folder, "id, day")]
    assert by_text(read) == found["after"], "deltalake and Spark see different rows"
    assert DeltaTable(str(folder)).version() >= 6
    assert [path for path in leftovers(folder) if "_epochal" in path] == []


def test_generated_columns_are_as_delta_spark_itself_would_write_them(seen):
    found, _ = seen
    assert found["generated"] == [
        [1, "2026-01-31", "a1", 10],
        [2, "2026-02-01", None, 20],
        [3, "2026-02-01", "a3", 30],
        [4, "2026-02-02", "a4", 40],
    ]
    assert found["generated_wrong"] == 0
    assert found["generated_on_one_day"] == [2, 3]
    assert found["generated_by"] == "Spark"
    assert "column day is generated, which takes Spark's own writer" in found["without_spark"]


def test_instants_by_which_a_table_is_partitioned_are_the_same_to_every_reader(seen):
    found, folder = seen
    # 2026-11-01, 04:30 to 06:00 UTC: 00:30, 01:00, 01:30 and 01:00 again in New York.
    wanted = [1793505600, 1793509200, 1793509200, 1793512800]
    assert found["hours in America/New_York"] == [0, wanted]
    assert found["hours in UTC"] == [0, wanted]
    read = rows(folder.parent / "hours", "hour")
    assert sorted(int(row["hour"].timestamp()) for row in read) == wanted
    assert "the table is partitioned by 'hour', which is timestamp" in found["hours_replaced"]


@pytest.mark.parametrize("mode", ["name", "id"])
def test_a_table_of_delta_spark_that_maps_column_names_is_refused_whatever_would_write(seen, mode):
    found, _ = seen
    for refusal in found[f"mapped_by_{mode}"]:
        assert f"the table maps column names (delta.columnMapping.mode={mode})" in refusal


@pytest.mark.proof
def test_whatever_changes_between_two_steps_delta_spark_sees_every_row_once(tmp_path):
    program = [
        sys.executable,
        str(Path(__file__).with_name("changing_spark.py")),
        str(delta.folder()),
        str(tmp_path),
        *"1234",
    ]
    tests = Path(__file__).parents[2]
    found_in = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (tests, tests / "spark")))}
    done = subprocess.run(
        program, check=False, capture_output=True, text=True, timeout=1800, env=found_in
    )
    assert done.returncode == 0, done.stderr[-4000:]
    happened = json.loads(done.stdout.splitlines()[-1])
    assert all(len(one) > 3 for one in happened.values()), happened
    verbs = {what.split()[0] for one in happened.values() for what in one[:-1]}
    assert verbs >= {"add", "split", "join", "widen"}, happened


def versions(root: Path) -> dict[str, int]:
    return {name: DeltaTable(str(root / name)).version() for name in ("merged", "replaced")}


def killed_between(root: Path, done: str, epoch: int) -> None:
    command = [sys.executable, changes_victim.__file__, str(root), done, str(epoch)]
    # Into a file: the JVM outlives its driver for a moment, and would keep a pipe open.
    with (root / "output").open("wb") as output:
        died = subprocess.run(command, stdout=output, stderr=output, check=False, timeout=900)
    assert died.returncode == -signal.SIGKILL, (root / "output").read_text()[-4000:]


@pytest.mark.proof
def test_a_driver_killed_between_two_tables_merges_and_overwrites_every_epoch_once(spark, tmp_path):
    changes_victim.report(tmp_path)
    # The first version made the table, and each epoch is one more.
    killed_between(tmp_path, "replaced", 1)
    assert versions(tmp_path) == {"merged": 1, "replaced": 2}
    killed_between(tmp_path, "merged", 2)
    assert versions(tmp_path) == {"merged": 3, "replaced": 2}
    changes_victim.run(spark, tmp_path)
    assert versions(tmp_path) == {"merged": 3, "replaced": 3}
    for name, wanted in (
        ("merged", changes_victim.merged()),
        ("replaced", changes_victim.replaced()),
    ):
        found = rows(tmp_path / name, "id, name")
        assert sorted((row["id"], row["name"]) for row in found) == wanted
        assert leftovers(tmp_path / name) == []
