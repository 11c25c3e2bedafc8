"""
Iceberg tables whose files Spark itself writes: by its writer of parquet, or by Iceberg's own, where
its runtime is on the class path (`make proof ONLY=compat` runs these tests with it on Spark 4.1).
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import changing_lake
import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from changing_lake import ChangingLake
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.expressions import EqualTo, IsNull
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.manifest import DataFile
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.table.sorting import NullOrder, SortDirection, SortField, SortOrder
from pyiceberg.transforms import (
    BucketTransform,
    DayTransform,
    HourTransform,
    IdentityTransform,
    MonthTransform,
    TruncateTransform,
    VoidTransform,
    YearTransform,
)
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    NestedField,
    StringType,
    StructType,
    TimestampType,
    TimestamptzType,
)
from pyspark.errors import StreamingQueryException
from servers import s3a
from servers.iceberg import planned_by_java
from servers.s3 import ACCESS_KEY, SECRET, S3Server, running_s3
from spark_stage import FILES_ARE_WRITTEN_BY, Killer, Source, run_to_end

from epochal.coordinator.journal import read_state
from epochal.errors import Misconfigured, RowRejected
from epochal.kit.engine_files import Dictionaries
from epochal.logs import checkpoint_log, open_log
from epochal.sinks.files import Files, read_epochs
from epochal.sinks.iceberg import Iceberg
from epochal.sinks.iceberg.engine_job import ICEBERG, EngineJob
from epochal.spark import engine_write
from epochal.spark.driver_write import DriverWrites
from epochal.spark.pipeline import Pipeline
from epochal.terms import (
    JOB_PARTITION,
    EpochNumber,
    Generation,
    Handle,
    Identity,
    SinkName,
    Uid,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

STEPS = ("claimed", "begun", "prepared", "rehearsed", "gated", "decided", "committed f", "settled")
IDENTITY = Identity(
    pipeline="plain", uid=Uid("abcdefgh2345"), sink=SinkName("f"), generation=Generation(0)
)
BY_TASKS = 1 << 30
"""As `file_bytes_max`: files are then written by tasks."""
LONG_TEXT = "ß" * 3000
DICTIONARY_OF = "write.parquet.dict-encoding-enabled.column."
ORDERS = Schema(NestedField(1, "id", LongType()), NestedField(2, "v", StringType()))
WIDE = Schema(
    NestedField(1, "id", LongType(), required=True),
    NestedField(2, "small", IntegerType()),
    NestedField(3, "single", FloatType()),
    NestedField(4, "double", DoubleType()),
    NestedField(5, "price", DecimalType(9, 2)),
    NestedField(6, "wide", DecimalType(38, 10)),
    NestedField(7, "a title, with (signs)", StringType()),
    NestedField(8, "bytes", BinaryType()),
    NestedField(9, "paid", BooleanType()),
    NestedField(10, "at", TimestamptzType()),
    NestedField(11, "local_at", TimestampType()),
    NestedField(12, "day", DateType()),
    NestedField(
        13,
        "pair",
        StructType(
            NestedField(14, "x", LongType(), required=True),
            NestedField(15, "y", StructType(NestedField(16, "z", StringType()))),
        ),
    ),
    NestedField(17, "never given", StringType()),
)
ROWS = (
    "id",
    "cast(id % 7 as tinyint) small",
    "if(id % 5 = 0, null, cast(id as float)) single",
    "if(id = 11, double('NaN'), id / 7) double",
    "cast(id / 3 as decimal(7, 1)) price",
    "cast(id as decimal(38, 10)) wide",
    "case when id % 11 = 0 then null when id % 11 = 1 then '' when id % 11 = 2 then 'v'"
    " when id % 11 = 3 then '__HIVE_DEFAULT_PARTITION__' when id % 11 = 4 then 'a/b=c%20 ü'"
    " when id % 11 = 6 then concat('a', char(0), 'b')"
    f" when id % 11 = 5 then concat('{LONG_TEXT}', id % 2) else concat('t', id % 3) end"
    " `a title, with (signs)`",
    "cast(concat('b', id) as binary) bytes",
    "id % 2 = 0 paid",
    "timestamp_micros((id - 40) * 1799999999) at",
    "if(id % 6 = 0, null, cast(timestamp_micros((id - 40) * 40000000001) as timestamp_ntz))"
    " local_at",
    "date_from_unix_date(cast(id as int) * 20 - 300) day",
    "if(id % 3 = 0, null, named_struct('x', id, 'y', named_struct('z', nullif(id, 7)||''))) pair",
)
PARTITIONS: dict[str, list[tuple[str, Any]]] = {
    "none": [],
    "text": [("a title, with (signs)", IdentityTransform())],
    "hours": [("at", HourTransform()), ("local_at", HourTransform())],
    "days": [("at", DayTransform()), ("local_at", DayTransform()), ("day", DayTransform())],
    "months": [("at", MonthTransform()), ("day", MonthTransform())],
    "years": [("at", YearTransform()), ("local_at", YearTransform())],
    "same": [("small", IdentityTransform()), ("paid", IdentityTransform())],
    "instants": [("at", IdentityTransform()), ("local_at", IdentityTransform())],
    "cut": [("a title, with (signs)", TruncateTransform(2)), ("small", TruncateTransform(3))],
    "null": [("never given", IdentityTransform()), ("paid", VoidTransform())],
}


class Lake:
    def __init__(self, folder: Path, **properties: str) -> None:
        self.properties = {
            "type": "sql",
            "uri": f"sqlite:///{folder}/catalog.db",
            "warehouse": f"file://{folder}/warehouse",
            **properties,
        }
        self.catalog: Catalog = load_catalog("lake", **self.properties)
        self.catalog.create_namespace("shop")
        self.folder = folder

    def table(self, name: str, schema: Schema = ORDERS, **options: Any) -> Table:
        return self.catalog.create_table(f"shop.{name}", schema=schema, **options)

    def sink(self, table: str, **options: Any) -> Iceberg:
        return Iceberg(f"lake.shop.{table}", properties=self.properties, **options)

    def ids(self, name: str) -> list[int]:
        return sorted(self.load(name).scan().to_arrow()["id"].to_pylist())

    def load(self, name: str) -> Table:
        return self.catalog.load_table(f"shop.{name}")

    def files(self, name: str) -> list[DataFile]:
        return [task.file for task in self.load(name).scan().plan_files()]

    def is_by_job(self, name: str) -> bool:
        """Whether all files of a table are those of jobs of Spark's own writer."""
        handles = [Handle.parse(file.file_path.split("/")[-2]) for file in self.files(name)]
        return bool(handles) and {one and one.partition for one in handles} == {JOB_PARTITION}

    def stray(self, name: str) -> list[str]:
        """Files and folders of ours that the table does not need."""
        table = self.load(name)
        ours = Path(table.location().removeprefix("file://")) / "data" / "epochal"
        used = {file.file_path.removeprefix("file://") for file in self.files(name)}
        there = [path for path in ours.rglob("*") if path.is_file()]
        jobs = list(ours.glob("jobs/*"))
        return [str(path) for path in [*there, *jobs] if str(path) not in used]


