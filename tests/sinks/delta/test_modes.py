"""What an epoch does to rows that are there already."""

from __future__ import annotations

import datetime as dt

import pyarrow as pa
import pytest
from sinks.delta.conftest import ORDERS

from epochal.errors import Misconfigured, RowRejected

DAYS = pa.schema([("id", pa.int64()), ("day", pa.string()), ("Weird name", pa.string())])
CHANGES = pa.schema(
    [("id", pa.int64()), ("name", pa.string()), ("op", pa.string()), ("lsn", pa.int64())]
)


def days(*pairs: tuple[int, str | None]) -> pa.Table:
    columns = {"id": [i for i, _ in pairs], "day": [d for _, d in pairs]}
    return pa.table({**columns, "Weird name": ["w"] * len(pairs)}, schema=DAYS)


def changes(*rows: tuple) -> pa.Table:
    return pa.Table.from_pylist(
        [dict(zip(CHANGES.names, row, strict=True)) for row in rows], schema=CHANGES
    )


def test_an_overwrite_replaces_the_partitions_it_has_rows_for_and_no_other(lake):
    lake.made(DAYS, partition_by=["day"])
    life = lake.life(mode="overwrite_partitions")
    odd = "a:b c/ü%3D'\""
    life.write(0, days((1, "mon"), (2, "tue"), (3, odd)), days((4, "mon"), (5, None)))
    life.write(1, days((6, "mon"), (7, odd)), days((8, "mon")))
    assert lake.rows("id, day") == [(2, "tue"), (5, None), (6, "mon"), (7, odd), (8, "mon")]
    life.write(2, days((9, None)))
    life.commit(3, [])
    assert lake.ids() == [2, 6, 7, 8, 9]
    assert lake.leftovers() == []


def test_a_repeated_overwrite_does_not_remove_what_came_after_it(lake):
    lake.made(DAYS, partition_by=["day"])
    life = lake.life(mode="overwrite_partitions")
    first = life.write(0, days((1, "mon")))
    life.write(1, days((2, "mon")))
    life.fresh(generation=2).commit(0, first)
    assert lake.ids() == [2]


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        (pa.date32(), dt.date(2026, 1, 31), "2026-01-31"),
        (pa.int32(), -7, "-7"),
        (pa.bool_(), True, "true"),
    ],
    ids=str,
)
def test_partition_columns_of_other_types_are_found_again(lake, kind, value, text):
    schema = pa.schema([("id", pa.int64()), ("part", kind)])
    lake.made(schema, partition_by=["part"])
    life = lake.life(mode="overwrite_partitions")
    for epoch in range(2):
        life.write(epoch, pa.table({"id": [epoch], "part": [value]}, schema=schema))
    assert lake.rows() == [(1, value)]
    assert (lake.folder / f"part={text}").is_dir()


def test_a_merge_updates_inserts_and_deletes_by_the_last_change_of_each_key(lake):
    lake.made(ORDERS)
    options = {"mode": "merge", "keys": "id", "order_by": "lsn", "delete_when": "op = 'd'"}
    life = lake.life(**options)
    life.write(
        0,
        changes((1, "a", "c", 1), (2, "b", "c", 2), (1, "a2", "u", 3)),
        changes((3, "c", "c", 4), (3, None, "d", 5)),
    )
    assert lake.rows() == [(1, "a2"), (2, "b")]
    life.write(1, changes((1, None, "d", 6), (2, "b2", "u", 7), (4, "d", None, 8)))
    assert lake.rows() == [(2, "b2"), (4, "d")]
    life.write(2, changes((9, None, "d", 9)))
    assert [mark.epoch for mark in life.committer.newest()] == [2], "a merge of nothing is proven"
    assert lake.rows() == [(2, "b2"), (4, "d")]
    assert lake.leftovers() == []


def test_a_merge_changes_only_the_columns_that_arrive(lake):
    schema = pa.schema([("Id no", pa.int64()), ("name", pa.string()), ("note", pa.string())])
    lake.made(schema)
    lake.life(name="whole").write(0, pa.table({"Id no": [1], "name": ["a"], "note": ["kept"]}))
    part = pa.table({"Id no": [1, 2], "name": ["z", "b"]})
    lake.life(mode="merge", keys=["Id no"]).write(0, part)
    assert lake.rows() == [(1, "z", "kept"), (2, "b", None)]


def test_an_ambiguous_merge_is_refused_before_the_decision(lake):
    lake.made(ORDERS)
    life = lake.life(mode="merge", keys=["id"], order_by="lsn", delete_when="op = 'd'")
    with pytest.raises(RowRejected, match=r"id=1 \(2 rows\)"):
        life.write(0, changes((1, "a", "c", 1), (1, "b", "c", 1), (2, "c", "c", 1)))
    with pytest.raises(RowRejected, match="1 row with a null among the keys"):
        life.write(0, changes((None, "a", "c", 1)))
    assert lake.rows() == []


def test_a_table_is_not_made_for_a_mode_that_it_could_not_serve(lake):
    life = lake.life(mode="overwrite_partitions", create_table="if_missing")
    with pytest.raises(Misconfigured, match="needs partitions"):
        life.committer.check(ORDERS)
    assert not lake.folder.exists()


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "upsert"},
        {"mode": "merge"},
        {"keys": ["id"]},
        {"compression": "lzma"},
        {"max_file_bytes": 0},
        {"create_table": "always"},
    ],
    ids=str,
)
def test_options_that_do_not_go_together_are_refused(lake, options):
    with pytest.raises(Misconfigured, match="Delta"):
        lake.life(**options)
