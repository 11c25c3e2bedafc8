"""Files of Spark's own writer in every format: values, readers, options, and what is refused."""

from __future__ import annotations

import glob
import shutil
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import duckdb
import fastavro
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from servers.maven import artifact
from sinks.files.test_formats import CASES, FLAT, WIDE, rows_of

from epochal.errors import Misconfigured, TryAgain
from epochal.kit.hive_partitions import values_of
from epochal.session import Session
from epochal.sinks.files import Files, layout, read_epochs
from epochal.sinks.files.formats import FORMATS, format_of
from epochal.sinks.files.reader import spark_type
from epochal.sinks.files.row_counts import ROW_COUNTS
from epochal.sinks.memory import Memory
from epochal.spark import engine_write
from epochal.spark.jobs import session_settings
from epochal.spark.pipeline import Pipeline
from epochal.spark.row_hash import ObservedRows, fingerprint_of
from epochal.terms import JOB_PARTITION, EpochNumber

AVRO = "org.apache.spark:spark-avro_2.13:4.1.1:jar"
"""The newest that there is; the release of the lock has none of its own yet."""
NO_WALL = WIDE.drop_columns(["wall"])
VALUES = [
    *CASES,
    ("parquet", "lz4", WIDE),
    ("orc", None, NO_WALL),
    ("orc", "zlib", NO_WALL),
    ("avro", None, WIDE),
    ("avro", "deflate", WIDE),
]


@pytest.fixture(scope="module")
def with_avro(spark):
    """A session with spark-avro on its class path."""
    session = spark.newSession()
    session.sql(f"ADD JAR '{artifact('spark-avro', AVRO)}'")
    return session


def is_by_job(root: Path) -> bool:
    handles = [layout.handle_in(path.name) for path in root.rglob("*") if path.is_file()]
    return {handle.partition for handle in handles} == {JOB_PARTITION}


def frame_of(spark: Any, rows: pa.Table) -> Any:
    """With the types of the table: Spark takes timestamps without a zone for those with one."""
    types = {column.name: spark_type(column.type) for column in rows.schema}
    frame = spark.createDataFrame(rows)
    return frame.selectExpr(*(f"cast({name} as {kind}) {name}" for name, kind in types.items()))


class Jobs:
    """Prepares rows by Spark's own writer, as a pipeline does."""

    def __init__(self, spark: Any, driver: Any) -> None:
        self._spark = spark
        self._driver = driver
        self._numbers = count(1)

    def written(self, rows: pa.Table, epoch: int, parts: int = 2) -> Any:
        handle = self._driver.identity.job_handle(EpochNumber(epoch), next(self._numbers))
        (form,) = self._driver.committer.engine_formats
        asked = self._driver.committer.engine_write(handle, rows.schema, form)
        frame = frame_of(self._spark, rows).repartition(parts)
        with session_settings(self._spark, engine_write.SETTINGS):
            return engine_write.write(frame, asked, rows.schema, fingerprint=True)

    def prepared(self, rows: pa.Table, epoch: int, parts: int = 2) -> Any:
        return self._driver.committer.gather(self.written(rows, epoch, parts))


@pytest.mark.parametrize("case", VALUES)
def test_values_that_spark_writes_come_back_as_they_were(drive, with_avro, tmp_path, case):
    form, compression, rows = case
    root = tmp_path / "out"
    driver = drive(Files(str(root), format=form, compression=compression))
    driver.committer.check(rows.schema)
    receipt = Jobs(with_avro, driver).prepared(rows, 0)
    driver.commit(0, [receipt])
    assert is_by_job(root)
    assert receipt.fingerprint == fingerprint_of(frame_of(with_avro, rows))
    back = read_epochs(str(root)).to_table()
    assert back.schema.types == rows.schema.types
    assert rows_of(back) == rows_of(rows)
    by_spark = read_epochs(str(root), spark=with_avro)
    assert fingerprint_of(by_spark) == receipt.fingerprint
    counted = driver.committer.recount()
    assert (counted.rows, counted.faults) == (rows.num_rows, [])


TEXTS = [
    " a ", "\t", "\r", "\n", "\r\n", "a\rb", "a\n\nb", '"', '""', '","', ",", ",,", "#", "#a", "'",
    "\\", "\\n", '\\"', '"\\', "null", "NULL", "NaN", "\u2028", "\ufeff", "a\u0000b", "-", "0", "",
]  # fmt: skip


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_odd_texts_are_the_same_by_spark_and_by_tasks(drive, spark, tmp_path, form):
    numbers = pa.array(range(len(TEXTS)), pa.int64())
    rows = pa.table({"n": numbers, "text": pa.array(TEXTS), "last": pa.array(TEXTS[::-1])})
    found = {}
    for way in ("engine", "tasks"):
        driver = drive(Files(str(tmp_path / way), format=form))
        by_engine = Jobs(spark, driver)
        driver.commit(
            0, [by_engine.prepared(rows, 0) if way == "engine" else driver.prepare(rows, 0)]
        )
        found[way] = rows_of(read_epochs(str(tmp_path / way)).to_table())
    assert found["engine"] == found["tasks"] == rows_of(rows)