@pytest.fixture
def lake(tmp_path: Path) -> Iterator[Lake]:
    lake = Lake(tmp_path)
    yield lake
    lake.catalog.close()


@pytest.fixture(autouse=True)
def few_rows_are_written_by_jobs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DriverWrites, "expected", lambda *_: None)


@pytest.fixture
def has_runtime(spark: SparkSession) -> bool:
    return engine_write.SessionWriter(spark).ability("iceberg", "/tmp").granted


def spec_of(table: Schema, fields: list[tuple[str, Any]]) -> PartitionSpec:
    return PartitionSpec(
        *(
            PartitionField(table.find_field(name).field_id, 1000 + at, transform, f"p{at}")
            for at, (name, transform) in enumerate(fields)
        )
    )


_NAN = WIDE.find_field("double").field_id


def about(file: DataFile) -> tuple[Any, ...]:
    """
    What readers go by: which files they open, and which they skip. Arrow passes over NaN, and
    parquet-java does not: then there are no bounds.
    """
    return (
        str([file.partition[at] for at in range(len(file.partition))]),
        file.record_count,
        *(
            sorted((number, bound) for number, bound in (bounds or {}).items() if number != _NAN)
            for bounds in (file.lower_bounds, file.upper_bounds)
        ),
    )


@pytest.mark.compat
def test_files_of_spark_are_described_like_those_of_tasks(
    spark: SparkSession, lake: Lake, has_runtime: bool
) -> None:
    """In whatever zone the session is: partitions, bounds, rows and fingerprints are equal."""
    frame = spark.range(120, numPartitions=1).selectExpr(*ROWS)
    zone = spark.conf.get("spark.sql.session.timeZone")
    for kind, fields in PARTITIONS.items():
        found = {}
        for way, (writer, options) in {
            "default": (FILES_ARE_WRITTEN_BY, {}),
            "tasks": ("tasks", {"file_bytes_max": BY_TASKS}),
        }.items():
            name = f"{kind}_{way}".lower()
            lake.table(name, WIDE, partition_spec=spec_of(WIDE, fields))
            checkpoint = lake.folder / name
            try:
                spark.conf.set("spark.sql.session.timeZone", "Asia/Kathmandu")
                pipeline = Pipeline(name, [lake.sink(name, name="f", **options)])
                pipeline.write(frame, run="once", checkpoint=checkpoint)
            finally:
                spark.conf.set("spark.sql.session.timeZone", str(zone))
            state = read_state(open_log(f"{checkpoint}/epochal/runs/once/log"))
            assert state.sinks["f"]["writer"].startswith(writer)
            assert lake.is_by_job(name) == (writer == "Spark")
            assert lake.stray(name) == []
            rows = lake.load(name).scan().to_arrow().sort_by("id").to_pylist()
            described = sorted(map(about, lake.files(name)), key=repr)
            if has_runtime:  # which cuts bounds elsewhere, and has those of partition columns
                described = [one[:2] for one in described]
            found[way] = (state.totals["f"].fingerprint, described, str(rows))
        assert found["default"] == found["tasks"], kind
        assert len(found["default"][1]) > 1 or kind in ("none", "null")


