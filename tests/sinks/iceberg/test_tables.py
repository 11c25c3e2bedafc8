"""Types, partitions, sort orders, schemas that differ: read back by readers that are not ours."""

from __future__ import annotations

import datetime as dt
import uuid
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
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
    FixedType,
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
    TimeType,
    UUIDType,
)

from epochal.errors import Misconfigured, RowRejected
from epochal.sinks.iceberg.check import check_table
from epochal.sinks.iceberg.partitions import split
from epochal.terms import EpochNumber

UTC = dt.UTC
INNER = StructType(
    NestedField(101, "a", LongType()),
    NestedField(102, "when", TimestamptzType()),
)
EVERYTHING = Schema(
    NestedField(1, "id", LongType(), required=True),
    NestedField(2, "flag", BooleanType()),
    NestedField(3, "small", IntegerType()),
    NestedField(4, "single", FloatType()),
    NestedField(5, "double", DoubleType()),
    NestedField(6, "price", DecimalType(20, 4)),
    NestedField(7, "big", DecimalType(38, 10)),
    NestedField(8, "day", DateType()),
    NestedField(9, "time", TimeType()),
    NestedField(10, "at", TimestamptzType()),
    NestedField(11, "local", TimestampType()),
    NestedField(12, "text", StringType()),
    NestedField(13, "raw", BinaryType()),
    NestedField(14, "four", FixedType(4)),
    NestedField(15, "key", UUIDType()),
    NestedField(16, "inner", INNER),
    NestedField(17, "list", ListType(171, INNER, element_required=False)),
    NestedField(18, "map", MapType(181, StringType(), 182, LongType(), value_required=False)),
    NestedField(19, "absent", StringType()),
)
WHEN = dt.datetime(2026, 3, 29, 1, 30, 0, 123456, UTC)
SPARK_INNER = pa.struct([("when", pa.timestamp("us", "Europe/Berlin")), ("a", pa.int32())])
SPARK = pa.schema(
    [
        ("id", pa.int64()),
        ("flag", pa.bool_()),
        ("small", pa.int8()),
        ("single", pa.float32()),
        ("double", pa.float64()),
        ("price", pa.decimal128(18, 2)),
        ("big", pa.decimal128(38, 10)),
        ("day", pa.date32()),
        ("time", pa.time64("us")),
        ("at", pa.timestamp("us", "Europe/Berlin")),
        ("local", pa.timestamp("ns")),
        ("text", pa.large_string()),
        ("raw", pa.binary()),
        ("four", pa.binary()),
        ("key", pa.string()),
        ("inner", SPARK_INNER),
        ("list", pa.list_(SPARK_INNER)),
        ("map", pa.map_(pa.string(), pa.int64())),
    ]
)
KEY = uuid.UUID("12345678-1234-5678-1234-567812345678")
ROW = {
    "id": 1,
    "flag": True,
    "small": -7,
    "single": 0.5,
    "double": float("inf"),
    "price": Decimal("-12345.67"),
    "big": Decimal("1234567890123456789012345678.0123456789"),
    "day": dt.date(1969, 12, 31),
    "time": dt.time(23, 59, 59, 999999),
    "at": WHEN,
    "local": dt.datetime(1970, 1, 1, 0, 0, 0, 1),  # noqa: DTZ001  a local time has no zone
    "text": "grüß 世界",
    "raw": b"\x00\xff",
    "four": b"abcd",
    "key": str(KEY),
    "inner": {"when": WHEN, "a": 5},
    "list": [{"when": None, "a": 1}, None],
    "map": [("k", 1), ("n", None)],
}