# Readers


def files_of(root: Path) -> list[str]:
    found = glob.glob(f"{root}/**/*", recursive=True, include_hidden=True)  # noqa: PTH207
    return [path for path in found if Path(path).is_file()]


BY_FILE: dict[str, Callable[[str], list[int]]] = {
    "parquet": lambda path: pd.read_parquet(path)["n"].tolist(),
    "orc": lambda path: pd.read_orc(path)["n"].tolist(),
    "avro": lambda path: pl.read_avro(path)["n"].to_list(),
    "jsonl": lambda path: pd.read_json(path, lines=True)["n"].tolist(),
    "csv": lambda path: pd.read_csv(path)["n"].tolist(),
}
DUCKDB = {"parquet": "read_parquet", "jsonl": "read_json", "csv": "read_csv"}
POLARS = {"parquet": pl.scan_parquet, "jsonl": pl.scan_ndjson, "csv": pl.scan_csv}
ARROW = {"parquet": "parquet", "orc": "orc", "jsonl": "json", "csv": "csv"}


def reads(root: Path, form: str) -> Iterator[tuple[str, list[int]]]:
    """What every reader of this format finds."""
    inner = f"{root}/**/*{FORMATS[form].extension}"
    files = files_of(root)
    assert files == [path for path in files if FORMATS[form].extension in path]
    yield "pandas or polars, by globs", [n for path in files for n in BY_FILE[form](path)]
    if form == "avro":
        yield "fastavro", [n for path in files for n in by_fastavro(Path(path))]
    if form in DUCKDB:
        with duckdb.connect() as connection:
            found = connection.sql(f"select n from {DUCKDB[form]}('{inner}')").fetchall()
        yield "duckdb", [n for (n,) in found]
        for place in (str(root), inner):
            yield f"polars, {place}", POLARS[form](place).collect()["n"].to_list()
    if form in ARROW:
        found = ds.dataset(root, format=ARROW[form], partitioning="hive", ignore_prefixes=[])
        yield "pyarrow", found.to_table(columns=["n"])["n"].to_pylist()


def by_fastavro(path: Path) -> list[int]:
    with path.open("rb") as file:
        return [row["n"] for row in fastavro.reader(file)]


def by_spark(spark: Any, root: Path, form: str) -> list[int]:
    reader = (
        spark.read.schema("n bigint").option("header", "true").format(FORMATS[form].engine.name)
    )
    return [row.n for row in reader.load(str(root)).select("n").collect()]


def numbered(*numbers: int) -> pa.Table:
    columns = [pa.array(numbers, pa.int64()), pa.array([f"{n % 2}" for n in numbers], pa.string())]
    schema = pa.schema([pa.field("n", pa.int64(), nullable=False), ("p", pa.string())])
    return pa.table(columns, schema=schema)


@pytest.mark.parametrize("partition_by", [[], ["p"]])
@pytest.mark.parametrize("form", list(FORMATS))
def test_no_reader_sees_a_row_of_a_job_that_is_not_decided(
    drive, with_avro, tmp_path, form, partition_by
):
    """Before the job's files are gathered, after it, and while another job has failed."""
    root = tmp_path / "out"
    driver = drive(Files(str(root), format=form, partition_by=partition_by))
    driver.committer.check(numbered().schema)
    jobs = Jobs(with_avro, driver)
    driver.commit(0, [jobs.prepared(numbered(1, 2, 3), 0)])

    def seen(expected: list[int]) -> None:
        for name, found in reads(root, form):
            assert sorted(found) == expected, name
        assert sorted(by_spark(with_avro, root, form)) == expected

    jobs.written(numbered(4, 5), 1)
    seen([1, 2, 3])
    receipt = jobs.prepared(numbered(4, 5), 1)
    assert len(driver.committer.in_doubt()) == 2
    seen([1, 2, 3])
    driver.commit(1, [receipt])
    seen([1, 2, 3, 4, 5])
    driver.commit(2, [jobs.prepared(numbered(), 2)])
    seen([1, 2, 3, 4, 5])
    assert read_epochs(str(root)).to_table().num_rows == 5


