"""What a table demands is respected, or refused early with the reason; what it says is true."""

from __future__ import annotations

import datetime as dt
import decimal
import json
import sys

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from sinks.delta.conftest import ORDERS

from epochal.errors import Misconfigured, RowRejected
from epochal.sinks.delta import Delta, prepared_rows
from epochal.sinks.files import Files

DAY = dt.date(2026, 1, 31)
NOW = dt.datetime(2026, 1, 31, 12, 30, 15, 123456, tzinfo=dt.UTC)
TYPES = {
    "b": (pa.int8(), [1, None]),
    "s": (pa.int16(), [-2, 3]),
    "i": (pa.int32(), [4, 5]),
    "f": (pa.float32(), [0.5, float("nan")]),
    "d": (pa.float64(), [1.5, -2.5]),
    "t": (pa.bool_(), [True, False]),
    "x": (pa.binary(), [b"\x00\xff", b""]),
    "day": (pa.date32(), [DAY, None]),
    "at": (pa.timestamp("us", "UTC"), [NOW, None]),
    "p": (pa.decimal128(18, 2), [decimal.Decimal("12.34"), decimal.Decimal("-0.01")]),
    "long": (pa.string(), ["é" * 40, "z" * 40]),
    "l": (pa.list_(pa.int32()), [[1, 2], None]),
    "m": (pa.map_(pa.string(), pa.int64()), [[("k", 1)], []]),
    "r": (pa.struct([("a", pa.int64())]), [{"a": 1}, None]),
}


def all_types() -> pa.Table:
    return pa.table({name: pa.array(values, kind) for name, (kind, values) in TYPES.items()})


def test_every_type_comes_back_as_it_was_in_a_table_that_was_made_for_it(lake):
    lake.life(create_table="if_missing").write(0, all_types())
    found = DeltaTable(str(lake.folder)).to_pyarrow_table()
    for name in TYPES:
        before, after = all_types().column(name), found.column(name).cast(TYPES[name][0])
        assert repr(after.to_pylist()) == repr(before.to_pylist())


def test_statistics_never_say_less_than_the_values(lake):
    lake.life(create_table="if_missing").write(0, all_types())
    log = (lake.folder / "_delta_log" / f"{1:020d}.json").read_text().splitlines()
    (added,) = (json.loads(line)["add"] for line in log if '"add"' in line)
    stats = json.loads(added["stats"])
    assert stats["numRecords"] == 2
    assert stats["nullCount"]["b"] == stats["nullCount"]["day"] == 1
    assert stats["minValues"]["i"] == 4
    assert stats["maxValues"]["i"] == 5
    assert stats["minValues"]["at"] == stats["maxValues"]["at"] == "2026-01-31T12:30:15.123456Z"
    assert stats["maxValues"]["p"] == 12.34
    assert stats["maxValues"]["day"] == "2026-01-31"
    assert stats["minValues"]["long"] == "z" * 32
    assert stats["maxValues"]["long"].startswith("é" * 32)
    assert stats["maxValues"]["long"] > "é" * 40
    assert not {"f", "t", "x", "l", "m", "r"} & stats["maxValues"].keys(), "NaN has no bound"


def test_many_partitions_and_small_limits_lose_no_row(lake):
    schema = pa.schema([("id", pa.int64()), ("part", pa.int64())])
    rows = pa.table({"id": range(5000), "part": [i % 40 for i in range(5000)]}, schema=schema)
    life = lake.life(
        create_table="if_missing",
        partition_by=["part"],
        buffer_bytes_max=20_000,
        open_files_max=3,
        max_file_bytes=500,
    )
    life.write(0, rows)
    assert lake.rows("id, part") == sorted(((i, i % 40) for i in range(5000)), key=repr)
    assert lake.leftovers() == []


def test_narrower_numbers_are_widened_and_columns_may_be_left_out(lake):
    lake.made(pa.schema([("n", pa.int64()), ("p", pa.decimal128(20, 4)), ("note", pa.string())]))
    rows = pa.table(
        {"n": pa.array([1], pa.int16()), "p": pa.array(["1.5"]).cast(pa.decimal128(5, 2))}
    )
    lake.life().write(0, rows)
    assert lake.rows() == [(1, decimal.Decimal("1.5000"), None)]


def test_new_columns_are_added_before_the_first_row_where_that_is_wanted(orders, some):
    orders.life(name="old").write(0, some(1))
    wide = pa.table({"id": [2], "name": ["b"], "extra": [2.5]})
    with pytest.raises(Misconfigured, match="no column 'extra'"):
        orders.life(name="refused").write(0, wide)
    orders.life(evolve="add_columns").write(0, wide)
    assert orders.rows() == [(1, "n1", None), (2, "b", 2.5)]


