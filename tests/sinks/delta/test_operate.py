"""The audit of a table, and what a dropped pipeline leaves beside it."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from sinks.delta.conftest import ORDERS

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