@pytest.mark.parametrize("form", list(FORMATS))
def test_a_file_without_rows_is_not_shown(drive, with_avro, tmp_path, form):
    """A job's first task begins its file before it has seen a row."""
    root = tmp_path / "out"
    driver = drive(Files(str(root), format=form))
    rows = numbered(7)
    handle = driver.identity.job_handle(EpochNumber(0), 1)
    (engine_form,) = driver.committer.engine_formats
    asked = driver.committer.engine_write(handle, rows.schema, engine_form)
    frame = with_avro.range(2, numPartitions=2).where("id = 1").selectExpr("7L n", "'1' p")
    written = engine_write.write(frame, asked, rows.schema, fingerprint=True)
    assert written.files == 2
    receipt = driver.committer.gather(written)
    driver.commit(0, [receipt])
    (path,) = files_of(root)
    with pa.OSFile(path) as file:
        assert ROW_COUNTS[format_of(path)](file, path) == 1
    assert [n for _, found in reads(root, form) for n in found] == [7] * len([*reads(root, form)])


@pytest.mark.parametrize("form", list(FORMATS))
def test_files_that_are_not_as_spark_has_written_them_are_refused(drive, with_avro, tmp_path, form):
    """One is gone, one is cut, one too many, or another attempt's: nothing is decided."""

    def gone(files: list[Path]) -> None:
        files[0].unlink()

    def longer(files: list[Path]) -> None:
        shutil.copy(files[0], files[1])

    def one_more(files: list[Path]) -> None:
        shutil.copy(files[0], files[0].with_name(f"part-00009-{files[0].name}"))

    rows = numbered(*range(100))
    for at, change in enumerate((gone, longer, one_more)):
        driver = drive(Files(str(tmp_path / f"{at}"), format=form, partition_by=["p"]))
        jobs = Jobs(with_avro, driver)
        jobs.prepared(rows, 0)
        written = jobs.written(rows.slice(0, 51), 1, parts=1)
        folder = driver.committer._engine_attempt(written.handle).job_folder
        change(sorted(folder.rglob("*.*" + FORMATS[form].extension[1:])) or files(folder))
        with pytest.raises(TryAgain, match="Spark has written 51 rows"):
            driver.committer.gather(written)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("part-*") if path.is_file())


# Options


def test_files_are_sorted_limited_and_made_by_the_options(spark, tmp_path):
    out = tmp_path / "out"
    sink = Files(
        out,
        name="f",
        partition_by=["p"],
        sort_by=["v", "n"],
        max_records_per_file=100,
        compression="zstd",
        options={"parquet.page.row.count.limit": 50, "parquet.enable.dictionary": False},
    )
    frame = spark.range(2000, numPartitions=3).selectExpr(
        "id n", "nullif(concat('p', id % 3), 'p2') p", "cast(hash(id) % 50 as string) v"
    )
    Pipeline("sorted", [sink]).write(frame, run="once", checkpoint=tmp_path / "checkpoint")
    found = files_of(out)
    assert {values_of(Path(path).relative_to(out).as_posix())["p"] for path in found} == {
        "p0", "p1", None,
    }  # fmt: skip
    rows = []
    for path in found:
        file = pq.ParquetFile(path)
        content = file.read().to_pylist()
        keys = [(row["v"], row["n"]) for row in content]
        assert keys == sorted(keys)
        assert len(content) <= 100
        column = file.metadata.row_group(0).column(0)
        assert (column.compression, column.has_dictionary_page) == ("ZSTD", False)
        rows += content
    assert len(rows) == 2000
    assert fingerprint_of(read_epochs(out, spark=spark).select("n", "p", "v")) == fingerprint_of(
        frame
    )


def test_rows_are_sorted_once(spark, drive, tmp_path):
    """The writer's own sort by partition finds that it is done."""
    driver = drive(Files(tmp_path / "out", partition_by=["p"], sort_by=["n"]))
    handle = driver.identity.job_handle(EpochNumber(0), 1)
    frame = spark.range(10).selectExpr("id n", "nullif(concat('p', id % 3), 'p2') p")
    asked = driver.committer.engine_write(handle, numbered().schema, "parquet")
    observed = ObservedRows(frame, is_hashed=True)
    sorted_frame = engine_write._shaped(engine_write._refusing(observed.frame, asked), asked)
    plan = engine_write.executed(sorted_frame, engine_write._command(sorted_frame, asked))
    assert plan.toString().count("Sort [") == 1, plan.toString()