def test_rows_that_break_a_constraint_are_refused_before_the_decision(orders, some):
    table = DeltaTable(str(orders.folder))
    table.alter.add_constraint({"positive": "id > 0"})
    life = orders.life()
    life.write(0, some(1))
    with pytest.raises(RowRejected, match=r"breaks 'positive' \(id > 0\).*'id': -1"):
        life.write(1, some(2), some(-1))
    assert orders.ids() == [1]


def test_a_constraint_on_a_partition_column_is_checked_too(lake):
    schema = pa.schema([("id", pa.int64()), ("day", pa.date32())])
    lake.made(schema, partition_by=["day"]).alter.add_constraint({"c": "day > '2026-01-01'"})
    life = lake.life()
    life.write(0, pa.table({"id": [1], "day": [DAY]}, schema=schema))
    with pytest.raises(RowRejected, match="breaks 'c'"):
        life.write(1, pa.table({"id": [2], "day": [dt.date(2025, 1, 1)]}, schema=schema))


@pytest.mark.parametrize(
    ("partition_by", "rule", "taken", "refused"),
    [
        (["a", "b"], "a < b", (9, 10, True), (10, 9, True)),
        (["flag"], "flag", (1, 1, True), (1, 1, False)),
        (["a"], "a + 1 > 5", (10, 1, True), (4, 1, True)),
    ],
)
def test_constraints_are_judged_by_the_types_of_partition_columns(
    lake, partition_by, rule, taken, refused
):
    kinds = [("id", pa.int64()), ("a", pa.int64()), ("b", pa.int64()), ("flag", pa.bool_())]
    schema = pa.schema(kinds)
    lake.made(schema, partition_by=partition_by).alter.add_constraint({"c": rule})
    life = lake.life()
    life.write(0, pa.table(list(map(pa.array, [[1], *([v] for v in taken)])), schema=schema))
    with pytest.raises(RowRejected, match="breaks 'c'"):
        life.write(1, pa.table(list(map(pa.array, [[2], *([v] for v in refused)])), schema=schema))
    assert lake.ids() == [1]


def test_constraints_are_judged_by_some_partitions_at_a_time(lake, monkeypatch):
    """DataFusion dies of a query over some thousand."""
    monkeypatch.setattr(prepared_rows, "PARTITIONS_MAX", 2)
    schema = pa.schema([("id", pa.int64()), ("p", pa.int64())])
    lake.made(schema, partition_by=["p"]).alter.add_constraint({"c": "id <> 5"})
    life = lake.life()
    life.write(0, pa.table({"id": [1, 2, 3, 4, 6], "p": range(5)}, schema=schema))
    for first in range(6):
        ids = [first, *(n for n in range(6) if n != first)]
        with pytest.raises(RowRejected, match="'id': 5"):
            life.write(1, pa.table({"id": ids, "p": range(6)}, schema=schema))
    assert lake.ids() == [1, 2, 3, 4, 6]


def test_a_constraint_on_a_column_that_no_field_fills_is_judged_as_null(lake):
    kinds = {"p": pa.decimal128(10, 2), "at": pa.timestamp("us", "UTC"), "d": pa.date32()}
    table = lake.made(pa.schema([("id", pa.int64()), *kinds.items()]))
    table.alter.add_constraint({name: f"{name} IS NULL OR {name} = {name}" for name in kinds})
    lake.life().write(0, pa.table({"id": [1]}))
    assert lake.ids() == [1]


@pytest.mark.parametrize("rule", ["id / 2 <= 1", "concat(name, 'x') <> ''", "log(id) < 1"])
def test_a_constraint_that_is_computed_otherwise_here_than_by_spark_is_refused(orders, rule):
    table = DeltaTable(str(orders.folder))
    table.alter.add_constraint({"path": "name NOT LIKE '/tmp/%'"})
    orders.life().committer.check(ORDERS)
    table.alter.add_constraint({"c": rule})
    with pytest.raises(Misconfigured, match=r"constraint 'c'.*otherwise than Spark"):
        orders.life().committer.check(ORDERS)


def test_a_merge_checks_constraints_of_the_rows_that_count(orders, some):
    DeltaTable(str(orders.folder)).alter.add_constraint({"named": "name <> 'n3'"})
    life = orders.life(mode="merge", keys=["id"])
    life.write(0, some(1, 2))
    with pytest.raises(RowRejected, match="breaks 'named'"):
        life.write(1, some(2, 3))


def test_nulls_where_none_may_be_are_refused_before_the_decision(lake):
    lake.made(pa.schema([pa.field("id", pa.int64(), nullable=False), ("name", pa.string())]))
    rows = pa.table({"id": [1, None], "name": ["a", "b"]}, schema=ORDERS)
    with pytest.raises(RowRejected, match="takes no null in id"):
        lake.life(name="appends").write(0, rows)
    with pytest.raises(RowRejected, match="1 row with a null among the keys id"):
        lake.life(name="merges", mode="merge", keys="id").write(0, rows)
    with pytest.raises(Misconfigured, match="'id' is NOT NULL, and no field fills it"):
        lake.life(name="lacks").write(0, rows.select(["name"]))
    assert lake.rows() == []


