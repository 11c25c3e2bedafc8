"""The audit of a table, and what a dropped pipeline leaves beside it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from sinks.delta.conftest import ORDERS

from epochal.errors import TryAgain
from epochal.kit.sink_base import Operable


def data_files(lake):
    return sorted(lake.folder.glob("epochal-*.parquet"))


def test_rows_are_counted_in_the_files_and_by_epoch(orders, some):
    life = orders.life()
    life.write(0, some(1, 2, 3), some(4))
    life.write(1, some(5, 6))
    undecided = life.prepare(some(7, 8), 2)
    assert isinstance(life.committer, Operable)
    found = life.committer.recount()
    assert (found.rows, dict(found.epochs), found.is_alone) == (6, {0: 4, 1: 2}, True)
    assert found.rows == len(orders.ids())
    life.committer.abort(2, [undecided])


def test_a_file_that_was_changed_or_removed_is_found(orders, some):
    life = orders.life()
    life.write(0, some(1, 2, 3))
    life.write(1, some(4))
    changed, removed = data_files(orders)
    pq.write_table(pq.read_table(changed).slice(1), changed)
    removed.unlink()
    found = life.committer.recount()
    assert (found.rows, dict(found.epochs)) == (2, {0: 2, 1: 0})
    assert found.faults == [f"{removed.name} is in the table and not there"]


def test_rows_of_others_and_compacted_files_are_counted_together_and_that_is_said(orders, some):
    life = orders.life()
    life.write(0, some(1, 2))
    life.write(1, some(3))
    DeltaTable(str(orders.folder)).optimize.compact()
    compacted = life.committer.recount()
    assert (compacted.rows, compacted.epochs, compacted.is_alone) == (3, None, False)
    write_deltalake(str(orders.folder), some(9), mode="append")
    found = life.committer.recount()
    assert found.rows == len(orders.ids()) == 4
    assert "others wrote some or files were compacted" in found.because


def test_partition_values_in_any_spelling_are_counted(lake):
    lake.made(pa.schema([("id", pa.int64()), ("day", pa.string())]), partition_by=["day"])
    rows = pa.table({"id": [1, 2, 3], "day": ["a b", "50 %", None]})
    life = lake.life()
    life.write(0, rows)
    assert life.committer.recount().rows == 3


@pytest.mark.parametrize("mode", ["merge", "overwrite_partitions"])
def test_a_table_whose_rows_are_replaced_is_not_counted(lake, mode):
    lake.made(ORDERS, partition_by=["name"])
    keys = {"keys": ["id"]} if mode == "merge" else {}
    found = lake.life(mode=mode, **keys).committer.recount()
    assert found.rows is None
    assert "replaces rows" in found.because


def test_files_with_rows_that_readers_skip_are_not_counted(lake):
    lake.made(ORDERS, configuration={"delta.enableDeletionVectors": "true"})
    found = lake.life().committer.recount()
    assert found.rows is None
    assert "deletionVectors" in found.because


def staged_file(life, content):
    handle = life.identity.handle(0, partition=3, attempt=77)
    path = Path(life.sink.table) / "_epochal" / "staged" / f"{handle}-00000.snappy.parquet"
    path.write_bytes(content)
    return path


def test_a_dropped_sink_leaves_rows_and_says_what_the_log_keeps(orders, some):
    life = orders.life(mode="merge", keys=["id"])
    life.write(0, some(1, 2))
    late = staged_file(life, b"of a task that woke up late")
    neighbour = staged_file(life.fresh(uid="zyxwvuts7654"), b"of another pipeline")
    committer = life.committer
    assert isinstance(committer, Operable)
    shown = committer.drop(is_dry_run=True)
    assert shown.removed == [f"the staged file _epochal/staged/{late.name}"]
    assert late.exists()
    assert committer.drop(is_dry_run=False) == shown
    assert (late.exists(), neighbour.exists()) == (False, True)
    assert f"epochal-{life.uid}-s" in shown.kept
    assert committer.drop(is_dry_run=False).removed == []
    assert orders.ids() == [1, 2]


def test_small_files_become_few_and_what_is_prepared_is_left_alone(lake):
    schema = pa.schema([("id", pa.int64()), ("area", pa.string())])
    lake.made(schema, partition_by=["area"])
    life = lake.life()
    for epoch in range(4):
        rows = {"id": [2 * epoch, 2 * epoch + 1], "area": ["a", "b"]}
        life.write(epoch, pa.table(rows, schema=schema))
    waiting = [life.prepare(pa.table({"id": [8], "area": ["a"]}, schema=schema), 4)]
    table = DeltaTable(str(lake.folder))
    operator = life.fresh().committer
    planned = operator.compact(target_bytes=2**20, is_dry_run=True)
    assert (planned.files_before, planned.files_after) == (8, 2)
    done = operator.compact(target_bytes=2**20, is_dry_run=False)
    assert (done.files_before, done.files_after) == (8, 2)
    assert DeltaTable(str(lake.folder)).version() == table.version() + 1, "one commit"
    assert lake.ids() == list(range(8))
    life.rehearse(4, waiting)
    life.commit(4, waiting)
    assert lake.ids() == list(range(9))
    assert operator.compact(target_bytes=2**20, is_dry_run=False).files_before == 2
    life.write(5, pa.table({"id": [9], "area": ["b"]}, schema=schema))
    assert lake.leftovers() == []


def test_a_table_partitioned_by_instants_is_left_to_a_writer_that_names_their_zone(lake):
    at = pa.timestamp("us", "UTC")
    schema = pa.schema([("id", pa.int64()), ("hour", at)])
    lake.made(schema, partition_by=["hour"])
    for number in range(2):
        rows = {"id": [number], "hour": pa.array([0], at)}
        write_deltalake(str(lake.folder), pa.table(rows, schema=schema), mode="append")
    done = lake.life().committer.compact(target_bytes=1 << 20, is_dry_run=False)
    assert "partitioned by hour" in done.because
    assert len(DeltaTable(str(lake.folder)).file_uris()) == 2


@pytest.mark.parametrize("options", [{}, {"mode": "merge", "keys": "id"}], ids=["append", "merge"])
def test_readers_see_whole_epochs_while_epochs_are_written_and_files_compacted(
    orders, some, options
):
    is_over = threading.Event()
    wrong: list[object] = []

    def read() -> None:
        while not is_over.is_set():
            ids = orders.ids()
            if ids != list(range(len(ids))) or len(ids) % 2:
                wrong.append(ids)

    def compact() -> int:
        files = 0
        while not is_over.is_set():
            try:
                done = life.fresh().committer.compact(target_bytes=2**20, is_dry_run=False)
            except TryAgain:
                continue  # a merge took files away that were being compacted
            files += done.files_before
        return files

    life = orders.life(**options)
    life.write(0, some(0, 1))
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(read), pool.submit(compact)]
        for epoch in range(1, 15):
            life.write(epoch, some(2 * epoch, 2 * epoch + 1))
        is_over.set()
        assert running[1].result() > 0 or options
    assert not wrong
    assert orders.ids() == list(range(30))
    assert orders.leftovers() == []


def test_the_driver_compacts_by_itself(orders, some):
    life = orders.life()
    for epoch in range(3):
        life.write(epoch, some(epoch))
    scheduled = orders.life(compact={"target_mb": 1, "every": "1h"})
    scheduled.write(3, some(3))
    scheduled.close()
    assert len(DeltaTable(str(orders.folder)).file_uris()) == 1
    assert orders.ids() == [0, 1, 2, 3]