def test_every_type_arrives_as_it_was_with_nulls(warehouse, live):
    name = warehouse.create(EVERYTHING)
    nothing = {**dict.fromkeys(SPARK.names), "id": 2}
    live(warehouse.sink(name)).write(0, pa.Table.from_pylist([ROW, nothing], schema=SPARK))
    first, second = sorted(warehouse.rows(name), key=lambda row: row["id"])
    expected = {**ROW, "price": Decimal("-12345.6700"), "key": KEY, "absent": None}
    expected["inner"] = {"a": 5, "when": WHEN}
    expected["list"] = [{"a": 1, "when": None}, None]
    assert first == expected
    # pyiceberg shows a null list of structs as an empty one; the file has it right.
    (task,) = warehouse.load(name).scan().plan_files()
    stored = pq.read_table(task.file.file_path.removeprefix("file://"), columns=["list"])
    assert stored.column("list").to_pylist()[1] is None
    assert {**second, "list": None} == {**dict.fromkeys(first), "id": 2}


def test_upsert_refuses_columns_that_would_not_survive_a_rewrite(warehouse, live):
    life = live(warehouse.sink(warehouse.create(EVERYTHING), mode="upsert", keys="id"))
    with pytest.raises(Misconfigured, match="list has structs in a list or map"):
        life.committer.check(None)


def test_duckdb_reads_what_was_committed(warehouse, live, some):
    """Through the files that the table's metadata names: its Iceberg extension is a download."""
    name = warehouse.create()
    life = live(warehouse.sink(name))
    life.write(0, some(1, 2), some(3))
    life.prepare(some(99), 1)
    files = [task.file.file_path for task in warehouse.load(name).scan().plan_files()]
    paths = [path.removeprefix("file://") for path in files]
    with duckdb.connect() as connection:
        rows = connection.execute(
            "SELECT id, name FROM read_parquet(?) ORDER BY id", [paths]
        ).fetchall()
    assert rows == [(1, "row 1"), (2, "row 2"), (3, "row 3")]


STAMPS = [
    dt.datetime(1969, 12, 31, 23, 59, 59, 999999, UTC),
    dt.datetime(2026, 1, 1, tzinfo=UTC),
    dt.datetime(2026, 1, 31, 12, tzinfo=UTC),
    dt.datetime(2024, 2, 29, 5, 6, 7, tzinfo=UTC),
    None,
]
PARTED = Schema(
    NestedField(1, "id", LongType()),
    NestedField(2, "at", TimestamptzType()),
    NestedField(3, "day", DateType()),
    NestedField(4, "name", StringType()),
    NestedField(5, "price", DecimalType(9, 2)),
)


def parted() -> pa.Table:
    return pa.table(
        {
            "id": pa.array([-25, 3, 17, 100, None], pa.int64()),
            "at": pa.array(STAMPS, pa.timestamp("us", "UTC")),
            "day": pa.array([stamp and stamp.date() for stamp in STAMPS], pa.date32()),
            "name": pa.array(["über", "a", "ab", "", None]),
            "price": pa.array([Decimal("-1.05"), Decimal("9.99"), None, Decimal("0.00"), None]),
        }
    ).cast(
        pa.schema(
            [
                *[("id", pa.int64()), ("at", pa.timestamp("us", "UTC"))],
                ("day", pa.date32()),
                ("name", pa.string()),
                ("price", pa.decimal128(9, 2)),
            ]
        )
    )


TRANSFORMS = [
    (1, IdentityTransform()),
    (1, BucketTransform(4)),
    (1, TruncateTransform(10)),
    (1, VoidTransform()),
    (2, DayTransform()),
    (2, HourTransform()),
    (2, MonthTransform()),
    (2, YearTransform()),
    (2, IdentityTransform()),
    (2, BucketTransform(3)),
    (3, MonthTransform()),
    (3, YearTransform()),
    (3, DayTransform()),
    (3, IdentityTransform()),
    (4, TruncateTransform(1)),
    (4, BucketTransform(8)),
    (4, IdentityTransform()),
    (5, IdentityTransform()),
    (5, TruncateTransform(50)),
    (5, BucketTransform(2)),
]