@pytest.mark.compat
def test_readers_find_rows_by_bounds_and_partitions_of_files_of_spark(
    spark: SparkSession, lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns of files are found by number, also once they are renamed and others are added."""
    title = "a title, with (signs)"
    spec = spec_of(WIDE, [(title, IdentityTransform()), ("day", YearTransform())])
    table = lake.table("wide", WIDE, partition_spec=spec)
    frame = spark.range(0, 120, 1, 3).selectExpr(*ROWS)
    Pipeline("wide", [lake.sink("wide")]).write(frame, run="a", checkpoint=lake.folder / "c")
    with table.update_schema() as update:
        update.rename_column("double", "ratio")
        update.add_column("later", StringType())
    table = lake.load("wide")
    for condition, expected in {
        EqualTo("id", 17): [17],
        EqualTo(title, ""): [n for n in range(120) if n % 11 == 1],
        IsNull(title): [n for n in range(120) if n % 11 == 0],
        EqualTo(title, LONG_TEXT + "1"): [n for n in range(120) if n % 11 == 5 and n % 2],
        EqualTo("day", dt.date(1970, 1, 1)): [15],
        EqualTo("ratio", 2.0): [14],
    }.items():
        found = table.scan(row_filter=condition).to_arrow()
        assert sorted(found["id"].to_pylist()) == expected, condition
    monkeypatch.setenv("POLARS_ICEBERG_PLANNER", "pyiceberg")
    rows = pl.scan_iceberg(table).collect()
    assert sorted(rows["id"].to_list()) == list(range(120))
    assert rows["ratio"].is_nan().sum() == 1
    arrow = table.scan(selected_fields=("id", "pair")).to_arrow()
    counted = duckdb.query("SELECT count(*), count(pair), sum(pair.x) FROM arrow").fetchall()
    with_pair = [n for n in range(120) if n % 3]
    assert counted == [(120, len(with_pair), sum(with_pair))], arrow.schema


@pytest.mark.compat
def test_rows_are_in_the_order_of_the_table_in_each_file(spark: SparkSession, lake: Lake) -> None:
    order = SortOrder(
        SortField(2, TruncateTransform(5), SortDirection.DESC, NullOrder.NULLS_LAST),
        SortField(1, IdentityTransform(), SortDirection.ASC, NullOrder.NULLS_FIRST),
    )
    spec = PartitionSpec(PartitionField(3, 1000, IdentityTransform(), "p"))
    schema = Schema(
        NestedField(1, "id", LongType()),
        NestedField(2, "n", IntegerType()),
        NestedField(3, "p", StringType()),
    )
    lake.table("ordered", schema, partition_spec=spec, sort_order=order)
    lake.table("whole", schema, sort_order=order)
    frame = spark.range(0, 400, 1, 4).selectExpr(
        "pmod(hash(id), 997) id", "if(id % 9 = 0, null, cast(id % 40 as int)) n", "'p' || id % 2 p"
    )
    for name in ("ordered", "whole"):
        Pipeline(name, [lake.sink(name)]).write(frame, run="a", checkpoint=lake.folder / name)
        assert lake.is_by_job(name) == (FILES_ARE_WRITTEN_BY == "Spark")
        for file in lake.files(name):
            assert file.sort_order_id == 1
            rows = pq.ParquetFile(file.file_path.removeprefix("file://")).read().to_pylist()
            keys = [
                (r["n"] is None, -(r["n"] or 0) // 5 if 0 else -((r["n"] or 0) // 5), r["id"])
                for r in rows
            ]
            assert len(rows) > 20
            assert keys == sorted(keys)


@pytest.mark.parametrize(
    ("properties", "codec"), [({}, "zstd"), ({"write.parquet.compression-codec": "lz4"}, "lz4")]
)
def test_icebergs_writer_is_given_the_codec_of_the_table_and_zstd_where_it_has_none(
    lake: Lake, tmp_path: Path, properties: dict[str, str], codec: str
) -> None:
    """By itself it would take gzip."""
    metadata = lake.table("orders", properties=properties).metadata
    job = EngineJob(metadata=metadata, rows=schema_to_pyarrow(ORDERS), form=ICEBERG)
    asked = job.asked(IDENTITY.job_handle(EpochNumber(0), 1), f"file://{tmp_path}", Dictionaries())
    assert json.loads(asked.table)["properties"]["write.parquet.compression-codec"] == codec


def test_icebergs_writer_begins_no_dictionary_that_saved_nothing_before(
    lake: Lake, tmp_path: Path
) -> None:
    """But where the table's own properties say so. Columns within others have other paths."""
    asked_for = {f"{DICTIONARY_OF}v": "true"}
    metadata = lake.table("orders", properties=asked_for).metadata
    rows = pa.table({"id": range(20_000), "v": map(str, range(20_000)), "few": [1] * 20_000})
    nested = rows.append_column("pair", pa.array([{"id": n} for n in range(20_000)]))
    pq.write_table(nested, tmp_path / "a.parquet", use_dictionary=["few"])
    dictionaries = Dictionaries()
    dictionaries.footer(tmp_path / "a.parquet")
    job = EngineJob(metadata=metadata, rows=schema_to_pyarrow(ORDERS), form=ICEBERG)
    asked = job.asked(IDENTITY.job_handle(EpochNumber(0), 1), f"file://{tmp_path}", dictionaries)
    properties = json.loads(asked.table)["properties"]
    found = {key: value for key, value in properties.items() if key.startswith(DICTIONARY_OF)}
    assert found == {f"{DICTIONARY_OF}id": "false", f"{DICTIONARY_OF}v": "true"}


@pytest.mark.compat
def test_icebergs_writer_knows_the_property_of_dictionaries(
    spark: SparkSession, has_runtime: bool
) -> None:
    if has_runtime:
        jvm: Any = spark._jvm
        known = jvm.org.apache.iceberg.TableProperties.PARQUET_DICT_ENCODING_ENABLED_COLUMN_PREFIX
        assert known == DICTIONARY_OF


def test_lists_maps_and_buckets_are_written_by_tasks_without_icebergs_runtime(
    spark: SparkSession, lake: Lake, has_runtime: bool
) -> None:
    inner = StructType(NestedField(4, "n", LongType()))
    lists = Schema(
        NestedField(1, "id", LongType()),
        NestedField(2, "l", ListType(3, inner, element_required=False)),
        NestedField(5, "m", MapType(6, StringType(), 7, LongType(), value_required=False)),
    )
    lake.table("lists", lists)
    lake.table("buckets", ORDERS, partition_spec=spec_of(ORDERS, [("v", BucketTransform(4))]))
    frame = spark.range(0, 40, 1, 2).selectExpr(
        "id", "if(id = 3, null, array(named_struct('n', id), null)) l", "map('k', id) m"
    )
    numbers = spark.range(0, 40, 1, 2).selectExpr("id", "'v' || id v")
    for name, rows, because in (
        ("lists", frame, "column l"),
        ("buckets", numbers, "bucket[4] of v"),
    ):
        sink = lake.sink(name, name="f")
        (ability,) = [
            one
            for one in Pipeline(name, [sink]).check(rows).abilities["f"]
            if one.name == engine_write.ABILITY
        ]
        assert ability.granted == has_runtime, ability
        assert ("Iceberg's own writer" if has_runtime else because) in ability.because
        Pipeline(name, [sink]).write(rows, run="a", checkpoint=lake.folder / name)
        assert lake.is_by_job(name) == has_runtime
        assert lake.ids(name) == list(range(40))
    read = lake.load("lists").scan(row_filter=EqualTo("id", 5)).to_arrow().to_pylist()
    assert read == [{"id": 5, "l": [{"n": 5}, None], "m": [("k", 5)]}]


def test_check_says_what_writes_the_rows_and_why(
    source: Source, lake: Lake, has_runtime: bool
) -> None:
    lake.table("plain")
    lake.table(
        "other",
        Schema(*ORDERS.fields, NestedField(3, "s", StructType(NestedField(4, "x", LongType())))),
    )
    narrow = ["id", "v", "named_struct('x', 1) s"]
    for sink, is_by_engine, because in (
        (lake.sink("plain"), True, "own writer" if has_runtime else "is not on Spark's class path"),
        (lake.sink("plain", file_bytes_max=BY_TASKS), False, "file_bytes_max"),
        (lake.sink("other", select=narrow), False, "column s is struct<x: int32"),
    ):
        report = Pipeline("checked", [sink]).check(source.stream)
        (ability,) = [
            one for one in report.abilities[sink.name] if one.name == engine_write.ABILITY
        ]
        assert ability.granted == is_by_engine, ability
        assert because in ability.because


@pytest.fixture
def after_the_job(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Path], None]], None]:
    """Does something to the folder of each job, between its end and `gather`."""

    def set_up(then: Callable[[Path], None]) -> None:
        def write(frame: Any, asked: Any, *rest: Any, **options: Any) -> Any:
            written = real(frame, asked, *rest, **options)
            then(Path(asked.folder.removeprefix("file://")))
            return written

        real = engine_write.write
        monkeypatch.setattr(engine_write, "write", write)

    return set_up


