"""A driver keeps its handle from epoch to epoch, and sees what others do to the log meanwhile."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from urllib.parse import unquote

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from sinks.delta.conftest import ORDERS

from epochal.errors import Refused, RowRejected, TryAgain
from epochal.sinks.delta.client import Table
from epochal.sinks.delta.table_files import TableFiles

DAYS = pa.schema([("id", pa.int64()), ("day", pa.string())])


def days(*ids: int, day: str = "mon") -> pa.Table:
    return pa.table({"id": list(ids), "day": [day] * len(ids)}, schema=DAYS)


def test_a_table_is_opened_once_for_all_its_epochs(orders, some, monkeypatch):
    life = orders.life()
    life.write(0, some(0))
    opened = []
    monkeypatch.setattr(Table, "open", opened.append)
    for epoch in range(1, 5):
        life.write(epoch, some(epoch))
    assert opened == []
    assert orders.ids() == [0, 1, 2, 3, 4]


def test_the_commit_of_another_driver_is_seen_on_it(orders, some):
    old, heir = orders.life(), orders.life().fresh(generation=2)
    old.write(0, some(0))
    receipts = [old.prepare(some(1), 1)]
    heir.write(1, some(1))
    with pytest.raises(Refused, match="a copy of this epoch log is at work"):
        old.rehearse(1, receipts)
    with pytest.raises(Refused, match="a copy of this epoch log is at work"):
        old.commit(1, receipts)
    assert orders.ids() == [0, 1]


def test_a_rule_made_between_two_epochs_is_respected(orders, some):
    life = orders.life()
    life.write(0, some(9))
    DeltaTable(str(orders.folder)).alter.add_constraint({"large": "id > 5"})
    with pytest.raises(RowRejected, match="breaks 'large'"):
        life.rehearse(1, [life.prepare(some(1), 1)])


def made_anew(lake) -> None:
    """Drop the table and let another grow beyond the versions that it had."""
    shutil.rmtree(lake.folder)
    lake.made(DAYS, partition_by=["day"])
    for number in range(6):
        write_deltalake(str(lake.folder), days(100 + number), mode="append")


def replacing(lake):
    lake.made(DAYS, partition_by=["day"])
    life = lake.life(mode="overwrite_partitions")
    for epoch in range(3):
        life.write(epoch, days(epoch))
    return life


def test_a_table_that_was_dropped_and_made_anew_is_read_from_its_own_beginning(lake):
    life = replacing(lake)
    made_anew(lake)
    life.write(3, days(3))
    assert lake.ids() == [3], "rows of the day that was replaced are still there"


def test_the_judge_objects_to_a_handle_of_the_table_that_was_dropped(lake, monkeypatch):
    monkeypatch.setattr(TableFiles, "stamp", lambda *_: (0, 0))
    life = replacing(lake)
    made_anew(lake)
    life.write(3, days(3))
    assert lake.ids() != [3]


def test_a_young_table_in_the_place_of_an_old_one_gets_its_rows(orders, some):
    life = orders.life()
    for epoch in range(3):
        life.write(epoch, some(epoch))
    shutil.rmtree(orders.folder)
    orders.made(ORDERS)
    life.write(3, some(3))
    assert orders.ids() == [3]
    assert DeltaTable(str(orders.folder)).version() == 1


def test_a_log_that_was_put_back_to_an_older_version_is_gone_on_from_there(orders, some):
    life = orders.life()
    for epoch in range(4):
        life.write(epoch, some(epoch))
    for version in (3, 4):
        (orders.folder / "_delta_log" / f"{version:020d}.json").unlink()
    life.write(4, some(4))
    assert orders.ids() == [0, 1, 4]
    assert DeltaTable(str(orders.folder)).version() == 3


def test_a_log_that_was_cleaned_up_behind_it_is_read_from_the_checkpoint(orders, some):
    life = orders.life()
    life.write(0, some(0))
    other = orders.life(name="other")
    for epoch in range(5):
        other.write(epoch, some(10 + epoch))
    table = DeltaTable(str(orders.folder))
    table.create_checkpoint()
    for version in range(table.version()):
        (orders.folder / "_delta_log" / f"{version:020d}.json").unlink()
    life.write(1, some(1))
    assert orders.ids() == [0, 1, 10, 11, 12, 13, 14]


def test_a_handle_on_which_something_failed_is_not_used_again(orders, some):
    table = Table(orders.life().sink.table_files())
    with table.newest() as first:
        pass
    with pytest.raises(TryAgain), table.newest() as second:
        raise TryAgain("the connection was reset")
    with table.newest() as third:
        pass
    assert first is second
    assert third is not second


def test_one_handle_is_not_lent_to_two_at_a_time(orders):
    table = Table(orders.life().sink.table_files())
    with table.newest() as hanging, table.newest() as other:
        assert hanging is not other


@pytest.mark.parametrize("options", [{}, {"mode": "merge", "keys": "id"}], ids=str)
def test_all_that_a_version_names_is_on_disk_before_the_commit_returns(
    orders, some, monkeypatch, options
):
    life, synced = orders.life(**options), set()
    real = os.fsync

    def noted(descriptor: int) -> None:
        synced.add(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    for epoch in range(3):
        life.write(epoch, some(epoch, 10 + epoch, name="two\u2028lines"))
    log = orders.folder / "_delta_log"
    versions = [log / f"{number:020d}.json" for number in (1, 2, 3)]
    lines = [json.loads(line) for path in versions for line in path.read_text().split("\n") if line]
    added = [orders.folder / unquote(line["add"]["path"]) for line in lines if "add" in line]
    assert added
    assert {str(path) for path in (*versions, *added, log, orders.folder)} <= synced