REFUSALS = [
    ({"delta.setTransactionRetentionDuration": "interval 1 days"}, {}, "forgets which epochs"),
    ({"delta.deletedFileRetentionDuration": "interval 2 hours"}, {}, "VACUUM take prepared files"),
    ({"delta.appendOnly": "true"}, {"mode": "merge", "keys": "id"}, "append-only"),
    ({"delta.enableChangeDataFeed": "true"}, {"mode": "merge", "keys": "id"}, "change feed"),
    ({}, {"mode": "overwrite_partitions"}, "has no partitions"),
    ({}, {"partition_by": ["id"]}, r"partitioned by \[\], not by \['id'\]"),
    ({}, {"mode": "merge", "keys": "nr"}, "no field 'nr' arrives"),
    ({}, {"mode": "merge", "keys": "id", "delete_when": "nonsense ("}, "can't be evaluated"),
    (
        {},
        {"mode": "merge", "keys": "id", "delete_when": "op = 1"},
        "(?s)named op.*over the fields id",
    ),
]


@pytest.mark.parametrize(
    ("settings", "options", "why"), REFUSALS, ids=lambda given: str(given)[:40]
)
def test_tables_that_can_not_keep_the_promise_are_refused_at_the_start(
    lake, settings, options, why
):
    lake.made(ORDERS, configuration=settings)
    with pytest.raises(Misconfigured, match=why) as caught:
        lake.life(**options).committer.check(ORDERS)
    assert caught.value.hint


def rewritten_metadata(lake, change) -> None:
    """Edit the table's first version by hand: what delta-rs can't make, other writers can."""
    path = lake.folder / "_delta_log" / f"{0:020d}.json"
    actions = [json.loads(line) for line in path.read_text().splitlines()]
    for action in actions:
        change(action)
    path.write_text("\n".join(json.dumps(action) for action in actions))


@pytest.mark.parametrize(
    ("metadata", "why"),
    [
        ({"delta.generationExpression": "id + 1"}, "is generated by the table, and a field"),
        ({"delta.identity.start": 1}, "identity column"),
        ({"__CHAR_VARCHAR_TYPE_STRING": "char(3)"}, "padding"),
    ],
    ids=str,
)
def test_columns_that_a_writer_would_have_to_compute_are_refused(lake, metadata, why):
    lake.made(ORDERS)

    def change(action: dict) -> None:
        if "metaData" in action:
            schema = json.loads(action["metaData"]["schemaString"])
            schema["fields"][1]["metadata"] = metadata
            action["metaData"]["schemaString"] = json.dumps(schema)

    rewritten_metadata(lake, change)
    with pytest.raises(Misconfigured, match=why):
        lake.life().committer.check(ORDERS)


@pytest.mark.parametrize("kind", [pa.timestamp("us", "UTC"), pa.float64()], ids=str)
def test_a_table_partitioned_by_what_has_several_texts_is_refused(lake, kind):
    schema = ORDERS.append(pa.field("p", kind))
    lake.made(schema, partition_by=["p"])
    with pytest.raises(Misconfigured, match=f"partitioned by 'p', which is {kind}".split("[")[0]):
        lake.life().committer.check(schema)


def test_a_feature_that_is_not_known_here_is_refused(lake):
    lake.made(ORDERS)

    def change(action: dict) -> None:
        if "protocol" in action:
            action["protocol"] |= {
                "minReaderVersion": 1,
                "minWriterVersion": 7,
                "writerFeatures": ["rowTracking", "domainMetadata"],
            }

    rewritten_metadata(lake, change)
    with pytest.raises(Misconfigured, match="features rowTracking"):
        lake.life().committer.check(ORDERS)


@pytest.mark.parametrize("feature", ["catalogManaged", "catalogOwned-preview"])
def test_a_table_that_a_catalog_manages_is_refused_with_the_way_out(lake, feature):
    lake.made(ORDERS)

    def change(action: dict) -> None:
        if "protocol" in action:
            action["protocol"] |= {
                "minReaderVersion": 3,
                "minWriterVersion": 7,
                "readerFeatures": [feature],
                "writerFeatures": [feature, "inCommitTimestamp"],
            }

    rewritten_metadata(lake, change)
    with pytest.raises(Misconfigured, match="a catalog manages the table") as refused:
        lake.life().committer.check(ORDERS)
    assert "DROP FEATURE" in refused.value.hint