@pytest.mark.compat
def test_a_table_has_every_row_once_wherever_the_driver_dies_and_late_tasks_write(
    source: Source, checkpoint: Path, killer: Killer, lake: Lake, after_the_job: Any
) -> None:
    """Also where tasks leave whole files beside those that count, as Iceberg's writer does."""
    lake.table("orders", partition_spec=spec_of(ORDERS, [("id", TruncateTransform(4))]))
    files = lake.folder / "files"
    late_files: list[Path] = []

    def write_late(folder: Path) -> None:
        if folder.parent.name != "jobs":
            return
        late = folder / "_temporary/0/_temporary/attempt_7/part-00000-late.snappy.parquet"
        late.parent.mkdir(parents=True)
        pq.write_table(pa.table({"id": [-1], "v": ["late"]}), late)
        late_files.append(late)

    after_the_job(write_late)
    sinks = [lake.sink("orders", name="f"), Files(files, name="other")]
    pipeline = Pipeline("lake", sinks, watch=killer.watch)
    deaths = [(step, None if step == "claimed" else at) for at, step in enumerate(STEPS)]
    source.add_numbers(epochs=len(deaths) + 1)
    for killer.at in deaths:
        assert killer.run(pipeline, source.stream, checkpoint), f"never reached {killer.at}"
    assert not killer.run(pipeline, source.stream, checkpoint)
    whole = sorted(read_epochs(files).to_table()["id"].to_pylist())
    assert lake.ids("orders") == whole == source.ids
    assert lake.is_by_job("orders") == (FILES_ARE_WRITTEN_BY == "Spark")
    for late in late_files:
        late.parent.mkdir(parents=True, exist_ok=True)
        late.write_bytes(b"later still")
    run_to_end(pipeline, source.stream, checkpoint)
    assert lake.stray("orders") == []
    assert lake.ids("orders") == source.ids


