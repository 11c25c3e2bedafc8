"""Compaction beside a running pipeline: readers see the same rows before, during and after."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pytest
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.snapshots import Operation
from pyiceberg.table.sorting import SortField, SortOrder
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import ListType, LongType, NestedField, StructType

from epochal.errors import Misconfigured, TryAgain
from epochal.sinks.iceberg import Iceberg
from epochal.sinks.iceberg import pyiceberg_private as private
from epochal.sinks.iceberg.compact import TableCompaction

MB = 1024 * 1024
BY_NAME = PartitionSpec(PartitionField(2, 1000, IdentityTransform(), "name"))


def files(warehouse, name: str) -> list[str]:
    return [task.file.file_path for task in warehouse.load(name).scan().plan_files()]


def compacted(life, *, is_dry_run: bool = False):
    return life.fresh().committer.compact(target_bytes=MB, is_dry_run=is_dry_run)


def test_small_files_of_a_partition_become_one_in_one_replace_snapshot(warehouse, live, some):
    name = warehouse.create(spec=BY_NAME)
    life = live(warehouse.sink(name))
    for epoch in range(4):
        parts = [some(epoch).set_column(1, "name", pa.array([area])) for area in ("a", "b")]
        life.write(epoch, *parts)
    loser = life.prepare(some(99), 4)
    seen = sorted(map(str, warehouse.rows(name)))
    planned = compacted(life, is_dry_run=True)
    assert (planned.files_before, planned.files_after, len(files(warehouse, name))) == (8, 2, 8)
    done = compacted(life)
    assert (done.files_before, done.files_after, len(files(warehouse, name))) == (8, 2, 2)
    assert sorted(map(str, warehouse.rows(name))) == seen
    last = warehouse.load(name).current_snapshot().summary
    assert last.operation == Operation.REPLACE
    assert last.additional_properties["total-records"] == "8"
    assert [one.handle for one in life.committer.in_doubt()] == [loser.handle]
    life.committer.abort(4, [loser])
    assert warehouse.leftovers(name) == []
    assert compacted(life).files_before == 0
    life.write(4, some(100))
    assert [mark.epoch for mark in life.committer.newest()] == [4]


def test_a_sorted_table_stays_sorted(warehouse, live, some):
    order = SortOrder(SortField(1, transform=IdentityTransform()))
    name = warehouse.create(sort_order=order)
    life = live(warehouse.sink(name))
    for epoch, ids in enumerate([(5, 1), (4, 2)]):
        life.write(epoch, some(*ids))
    compacted(life)
    (task,) = warehouse.load(name).scan().plan_files()
    assert task.file.sort_order_id == warehouse.load(name).sort_order().order_id
    assert [row["id"] for row in warehouse.rows(name)] == [1, 2, 4, 5]


def test_readers_see_whole_epochs_while_epochs_are_written_and_files_compacted(
    warehouse, live, some
):
    name = warehouse.create()
    life = live(warehouse.sink(name))
    life.write(0, some(0, 1))
    is_over = threading.Event()
    wrong: list[object] = []
    seen: set[int] = set()

    def read() -> None:
        while not is_over.is_set():
            ids = warehouse.ids(name)
            seen.add(len(ids))
            if ids != list(range(len(ids))) or len(ids) % 2:
                wrong.append(ids)

    def compact() -> int:
        passes = 0
        while not is_over.is_set():
            compacted(life)
            passes += 1
        return passes

    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(read), pool.submit(compact)]
        for epoch in range(1, 15):
            life.write(epoch, some(2 * epoch, 2 * epoch + 1))
        is_over.set()
        assert running[1].result() > 0
    assert not wrong
    assert warehouse.ids(name) == list(range(30))
    assert len(seen) > 1
    assert any("epochal.compacted" in one for one in warehouse.history(name))
    assert warehouse.leftovers(name) == []


def test_an_epoch_that_comes_in_between_is_kept(warehouse, live, some, monkeypatch):
    name = warehouse.create()
    life = live(warehouse.sink(name))
    for epoch in range(3):
        life.write(epoch, some(epoch))
    plain = private.send
    meanwhile = iter([lambda: life.write(3, some(3))])

    def late(table, change):
        if any("epochal.compacted" in str(update) for update in change.updates):
            next(meanwhile, lambda: None)()
        plain(table, change)

    monkeypatch.setattr(private, "send", late)
    assert compacted(life).files_before == 3
    assert (warehouse.ids(name), len(files(warehouse, name))) == ([0, 1, 2, 3], 2)
    assert warehouse.leftovers(name) == []


def test_rows_that_others_deleted_meanwhile_do_not_come_back(warehouse, live, some, monkeypatch):
    name = warehouse.create()
    life = live(warehouse.sink(name))
    for epoch in range(3):
        life.write(epoch, some(epoch))
    plain = TableCompaction._write

    def beside_a_delete(*args):
        warehouse.load(name).delete("id = 1")
        plain(*args)

    monkeypatch.setattr(TableCompaction, "_write", beside_a_delete)
    with pytest.raises(TryAgain, match="changed by others"):
        compacted(life)
    assert warehouse.ids(name) == [0, 2]
    assert warehouse.leftovers(name) == []


def test_a_refused_compaction_leaves_the_table_as_it_was(warehouse, live, some, monkeypatch):
    name = warehouse.create()
    life = live(warehouse.sink(name))
    for epoch in range(3):
        life.write(epoch, some(epoch))
    before = files(warehouse, name)

    def refused(*_):
        raise CommitFailedException("not now")

    monkeypatch.setattr(private, "send", refused)
    monkeypatch.setattr("epochal.sinks.iceberg.compact._WAIT_S", 0)
    with pytest.raises(TryAgain, match="others committed"):
        compacted(life)
    assert files(warehouse, name) == before
    assert warehouse.leftovers(name) == []


def test_the_driver_compacts_by_itself(warehouse, live, some, caplog):
    caplog.set_level(logging.INFO, "epochal")
    name = warehouse.create()
    for epoch in range(3):
        life = live(warehouse.sink(name))
        life.write(epoch, some(epoch))
    life = live(warehouse.sink(name, compact={"target_mb": 1, "every": "1h"}))
    life.write(3, some(3))
    life.committer.close()
    assert len(files(warehouse, name)) == 1
    assert "4 files became 1" in caplog.text
    assert warehouse.ids(name) == [0, 1, 2, 3]


def test_columns_that_pyiceberg_does_not_read_back_are_not_compacted(warehouse, live):
    inner = StructType(NestedField(4, "x", LongType()))
    listed = NestedField(2, "items", ListType(3, inner))
    name = warehouse.create(Schema(NestedField(1, "id", LongType()), listed))
    assert "items has structs in a list" in compacted(live(warehouse.sink(name))).because


@pytest.mark.parametrize(
    "option", [{"target_mb": 0}, {"every": "often"}, {"every": "0s"}, {"size": 1}], ids=str
)
def test_a_schedule_that_means_nothing_is_refused(option):
    with pytest.raises(Misconfigured, match="compact="):
        Iceberg("lake.shop.orders", compact=option)
