"""Readers of every usual kind, at the root of a sink whose epochs are prepared and not decided."""

from __future__ import annotations

import glob
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from epochal.errors import Misconfigured
from epochal.sinks.files import Files, read_epochs
from epochal.sinks.files.local import folder_beside
from epochal.terms import EpochNumber

EXTENSIONS = {"parquet": "*.parquet", "jsonl": "*.jsonl", "csv": "*.csv"}
DUCKDB = {"parquet": "read_parquet", "jsonl": "read_json", "csv": "read_csv"}
POLARS = {"parquet": pl.scan_parquet, "jsonl": pl.scan_ndjson, "csv": pl.scan_csv}
PANDAS = {
    "parquet": pd.read_parquet,
    "jsonl": lambda path: pd.read_json(path, lines=True),
    "csv": pd.read_csv,
}
ARROW = {"parquet": "parquet", "jsonl": "json", "csv": "csv"}


def reads(root: Path, form: str) -> Iterator[tuple[str, Callable[[], list[int]]]]:
    """Every reader by its name: what it finds when it is asked."""
    inner = f"{root}/**/{EXTENSIONS[form]}"

    def by_duckdb() -> list[int]:
        with duckdb.connect() as connection:
            found = connection.sql(f"select n from {DUCKDB[form]}('{inner}')").fetchall()
        return [n for (n,) in found]

    def by_polars(path: str) -> list[int]:
        return POLARS[form](path).collect()["n"].to_list()

    def by_pandas() -> list[int]:
        return pd.read_parquet(root)["n"].tolist()

    def by_globs() -> list[int]:
        found = glob.glob(f"{root}/**/*", recursive=True, include_hidden=True)  # noqa: PTH207
        files = [path for path in found if Path(path).is_file()]
        assert files == [path for path in files if path.endswith(EXTENSIONS[form][1:])]
        return [n for path in files for n in PANDAS[form](path)["n"].tolist()]

    def by_arrow() -> list[int]:
        found = ds.dataset(root, format=ARROW[form], partitioning="hive", ignore_prefixes=[])
        return found.to_table(columns=["n"])["n"].to_pylist()

    yield "duckdb", by_duckdb
    yield "polars, the folder", lambda: by_polars(str(root))
    yield "polars, a glob", lambda: by_polars(inner)
    yield "pandas and globs", by_globs
    yield "pyarrow", by_arrow
    if form == "parquet":
        yield "pandas, the folder", by_pandas


def by_spark(spark, root: Path, form: str) -> list[list[int]]:
    reader = spark.read.schema("n bigint").option("header", "true")
    kind = "json" if form == "jsonl" else form
    found = [
        reader.format(kind).load(str(root)),
        reader.format(kind).option("recursiveFileLookup", "true").load(str(root)),
    ]
    return [sorted(row.n for row in rows.select("n").collect()) for rows in found]


def rows(*numbers: int) -> pa.Table:
    columns = [pa.array(numbers, pa.int64()), pa.array([f"{n % 2}" for n in numbers], pa.string())]
    schema = pa.schema([pa.field("n", pa.int64(), nullable=False), ("p", pa.string())])
    return pa.table(columns, schema=schema)


@pytest.mark.parametrize("partition_by", [[], ["p"]])
@pytest.mark.parametrize("form", ["parquet", "jsonl", "csv"])
def test_no_reader_of_the_root_sees_a_row_that_is_not_decided(
    drive, spark, tmp_path, form, partition_by
):
    root = tmp_path / "out"
    driver = drive(Files(str(root), format=form, partition_by=partition_by))
    driver.committer.check(rows().schema)
    driver.write(rows(1, 2), 0)
    driver.write(rows(3), 1)
    driver.committer.prune(EpochNumber(1000))
    undecided = [driver.prepare(rows(4, 5), 2), driver.prepare(rows(4, 5), 2, attempt=1)]
    assert len(driver.committer.in_doubt()) == 2
    for name, read in reads(root, form):
        assert sorted(read()) == [1, 2, 3], name
    assert by_spark(spark, root, form) == [[1, 2, 3]] * 2
    driver.commit(2, undecided[:1])
    for name, read in reads(root, form):
        assert sorted(read()) == [1, 2, 3, 4, 5], name


def test_no_manifest_is_taken_for_rows_by_a_glob_from_above(drive, tmp_path):
    driver = drive(Files(str(tmp_path / "lake" / "orders"), format="jsonl"))
    driver.write(rows(1, 2), 0)
    driver.committer.prune(EpochNumber(1000))
    found = [path for path in (tmp_path / "lake").rglob("*.json*") if path.is_file()]
    assert [json.loads(line)["n"] for one in found for line in one.read_text().splitlines()] == [
        1,
        2,
    ]


@pytest.mark.parametrize("inner", ["eu", "region=eu/day=1"])
def test_a_folder_inside_of_that_of_another_sink_is_refused(drive, tmp_path, inner):
    """Readers of the outer one would see what is prepared beside the inner one."""
    rows = pa.table({"n": [1]})
    outer, within = tmp_path / "orders", tmp_path / "orders" / inner
    drive(Files(outer)).write(rows, 0)
    with pytest.raises(Misconfigured, match="would see what is prepared for another"):
        drive(Files(within)).committer.check(rows.schema)
    assert not within.exists()
    drive(Files(tmp_path / "others" / "eu")).write(rows, 0)
    with pytest.raises(Misconfigured, match="would see what is prepared for another"):
        drive(Files(tmp_path / "others")).committer.check(rows.schema)
    drive(Files(tmp_path / "others" / "us")).committer.check(rows.schema)


def test_a_mount_point_is_refused_with_a_folder_below_it_as_the_way_out(drive):
    mounted = Path("/dev/shm")
    assert mounted.is_mount(), "this needs a second file system"
    with pytest.raises(Misconfigured) as caught:
        drive(Files(str(mounted))).committer.check(None)
    assert str(mounted / "folder") in caught.value.hint
    assert not folder_beside(mounted).exists()


def test_a_root_behind_a_link_is_prepared_beside_the_real_one(drive, numbers, tmp_path, elsewhere):
    real = elsewhere / "orders"
    (tmp_path / "link").symlink_to(real)
    driver = drive(Files(str(tmp_path / "link")))
    driver.committer.check(numbers().schema)
    receipt = driver.prepare(numbers(1), 0)
    assert (folder_beside(real) / str(receipt.handle)).is_dir()
    driver.commit(0, [receipt])
    assert ds.dataset(real).to_table()["n"].to_pylist() == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["link"]


def test_a_path_that_is_not_there_is_no_empty_table(tmp_path):
    with pytest.raises(Misconfigured, match="there is no folder"):
        read_epochs(tmp_path / "ordesr")