@pytest.fixture
def bucket(spark: SparkSession, has_runtime: bool) -> Iterator[S3Server]:
    """
    A store that Spark reaches, too, where it has the classes for it. Elsewhere its settings stay as
    they are: files of tests share its context, and one asks who has set them.
    """
    with running_s3() as server:
        for name, value in s3a.settings(server).items() if has_runtime else ():
            conf: Any = spark.sparkContext._jsc.hadoopConfiguration()
            conf.set(name.removeprefix("spark.hadoop."), value)
        yield server


@pytest.mark.compat
def test_a_table_in_a_store_has_every_row_once_wherever_the_driver_dies(
    bucket: S3Server, source: Source, checkpoint: Path, killer: Killer, has_runtime: bool
) -> None:
    """What is prepared lies in the bucket, is in no snapshot, and is found there by its name."""
    in_store = {
        "warehouse": "s3://lake",
        "s3.endpoint": bucket.url,
        "s3.region": "us-east-1",
        "s3.access-key-id": ACCESS_KEY,
        "s3.secret-access-key": SECRET,
    }
    lake = Lake(source.folder.parent, **in_store)
    lake.table("orders", partition_spec=spec_of(ORDERS, [("id", TruncateTransform(4))]))
    pipeline = Pipeline("store", [lake.sink("orders", name="f")], watch=killer.watch)
    deaths = ("begun", "prepared", "rehearsed", "decided", "committed f")
    source.add_numbers(epochs=len(deaths) + 1)
    for epoch, step in enumerate(deaths):
        killer.at = (step, epoch)
        assert killer.run(pipeline, source.stream, checkpoint), f"never reached {killer.at}"
        handles = [Handle.parse(key.split("/")[0]) for key in prepared_in(bucket, lake)]
        assert (epoch in [one.epoch for one in handles if one]) == (step != "begun")
        seen = epoch + 1 if step == "committed f" else epoch
        assert lake.ids("orders") == source.ids[: seen * 10]
    assert not killer.run(pipeline, source.stream, checkpoint)
    assert lake.ids("orders") == source.ids
    top = f"{lake.load('orders').location()}/data/epochal/"
    used = sorted(file.file_path.removeprefix(top) for file in lake.files("orders"))
    assert prepared_in(bucket, lake) == used
    writer = read_state(checkpoint_log(checkpoint)).sinks["f"]["writer"]
    if has_runtime:
        location = lake.load("orders").metadata_location.replace("s3://", "s3a://")
        read = source.spark.read.format("iceberg").load(location)
        assert sorted(row.id for row in read.collect()) == source.ids
        handles = [Handle.parse(key.split("/")[0]) for key in used]
        assert {one and one.partition for one in handles} == {JOB_PARTITION}
        assert writer == "Spark"
    else:
        assert writer.startswith("tasks: ")
    lake.catalog.close()


