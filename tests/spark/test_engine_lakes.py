"""
Folders, Delta and Iceberg tables whose files Spark itself writes: beside another pipeline on the
same table, on a disk that is full, and with very many partitions.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyiceberg.catalog import load_catalog
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField, StringType
from spark_stage import Killer, Source

from epochal.contract import Sink
from epochal.errors import EpochalError
from epochal.sinks.delta import Delta
from epochal.sinks.files import Files, read_epochs
from epochal.sinks.iceberg import Iceberg
from epochal.spark.driver_write import DriverWrites
from epochal.spark.pipeline import Pipeline
from epochal.terms import JOB_PARTITION, Handle, Limits

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

DEATHS = ("prepared", "rehearsed", "decided", "committed f")
BESIDE = ("begun", "prepared", "rehearsed", "decided")
"""Steps of one pipeline at which the other may commit."""
PARTITIONS = 10_000


class Target:
    """A place of one kind below a folder, as its readers see it."""

    def __init__(self, kind: str, folder: Path, catalog: Path) -> None:
        self._kind = kind
        self.path = folder / "target"
        self._properties = {
            "type": "sql",
            "uri": f"sqlite:///{catalog}/catalog.db",
            "warehouse": f"file://{folder}/warehouse",
        }
        if kind == "iceberg":
            columns = [NestedField(1, "id", LongType()), NestedField(2, "v", StringType())]
            with load_catalog("lake", **self._properties) as opened:
                opened.create_namespace("shop")
                opened.create_table(
                    "shop.t", schema=Schema(*columns), location=f"file://{self.path}"
                )

    def sink(self, **options: Any) -> Sink:
        if self._kind == "files":
            return Files(self.path, name="f", **options)
        if self._kind == "delta":
            return Delta(self.path, name="f", create_table="if_missing", **options)
        return Iceberg("lake.shop.t", properties=self._properties, name="f", **options)

    def files(self) -> list[str]:
        """The files that a reader opens."""
        if self._kind == "files":
            return [str(path) for path in self.path.rglob("*.parquet")]
        if self._kind == "delta":
            is_there = DeltaTable.is_deltatable(str(self.path))
            return DeltaTable(self.path).file_uris() if is_there else []
        with load_catalog("lake", **self._properties) as opened:
            tasks = opened.load_table("shop.t").scan().plan_files()
            return [task.file.file_path.removeprefix("file://") for task in tasks]

    def ids(self, spark: SparkSession) -> list[int]:
        files = self.files()
        return sorted(row.id for row in spark.read.parquet(*files).collect()) if files else []

    def left(self) -> list[str]:
        """Rows on the disk that are in no epoch, and whatever lists them."""
        used = {Path(path) for path in self.files()}
        found = [path for path in self.path.parent.rglob("*") if path.is_file()]
        return [
            str(path)
            for path in found
            if path not in used and (path.suffix == ".parquet" or Handle.parse(path.name))
        ]

    def is_by_jobs(self) -> bool:
        parts = [part for path in self.files() for part in Path(path).parts[-2:]]
        handles = [Handle.parse(part) or Handle.parse(part.rpartition("-")[0]) for part in parts]
        found = {handle.partition for handle in handles if handle is not None}
        return found == {JOB_PARTITION}


@pytest.fixture(autouse=True)
def few_rows_are_written_by_jobs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DriverWrites, "expected", lambda *_: None)


@pytest.mark.proof
@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_two_pipelines_on_one_table_lose_and_double_no_row_wherever_one_dies(
    source: Source, checkpoint: Path, killer: Killer, tmp_path: Path, kind: str
) -> None:
    """Between two steps of one, which dies at several of them, the other commits."""
    (tmp_path / "lake").mkdir()
    target = Target(kind, tmp_path / "lake", tmp_path)
    chance, numbers, others = Random(17), count(1_000_000, 10), []

    def beside(step: str, epoch: int | None) -> None:
        if step in BESIDE and chance.random() < 0.4:
            rows = range(first := next(numbers), first + 10)
            frame = source.spark.range(first, first + 10).selectExpr("id", "concat('v', id) v")
            other = Pipeline("other", [target.sink()])
            other.write(frame, run=str(first), checkpoint=tmp_path / "other")
            others.extend(rows)
        killer.watch(step, epoch)

    pipeline = Pipeline("one", [target.sink()], watch=beside)
    source.add_numbers(epochs=len(DEATHS) + 1)
    for at, step in enumerate(DEATHS):
        killer.at = (step, at)
        assert killer.run(pipeline, source.stream, checkpoint), f"never reached {killer.at}"
    assert not killer.run(pipeline, source.stream, checkpoint)
    assert others, "the other has written nothing"
    assert target.ids(source.spark) == source.ids + others
    assert target.is_by_jobs()
    assert target.left() == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few megabytes, which only root can mount."""
    disk = tmp_path / "small"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "epochal-tests", str(disk)]
    if os.getuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
        # CI runs as root, and must not lose this test unnoticed.
        give_up = pytest.fail if os.environ.get("CI") else pytest.skip
        give_up("this user can't mount a small disk")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def numbered(spark: SparkSession, rows: int) -> DataFrame:
    """Rows of 64 characters that nothing can compress."""
    return spark.range(rows, numPartitions=2).selectExpr("id", "sha2(string(id), 256) v")


@pytest.mark.parametrize("kind", ["files", "delta", "iceberg"])
def test_a_disk_that_is_full_fails_the_job_and_leaves_nothing_on_it(
    spark: SparkSession, small_disk: Path, tmp_path: Path, kind: str
) -> None:
    target = Target(kind, small_disk, tmp_path)
    pipeline = Pipeline("full", [target.sink()])
    with pytest.raises(EpochalError, match="No space left on device"):
        pipeline.write(numbered(spark, 200_000), run="a", checkpoint=tmp_path / "checkpoint")
    assert target.ids(spark) == []
    pipeline.write(numbered(spark, 100), run="a", checkpoint=tmp_path / "checkpoint")
    assert target.ids(spark) == list(range(100))
    assert target.is_by_jobs()
    assert target.left() == []


@pytest.mark.proof
@pytest.mark.parametrize("kind", ["files", "delta"])
def test_an_epoch_of_ten_thousand_partitions_is_there_whole_and_leaves_nothing_else(
    spark: SparkSession, tmp_path: Path, kind: str
) -> None:
    (tmp_path / "lake").mkdir()
    target = Target(kind, tmp_path / "lake", tmp_path)
    if kind == "delta":
        columns = pa.schema([("id", pa.int64()), ("part", pa.int64())])
        table = DeltaTable.create(target.path, columns, partition_by=["part"])
        table.alter.add_constraint({"same": "id = part"})
    frame = spark.range(PARTITIONS, numPartitions=2).selectExpr("id", "id part")
    pipeline = Pipeline("many", [target.sink(partition_by=["part"])], limits=Limits())
    pipeline.write(frame, run="a", checkpoint=tmp_path / "checkpoint")
    assert len(target.files()) == PARTITIONS
    assert target.ids(spark) == list(range(PARTITIONS))
    if kind == "files":
        found = read_epochs(target.path).to_table()
        assert found["id"].to_pylist() == found["part"].to_pylist()
    assert target.left() == []