@pytest.mark.parametrize(("source", "transform"), TRANSFORMS, ids=str)
def test_partition_values_are_those_of_icebergs_own_transforms(source: int, transform: Any) -> None:
    spec = PartitionSpec(PartitionField(source, 1000, transform, "part"))
    rows = parted()
    kind = PARTED.find_field(source).field_type
    column = rows.column(PARTED.find_column_name(source))
    physical = column
    if pa.types.is_temporal(column.type):
        physical = column.cast(pa.int32() if pa.types.is_date(column.type) else pa.int64())
    apply = transform.transform(kind)
    expected = sorted((repr(apply(value)) for value in physical.to_pylist()), key=str)
    found = sorted(
        (repr(part[0]) for part, some in split(rows, spec, PARTED) for _ in range(some.num_rows)),
        key=str,
    )
    assert found == expected


def test_a_partitioned_table_is_read_back_by_its_partitions(warehouse, live):
    spec = PartitionSpec(
        PartitionField(2, 1000, DayTransform(), "by_day"),
        PartitionField(1, 1001, BucketTransform(2), "by_id"),
        PartitionField(2, 1002, HourTransform(), "by_hour"),
        PartitionField(5, 1003, IdentityTransform(), "by_price"),
    )
    name = warehouse.create(PARTED, spec)
    live(warehouse.sink(name)).write(0, parted(), parted())
    assert len(warehouse.rows(name)) == 10
    assert len(warehouse.rows(name, row_filter="at >= '2026-01-31T00:00:00+00:00'")) == 2
    assert len(warehouse.rows(name, row_filter="id = -25")) == 2
    (summary,) = warehouse.history(name)
    assert summary["added-data-files"] == "10"


def test_files_have_the_tables_sort_order(warehouse, live):
    order = SortOrder(
        SortField(2, IdentityTransform(), SortDirection.DESC, NullOrder.NULLS_LAST),
        SortField(1, IdentityTransform(), SortDirection.ASC, NullOrder.NULLS_FIRST),
    )
    name = warehouse.create(sort_order=order)
    rows = pa.table({"id": [3, None, 1, 2], "name": ["b", "b", None, "c"]})
    live(warehouse.sink(name)).write(0, rows)
    (task,) = warehouse.load(name).scan().plan_files()
    assert task.file.sort_order_id == 1
    there = pq.read_table(task.file.file_path.removeprefix("file://"))
    assert [(row["id"], row["name"]) for row in there.to_pylist()] == [
        (2, "c"),
        (None, "b"),
        (3, "b"),
        (1, None),
    ]


def test_large_tasks_write_several_files_within_their_memory(warehouse, live, some):
    name = warehouse.create()
    life = live(warehouse.sink(name, file_bytes_max=40_000, buffer_bytes_max=20_000))
    writer = life.writer(some(1).schema, 0)
    for first in range(0, 20_000, 500):
        for batch in some(*range(first, first + 500)).to_batches():
            writer.write(batch)
        assert writer._bytes <= 20_000
    receipt = writer.prepare()
    assert len(receipt.token["files"]) > 5
    life.committer.commit(EpochNumber(0), [receipt])
    assert warehouse.ids(name) == list(range(20_000))


def test_many_partitions_keep_few_files_open(warehouse, live):
    spec = PartitionSpec(PartitionField(1, 1000, IdentityTransform(), "by_id"))
    name = warehouse.create(spec=spec)
    life = live(warehouse.sink(name, open_files_max=3, buffer_bytes_max=2000))
    rows = pa.table({"id": pa.array([at % 10 for at in range(400)], pa.int64())})
    receipt = life.prepare(rows.append_column("name", pa.array(["x"] * 400)), 0)
    life.committer.commit(EpochNumber(0), [receipt])
    assert warehouse.ids(name) == sorted(at % 10 for at in range(400))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"id": pa.array([1]), "extra": pa.array([1])}, "column extra is not in the table"),
        ({"ID": pa.array([1])}, r"column ID is not in the table \(it has id\)"),
        ({"id": pa.array(["1"])}, "column id is string, and the table's is long"),
        ({"id": pa.array([1.5])}, "column id is double"),
        ({"id": pa.array([1], pa.uint64())}, "column id is uint64"),
        ({"name": pa.array([dt.timedelta(1)])}, "column name is duration"),
    ],
)
def test_rows_that_do_not_fit_are_refused_before_the_first(warehouse, live, rows, message):
    life = live(warehouse.sink(warehouse.create()))
    with pytest.raises(Misconfigured, match=message) as refused:
        life.committer.check(pa.table(rows).schema)
    assert refused.value.hint