def prepared_in(bucket: S3Server, lake: Lake) -> list[str]:
    """Our objects below the table, but for those that stand for folders."""
    folder = f"{lake.load('orders').location().removeprefix('s3://lake/')}/data/epochal/"
    listed = bucket.client.list_objects_v2(Bucket="lake", Prefix=folder).get("Contents", ())
    keys = sorted(one["Key"].removeprefix(folder) for one in listed)
    return [key for key in keys if key and not key.endswith("/")]


def test_what_a_killed_driver_leaves_is_found_by_its_name_and_removed(
    source: Source, checkpoint: Path, killer: Killer, lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies in the middle of a job: the marker is there before the first file."""
    lake.table("orders")
    source.add_numbers(epochs=1)
    pipeline = Pipeline("lake", [lake.sink("orders", name="f")], watch=killer.watch)
    left: list[str] = []

    def die(*arguments: Any, **options: Any) -> Any:
        real(*arguments, **options)
        left.extend(lake.stray("orders"))
        killer.is_dead = True
        raise KeyboardInterrupt

    real = engine_write.write
    monkeypatch.setattr(engine_write, "write", die)
    assert killer.run(pipeline, source.stream, checkpoint)
    monkeypatch.setattr(engine_write, "write", real)
    named = {Handle.parse(one) for path in left for one in Path(path).parts} - {None}
    assert len(named) == 1
    assert any(path.endswith(".parquet") for path in left)
    assert all("jobs" in path or "in-doubt" in path for path in left)
    assert lake.ids("orders") == []
    assert not killer.run(pipeline, source.stream, checkpoint)
    assert lake.ids("orders") == source.ids
    assert lake.stray("orders") == []


@pytest.mark.compat
@pytest.mark.parametrize("mode", ["append", "upsert", "overwrite_partitions"])
def test_every_mode_takes_files_of_spark(
    source: Source, checkpoint: Path, killer: Killer, lake: Lake, mode: str
) -> None:
    """And an attempt whose files are lost after the decision is written again, whole."""
    lake.table("orders", partition_spec=spec_of(ORDERS, [("id", TruncateTransform(10))]))
    keys = {"keys": ["id"]} if mode == "upsert" else {}
    sink = lake.sink("orders", name="f", mode=mode, **keys)
    pipeline = Pipeline("modes", [sink], watch=killer.watch)
    source.add(*([{"id": n, "v": f"{epoch}"} for n in range(5, 15)] for epoch in range(3)))
    source.add([])
    source.add([{"id": n, "v": "last"} for n in range(8, 10)])
    df = source.stream.repartition(2, "id")
    killer.at = ("decided", 1)
    assert killer.run(pipeline, df, checkpoint)
    data = Path(lake.load("orders").location().removeprefix("file://")) / "data"
    min((data / "epochal").glob("epochal-*-e1-*/*")).unlink()
    assert not killer.run(pipeline, df, checkpoint)
    rows = lake.load("orders").scan().to_arrow().to_pylist()
    found = sorted((row["id"], row["v"]) for row in rows)
    last = [(8, "last"), (9, "last")]
    expected = {
        "append": [(n, str(e)) for n in range(5, 15) for e in range(3)] + last,
        "upsert": [(n, "2") for n in range(5, 15) if n not in (8, 9)] + last,
        "overwrite_partitions": [(n, "2") for n in range(10, 15)] + last,
    }
    assert found == sorted(expected[mode])
    if mode != "upsert":
        assert lake.is_by_job("orders") == (FILES_ARE_WRITTEN_BY == "Spark")
    assert lake.stray("orders") == [] or mode != "append"


@pytest.mark.compat
def test_a_null_in_a_required_column_is_refused(
    source: Source, checkpoint: Path, lake: Lake
) -> None:
    required = Schema(
        NestedField(1, "id", LongType()), NestedField(2, "v", StringType(), required=True)
    )
    lake.table("orders", required)
    source.add([{"id": 1, "v": "a"}])
    pipeline = Pipeline("nulls", [lake.sink("orders")])
    run_to_end(pipeline, source.stream, checkpoint)
    source.add([{"id": 2, "v": "b"}, {"id": 3, "v": None}])
    with pytest.raises(StreamingQueryException):
        run_to_end(pipeline, source.stream, checkpoint)
    assert isinstance(pipeline.error, RowRejected), pipeline.error
    assert "column v is required" in pipeline.error.message
    assert lake.ids("orders") == [1]
    assert lake.stray("orders") == []


@pytest.mark.compat
def test_a_null_inside_of_a_column_where_there_may_be_none_is_refused(
    spark: SparkSession, lake: Lake
) -> None:
    inner = StructType(NestedField(4, "x", LongType(), required=True))
    kinds = {
        "pair": (inner, "if(id = 5, null, named_struct('x', nullif(id, {bad})))"),
        "deep": (
            StructType(NestedField(3, "inner", inner)),
            "named_struct('inner', if(id = 5, null, named_struct('x', nullif(id, {bad}))))",
        ),
        "list": (ListType(3, LongType(), element_required=True), "array(1, nullif(id, {bad}))"),
        "map": (
            MapType(3, StringType(), 4, LongType(), value_required=True),
            "map('a', nullif(id, {bad}))",
        ),
    }
    for name, (kind, sql) in kinds.items():
        lake.table(name, Schema(NestedField(1, "id", LongType()), NestedField(2, "v", kind)))
        pipeline = Pipeline(name, [lake.sink(name)])
        bad, good = (
            spark.range(9).selectExpr("id", f"{sql.format(bad=number)} v") for number in (7, -1)
        )
        with pytest.raises(RowRejected):
            pipeline.write(bad, run="a", checkpoint=lake.folder / name)
        pipeline.write(good, run="a", checkpoint=lake.folder / name)
        assert lake.ids(name) == list(range(9))


def test_files_without_the_numbers_of_their_columns_are_refused(
    source: Source, checkpoint: Path, lake: Lake, has_runtime: bool
) -> None:
    if has_runtime:
        pytest.skip("Iceberg's own writer always writes them")
    lake.table("orders")
    source.add_numbers(epochs=1)
    setting = "spark.sql.parquet.fieldId.write.enabled"
    source.spark.conf.set(setting, "false")
    pipeline = Pipeline("numbers", [lake.sink("orders")])
    try:
        with pytest.raises(StreamingQueryException):
            run_to_end(pipeline, source.stream, checkpoint)
    finally:
        source.spark.conf.unset(setting)
    assert isinstance(pipeline.error, Misconfigured), pipeline.error
    assert setting in pipeline.error.hint
    assert lake.stray("orders") == []
    run_to_end(pipeline, source.stream, checkpoint)
    assert lake.ids("orders") == source.ids
    writer = read_state(checkpoint_log(checkpoint)).sinks["iceberg:lake.shop.orders"]["writer"]
    assert writer == "Spark"


class Changes:
    """What others do to a table. Rows of `changing_lake.SCHEMA` always have a place in it."""

    def __init__(self, lake: Lake, name: str, chance: Random, *, has_runtime: bool) -> None:
        self._lake, self._name, self._chance = lake, name, chance
        self._has_runtime = has_runtime
        self._numbers = count(1)
        self.forgotten: set[int] = set()
        """Rows whose area went with its column."""

    def verbs(self) -> list[Callable[[], None]]:
        return [self.add, self.drop, self.rename, self.widen, self.again, self.split, self.join]

    def add(self) -> None:
        kind = self._chance.choice([StringType(), IntegerType(), LongType()])
        with self._table().update_schema() as schema:
            schema.add_column(f"added{next(self._numbers)}", kind)

    def drop(self) -> None:
        for column in self._added():
            self._join_by(column)
            with self._table().update_schema() as schema:
                schema.delete_column(column.name)

    def rename(self) -> None:
        for column in self._added():
            with self._table().update_schema() as schema:
                schema.rename_column(column.name, f"added{next(self._numbers)}")

    def widen(self) -> None:
        if isinstance(self._table().schema().find_type("quantity"), IntegerType):
            with self._table().update_schema() as schema:
                schema.update_column("quantity", LongType())

    def again(self) -> None:
        """Another column of the same name."""
        self.forgotten |= set(self._lake.ids(self._name))
        self._join_by(self._table().schema().find_field("area"))
        with self._table().update_schema() as schema:
            schema.delete_column("area")
        with self._table().update_schema() as schema:
            schema.add_column("area", StringType())

    def split(self) -> None:
        table = self._table()
        column = table.schema().find_field(self._chance.choice(["id", "area", "quantity"]))
        if any(one.source_id == column.field_id for one in table.spec().fields):
            return
        transforms = [IdentityTransform(), TruncateTransform(3)]
        transforms += [BucketTransform(3)] if self._has_runtime else []
        with table.update_spec() as spec:
            name = f"part{next(self._numbers)}"
            spec.add_field(column.name, self._chance.choice(transforms), name)

    def join(self) -> None:
        for one in self._table().spec().fields[:1]:
            with self._table().update_spec() as spec:
                spec.remove_field(one.name)

    def _join_by(self, column: NestedField) -> None:
        for one in self._table().spec().fields:
            if one.source_id == column.field_id:
                with self._table().update_spec() as spec:
                    spec.remove_field(one.name)

    def _added(self) -> list[NestedField]:
        """One column that rows don't have, if there is one."""
        fields = self._table().schema().fields
        added = [one for one in fields if one.name.startswith("added")]
        return [self._chance.choice(added)] if added else []

    def _table(self) -> Table:
        return self._lake.load(self._name)


@pytest.mark.compat
@pytest.mark.proof
@pytest.mark.parametrize("seed", range(4))
def test_whatever_changes_between_two_steps_iceberg_itself_sees_every_row_once_with_its_values(
    source: Source, killer: Killer, lake: Lake, has_runtime: bool, seed: int
) -> None:
    """By its reader for Spark, where that is there; else by the files that its library plans."""
    columns = [
        NestedField(1, "id", LongType()),
        NestedField(2, "v", StringType()),
        NestedField(3, "area", StringType()),
        NestedField(4, "quantity", IntegerType()),
    ]
    lake.table("changing", Schema(*columns))
    source.schema = changing_lake.SCHEMA
    chance = Random(seed)
    changes = Changes(lake, "changing", chance, has_runtime=has_runtime)
    sink = lake.sink("changing", name="f")
    driver = ChangingLake(source, lake.folder / "checkpoint", killer, sink, changes.verbs(), chance)
    for rows in driver.epochs(6):
        table = lake.load("changing")
        if has_runtime:
            read = source.spark.read.format("iceberg").load(table.metadata_location)
            found = [one.asDict() for one in read.collect()]
        else:
            found = table.scan().to_arrow().to_pylist()
        assert sorted(one["id"] for one in found) == [one["id"] for one in rows], driver.done
        for one in found:
            wanted = changing_lake.row(one["id"])
            if one["id"] in changes.forgotten and one["area"] is None:
                wanted["area"] = None
            assert {name: one[name] for name in wanted} == wanted, driver.done
    assert driver.done
    assert driver.deaths
    planned = {file.file_path for file in lake.files("changing")}
    assert {one[1] for one in planned_by_java(table.metadata_location)} == planned
    assert lake.is_by_job("changing") == (FILES_ARE_WRITTEN_BY == "Spark")
    assert lake.stray("changing") == []