def test_deletion_vectors_that_were_switched_off_again_are_still_refused_but_for_append(lake):
    lake.made(ORDERS)

    def change(action: dict) -> None:
        if "protocol" in action:
            action["protocol"] |= {
                "minReaderVersion": 3,
                "minWriterVersion": 7,
                "readerFeatures": ["deletionVectors"],
                "writerFeatures": ["deletionVectors"],
            }

    rewritten_metadata(lake, change)
    lake.life().committer.check(ORDERS)
    with pytest.raises(Misconfigured, match="feature deletionVectors"):
        lake.life(mode="merge", keys="id").committer.check(ORDERS)


def test_invariants_and_lengths_are_rules_too(lake):
    lake.made(ORDERS)

    def change(action: dict) -> None:
        if "metaData" in action:
            schema = json.loads(action["metaData"]["schemaString"])
            rule = {"expression": {"expression": "id < 100"}}
            schema["fields"][0]["metadata"] = {"delta.invariants": json.dumps(rule)}
            schema["fields"][1]["metadata"] = {"__CHAR_VARCHAR_TYPE_STRING": "varchar(3)"}
            action["metaData"]["schemaString"] = json.dumps(schema)

    rewritten_metadata(lake, change)
    life = lake.life()
    life.write(0, pa.table({"id": [1, 2], "name": ["abc", None]}, schema=ORDERS))
    with pytest.raises(RowRejected, match="length of name"):
        life.write(1, pa.table({"id": [1], "name": ["abcd"]}, schema=ORDERS))
    with pytest.raises(RowRejected, match="invariant of id"):
        life.write(1, pa.table({"id": [100], "name": ["a"]}, schema=ORDERS))


@pytest.mark.parametrize(
    "kind",
    [
        pa.uint8(),
        pa.uint64(),
        pa.list_(pa.uint32()),
        pa.timestamp("ns"),
        pa.null(),
        pa.uuid(),
        pa.time32("s"),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_there", [True, False])
def test_values_that_no_reader_could_open_are_refused_before_a_table_is_made(lake, kind, is_there):
    schema = pa.schema([("id", pa.int64()), ("v", kind)])
    if is_there:
        lake.made(pa.schema([("id", pa.int64()), ("v", pa.int64())]))
    life = lake.life(create_table="if_missing")
    with pytest.raises(Misconfigured, match="column 'v' is "):
        life.committer.check(schema)
    assert lake.folder.exists() == is_there


def test_names_that_differ_in_case_only_are_refused_before_the_first_row(orders):
    for given in (["ID", "name"], ["id", "name", "Name"]):
        rows = pa.schema([(name, pa.string()) for name in given])
        with pytest.raises(Misconfigured, match=r"arrives, and the table has|have one name"):
            orders.life(evolve="add_columns").committer.check(rows)
    wider = ORDERS.append(pa.field("new", pa.string()))
    assert orders.life(evolve="add_columns").committer.check(wider)


def test_types_and_a_missing_table_are_reported_with_the_way_out(lake):
    with pytest.raises(Misconfigured, match="no Delta table at"):
        lake.life().committer.check(ORDERS)
    lake.made(ORDERS)
    wrong = pa.schema([("id", pa.string()), ("name", pa.string())])
    with pytest.raises(Misconfigured, match="'id' is long and string arrives"):
        lake.life().committer.check(wrong)


@pytest.mark.parametrize("kind", [Delta, Files])
def test_a_scheme_without_its_slashes_is_no_folder_of_this_machine(kind):
    for url in ("dbfs:/mnt/orders", "hdfs:/data/orders", "s3:/bucket/orders"):
        with pytest.raises(Misconfigured, match="names no host or bucket"):
            kind(url)
    for url in ("file:/data/orders", "file:///data/orders", "/data/orders/"):
        assert kind(url).target == "/data/orders"
    assert kind("file:///data/orders%231").target == kind("/data/orders#1").target
    for url in ("file:orders", "file:///data/orders#1", "file:///data/orders?x"):
        with pytest.raises(Misconfigured, match="is no URL of a folder"):
            kind(url)


def test_credentials_in_a_url_are_refused_and_options_are_not_shown():
    with pytest.raises(Misconfigured, match="carries credentials") as caught:
        Delta("s3://key:hunter2@bucket/table")
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in repr(Delta("s3://b/t", storage_options={"AWS_SECRET": "hunter2"}))


def test_a_package_that_is_missing_is_named_with_the_way_out(orders, monkeypatch):
    monkeypatch.delitem(sys.modules, "epochal.sinks.delta.committer")
    monkeypatch.setitem(sys.modules, "deltalake", None)
    with pytest.raises(Misconfigured, match="without deltalake") as caught:
        _ = orders.life().committer
    assert caught.value.hint == 'pip install "epochal[delta]"'