def test_nested_fields_are_compared_by_name(warehouse, live):
    life = live(warehouse.sink(warehouse.create(EVERYTHING)))
    wrong = pa.struct([("a", pa.string()), ("b", pa.int64())])
    schema = pa.schema([("id", pa.int64()), ("inner", wrong), ("list", pa.list_(wrong))])
    with pytest.raises(Misconfigured) as refused:
        life.committer.check(schema)
    for message in ("column inner.a is string", "column inner.b is not in", "column list[].a is"):
        assert message in refused.value.message


def test_a_null_in_a_required_column_is_refused(warehouse, live):
    name = warehouse.create(Schema(NestedField(1, "id", LongType(), required=True)))
    life = live(warehouse.sink(name))
    rows = pa.table({"id": pa.array([1, None], pa.int64())})
    life.committer.check(rows.schema)
    with pytest.raises(RowRejected, match="column id is required, and 1 of 2 rows have none"):
        life.prepare(rows, 0)


LISTS = ListType(11, LongType(), element_required=True)
MAPS = MapType(21, StringType(), 22, LongType(), value_required=True)
PAIR = StructType(NestedField(51, "x", LongType(), required=True))


@pytest.mark.parametrize(
    ("kind", "arrow", "values"),
    [
        (LISTS, pa.list_(pa.int64()), [[1, 2], [], None, [1, None]]),
        (
            MAPS,
            pa.map_(pa.string(), pa.int64()),
            [[("a", 1)], [], None, [("a", 1), ("b", None)]],
        ),
        (
            StructType(NestedField(31, "l", LISTS)),
            pa.struct([("l", pa.list_(pa.int64()))]),
            [{"l": [1]}, {"l": None}, None, {"l": [None]}],
        ),
        (PAIR, pa.struct([("x", pa.int64())]), [{"x": 1}, None, {"x": 2}, {"x": None}]),
        (
            ListType(41, StructType(NestedField(42, "p", PAIR)), element_required=False),
            pa.list_(pa.struct([("p", pa.struct([("x", pa.int64())]))])),
            [[{"p": {"x": 1}}, None], [{"p": None}], None, [{"p": {"x": None}}]],
        ),
    ],
    ids=["list", "map", "list in a struct", "field", "field in a struct in a list"],
)
def test_a_null_in_a_required_value_is_refused_and_one_around_it_is_taken(
    warehouse, live, kind, arrow, values
):
    name = warehouse.create(Schema(NestedField(1, "v", kind)))
    life = live(warehouse.sink(name))
    rows = pa.table({"v": pa.array(values, arrow)})
    life.committer.check(rows.schema)
    life.write(0, rows.slice(0, 3))
    # Read as a file: pyiceberg's own scan refuses a null around a required field inside of a list.
    (task,) = warehouse.load(name).scan().plan_files()
    assert pq.read_table(task.file.file_path.removeprefix("file://"))["v"].to_pylist() == values[:3]
    with pytest.raises(RowRejected, match="column v has a null in a field or element"):
        life.prepare(rows, 1)


def test_a_missing_required_column_is_refused(warehouse, live):
    life = live(warehouse.sink(warehouse.create(EVERYTHING)))
    with pytest.raises(Misconfigured, match="column id is required by the table"):
        life.committer.check(pa.schema([("text", pa.string())]))


def test_new_columns_are_added_where_that_is_wanted(warehouse, live, some):
    name = warehouse.create()
    wide = some(1).append_column("extra", pa.array([2.5]))
    wide = wide.append_column("tags", pa.array([["a"]]))
    live(warehouse.sink(name)).write(0, some(7))
    life = live(warehouse.sink(name, evolve="add_columns"))
    life.committer.check(wide.schema)
    assert "extra" not in warehouse.load(name).schema().column_names, "check changes nothing"
    life.write(1, wide)
    rows = {row["id"]: row for row in warehouse.rows(name)}
    assert rows[1] == {"id": 1, "name": "row 1", "extra": 2.5, "tags": ["a"]}
    assert rows[7]["extra"] is None


