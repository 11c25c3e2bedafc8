"""
Drivers killed while they write to three lakes under one decision, beside compaction, VACUUM and the
expiry of snapshots.

`make proof KILLS=50` kills 30; every row is compared in the end, as several readers see it.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import duckdb
import lake_victim
import polars as pl
import pytest
import victim
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from kill_stage import KILLS, SEED, TO_THE_END, lives
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField

from epochal.coordinator import read_state
from epochal.logs import checkpoint_log
from epochal.sinks.files import read_epochs
from epochal.terms import Identity, Limits

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LAKE_KILLS = KILLS * 3 // 5
STEPS = (
    "prepared",
    "decided",
    "committed delta",
    "rehearsed",
    "committed iceberg",
    "committed files",
    "begun",
    "settled",
)
_EVERY_S = 0.3


def deaths(count: int, seed: int) -> Iterator[str]:
    """Every step first, then steps by chance."""
    chance = Random(seed)
    for number in range(count):
        step = STEPS[number] if number < len(STEPS) else chance.choice(STEPS)
        yield f"{chance.choice(('kill', 'kill', 'kill', 'jvm'))} {lake_victim.LAKES} {step}"


class Maintenance:
    """
    What others do to the tables while drivers live and die. VACUUM without retention takes prepared
    files too, so that it comes only where no driver is at work: their rows are then written again.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._go_on, daemon=True)
        self.done = {"compacted": 0, "expired": 0, "vacuumed": 0}

    def __enter__(self) -> Maintenance:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def vacuum(self) -> None:
        with contextlib.suppress(DeltaError):
            removed = DeltaTable(lake_victim.delta(self._root)).vacuum(
                0, dry_run=False, enforce_retention_duration=False
            )
            self.done["vacuumed"] += len(removed)

    def _go_on(self) -> None:
        catalog = open_catalog(self._root)
        while not self._is_over.wait(_EVERY_S):
            with contextlib.suppress(DeltaError):
                found = DeltaTable(lake_victim.delta(self._root)).optimize.compact()
                self.done["compacted"] += int(found["numFilesRemoved"])
            with contextlib.suppress(CommitFailedException, CommitStateUnknownException):
                table = catalog.load_table(lake_victim.TABLE)
                old = len(table.snapshots()) - 1
                now = dt.datetime.now(dt.UTC).replace(tzinfo=None)
                table.maintenance.expire_snapshots().older_than(now).commit()
                self.done["expired"] += max(old, 0)
        catalog.close()


def open_catalog(root: Path) -> Catalog:
    return load_catalog("lake", **lake_victim.catalog(root))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    catalog = open_catalog(tmp_path)
    catalog.create_namespace("shop")
    columns = [NestedField(1, "id", LongType()), NestedField(2, "value", LongType())]
    catalog.create_table(lake_victim.TABLE, schema=Schema(*columns))
    catalog.close()
    return tmp_path


@pytest.mark.proof
@pytest.mark.timeout(7200)
def test_every_row_is_in_all_three_lakes_once_wherever_drivers_are_killed(
    root: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = [*deaths(LAKE_KILLS, SEED), TO_THE_END]
    found = []
    with Maintenance(root) as maintenance:
        for end in lives(root, ends, lake_victim.__file__):
            found.append(end)
            maintenance.vacuum()
    assert found == ends
    assert all(maintenance.done.values()), maintenance.done
    rows = [(n, n * 7) for n in range(len(ends) * victim.ROWS)]
    monkeypatch.setenv("POLARS_ICEBERG_PLANNER", "pyiceberg")
    for reader, seen in views(root, spark).items():
        assert sorted((row["id"], row["value"]) for row in seen) == rows, reader
    state = read_state(checkpoint_log(root / lake_victim.LAKES))
    assert state is not None
    assert (state.is_stopped, state.unsettled) == (True, None)
    assert [sink["writer"] for sink in state.sinks.values()] == ["Spark"] * 3
    for sink in lake_victim.sinks_of(root, lake_victim.LAKES):
        who = Identity(
            pipeline=state.pipeline, uid=state.uid, sink=sink.name, generation=state.generation
        )
        committer = sink.committer(who, Limits())
        assert committer.in_doubt() == []
        committer.close()


def views(root: Path, spark: SparkSession) -> dict[str, list[dict[str, int]]]:
    """The rows of the three targets, each as several readers see them."""
    files, delta = str(lake_victim.files(root)), str(lake_victim.delta(root))
    catalog = open_catalog(root)
    table = catalog.load_table(lake_victim.TABLE)
    arrow = table.scan().to_arrow()
    parts = [task.file.file_path for task in table.scan().plan_files()]
    seen = {
        "files, pyarrow": read_epochs(files).to_table().to_pylist(),
        "files, Spark": [row.asDict() for row in spark.read.parquet(files).collect()],
        "files, duckdb": duckdb.sql(f"FROM '{files}/**/*.parquet'").to_arrow_table().to_pylist(),
        "files, polars": pl.read_parquet(f"{files}/**/*.parquet").to_dicts(),
        "Delta, pyarrow": DeltaTable(delta).to_pyarrow_table().to_pylist(),
        "Delta, polars": pl.read_delta(delta).to_dicts(),
        "Iceberg, pyarrow": arrow.to_pylist(),
        "Iceberg, polars": pl.scan_iceberg(table).collect().to_dicts(),
        "Iceberg, Spark": [row.asDict() for row in spark.read.parquet(*parts).collect()],
    }
    catalog.close()
    return seen