def test_an_option_that_is_not_known_is_refused_with_the_nearest():
    for given, nearest in {
        "parquet.blok.size": "parquet.block.size",
        "parquet.bloom.filter.enable#id": "parquet.bloom.filter.enabled",
    }.items():
        with pytest.raises(Misconfigured) as caught:
            Files("/data/out", options={given: "1"})
        assert given in caught.value.message
        assert caught.value.hint == f"did you mean {nearest!r}?"
    with pytest.raises(Misconfigured, match="not an option that csv files take"):
        Files("/data/out", format="csv", options={"sep": ";"})
    assert Files("/data/out", options={"parquet.bloom.filter.enabled#id": True}).options == {
        "parquet.bloom.filter.enabled#id": "true"
    }


def test_an_order_that_files_can_not_have_is_refused(drive, tmp_path):
    for sort_by, because in {("m",): "names \\['m'\\]", ("p",): "the same in all rows"}.items():
        sink = Files(tmp_path, partition_by=["p"], sort_by=sort_by)
        with pytest.raises(Misconfigured, match=because):
            drive(sink).committer.check(numbered().schema)
    with pytest.raises(Misconfigured, match="sort_by='n' is one string"):
        Files(tmp_path, sort_by="n")


# What only Spark's own writer can do


@pytest.mark.parametrize(
    "options",
    [
        {"format": "orc"},
        {"sort_by": ["n"]},
        {"max_records_per_file": 9},
        {"options": {"parquet.block.size": 1}},
    ],
)
def test_where_no_job_of_spark_writes_what_needs_one_is_refused_at_the_start(
    spark, tmp_path, options
):
    sink = Files(tmp_path / "out", name="f", **options)
    with (
        pytest.raises(Misconfigured, match="by Spark's own writer only, and it can't be used here"),
        Session("plain", sinks=[sink], log=str(tmp_path / "log"), schema=numbered().schema),
    ):
        pass
    with pytest.raises(Misconfigured, match="max_file_bytes is for files that tasks write"):
        Files(tmp_path / "out", max_file_bytes=1 << 20, **options)
    rows = spark.range(1).selectExpr("id n", "struct(variant_get(parse_json('1'), '$') x) s")
    pipeline = Pipeline("plain", [sink, Memory(name="m", select=["n"])])
    with pytest.raises(Misconfigured, match=r"column s is struct<x:variant>"):
        pipeline.check(rows)
    with pytest.raises(Misconfigured, match=r"column s is struct<x:variant>"):
        pipeline.write(rows, run="once", checkpoint=tmp_path / "checkpoint")
    assert not (tmp_path / "out").exists() or files_of(tmp_path / "out") == []


def test_avro_without_its_package_is_refused_with_the_coordinates(spark, with_avro, tmp_path):
    pipeline = Pipeline("plain", [Files(tmp_path / "out", format="avro")])
    thread = spark._jvm.java.lang.Thread.currentThread()
    with_jar = thread.getContextClassLoader()
    thread.setContextClassLoader(spark._jvm.java.lang.ClassLoader.getSystemClassLoader())
    try:
        with pytest.raises(Misconfigured) as caught:
            pipeline.check(spark.range(1))
    finally:
        thread.setContextClassLoader(with_jar)
    assert f"org.apache.spark:spark-avro_2.13:{spark.version}" in caught.value.message
    assert pipeline.check(with_avro.range(1)).abilities


def test_a_null_that_would_be_an_empty_line_is_refused(drive, tmp_path):
    rows = pa.table({"text": ["a", None], "p": ["1", "1"]})
    sink = Files(tmp_path, format="csv", partition_by=["p"])
    with pytest.raises(Misconfigured, match="'text' is the only one in the files and may be null"):
        drive(sink).committer.check(rows.schema)
    drive(Files(tmp_path, format="csv")).committer.check(rows.schema)


def test_columns_that_a_format_can_not_hold_are_refused(drive, tmp_path):
    wall = FLAT.select(["wall"]).schema
    spaced = pa.schema([("n", pa.int64()), ("a b", pa.string())])
    inner = pa.schema([("n", pa.list_(pa.struct([("a-b", pa.string())])))])
    keyed = pa.schema([("n", pa.map_(pa.int64(), pa.string()))])
    empty, view = (
        pa.schema([("n", pa.int64()), ("v", kind)]) for kind in (pa.struct([]), pa.string_view())
    )
    for form, schema in (
        ("orc", wall),
        ("avro", spaced),
        ("avro", inner),
        ("avro", keyed),
        ("parquet", empty),
        ("csv", view),
    ):
        with pytest.raises(Misconfigured, match=f"can't be written as {form}"):
            drive(Files(tmp_path, format=form)).committer.check(schema)