@pytest.mark.parametrize("kind", [pa.uint32(), pa.null(), pa.timestamp("ns")], ids=str)
def test_columns_that_a_table_can_not_have_are_refused_and_none_is_added(
    warehouse, live, some, kind
):
    name = warehouse.create()
    wide = some(1).append_column("fine", pa.array([1])).append_column("odd", pa.nulls(1, kind))
    with pytest.raises(Misconfigured, match="odd"):
        live(warehouse.sink(name, evolve="add_columns")).committer.check(wide.schema)
    assert warehouse.load(name).schema().column_names == ["id", "name"]


def test_a_column_is_not_added_beside_one_that_differs_in_case_only(warehouse, live, some):
    name = warehouse.create()
    life = live(warehouse.sink(name, evolve="add_columns"))
    rows = some(1).append_column("ID", pa.array([2])).append_column("new", pa.array([3]))
    with pytest.raises(Misconfigured, match=r"column ID is not in the table \(it has id\)"):
        life.committer.check(rows.schema)
    twice = some(1).append_column("new", pa.array([2])).append_column("New", pa.array([3]))
    with pytest.raises(Misconfigured, match="column new is not in the table"):
        life.committer.check(twice.schema)
    fine = rows.drop_columns(["ID"])
    life.committer.check(fine.schema)
    life.write(0, fine)
    assert warehouse.load(name).schema().column_names == ["id", "name", "new"]


def test_tables_that_can_not_be_written_are_refused(warehouse, live):
    name = warehouse.create(properties={"write.format.default": "avro"})
    sink = warehouse.sink(name)
    with pytest.raises(Misconfigured, match="asks for avro files"):
        live(sink).committer.check(None)
    table = warehouse.load(name)
    table.metadata = table.metadata.model_copy(update={"format_version": 3})
    with pytest.raises(Misconfigured, match="format version 3"):
        check_table(sink, table, None)


def test_data_may_lie_elsewhere(warehouse, live, some, tmp_path: Path):
    name = warehouse.create(properties={"write.data.path": f"file://{tmp_path}/elsewhere"})
    life = live(warehouse.sink(name))
    life.write(0, some(1))
    loser = life.prepare(some(2), 1)
    assert [found.handle for found in life.committer.in_doubt()] == [loser.handle]
    life.committer.abort(EpochNumber(1), [loser])
    assert len(list((tmp_path / "elsewhere").rglob("*.parquet"))) == 1
    assert warehouse.ids(name) == [1]


def test_data_may_be_moved_elsewhere_between_prepare_and_commit(warehouse, live, some, tmp_path):
    name = warehouse.create()
    life = live(warehouse.sink(name))
    winner, loser = life.prepare(some(1), 0), life.prepare(some(2), 0, 1)
    with warehouse.load(name).transaction() as change:
        change.set_properties({"write.data.path": f"file://{tmp_path}/elsewhere"})
    later = live(life.sink, generation=2)
    later.committer.commit(EpochNumber(0), [winner])
    later.committer.abort(EpochNumber(0), [loser])
    assert warehouse.ids(name) == [1]
    assert not warehouse.leftovers(name)


def test_files_may_be_opened_through_fsspec(warehouse, live, some):
    name = warehouse.create()
    properties = {**warehouse.properties, "py-io-impl": "pyiceberg.io.fsspec.FsspecFileIO"}
    life = live(warehouse.sink(name, properties=properties))
    life.write(0, some(1))
    loser = life.prepare(some(2), 1)
    assert [found.handle for found in life.committer.in_doubt()] == [loser.handle]
    life.committer.abort(EpochNumber(1), [loser])
    assert warehouse.ids(name) == [1]
    assert not warehouse.leftovers(name)
