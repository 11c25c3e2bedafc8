"""Somebody puts a table back: Delta's RESTORE, Iceberg's rollback. Lost epochs are noticed."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyiceberg.catalog import load_catalog
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField

from epochal import Delta, Iceberg, Session
from epochal.coordinator import by_hand
from epochal.errors import WentBack
from epochal.logs import open_log
from epochal.protocol.state import Accepted
from epochal.terms import EpochNumber

SCHEMA = pa.schema([("id", pa.int64())])


class DeltaPlace:
    def __init__(self, folder):
        self.url = str(folder / "delta")
        DeltaTable.create(self.url, SCHEMA)
        self.sink = Delta(self.url, name="o")

    @property
    def table(self):
        return DeltaTable(self.url)

    def now(self):
        return self.table.version()

    def append(self, number):
        write_deltalake(self.url, pa.table({"id": [number]}, SCHEMA), mode="append")

    def put_back(self, version):
        self.table.restore(version)

    def ids(self):
        return sorted(self.table.to_pyarrow_table().column("id").to_pylist())


class DeltaByTime(DeltaPlace):
    """By the times of the log's files, as delta-rs does: ten seconds from one to the next."""

    def put_back(self, version):
        self.table.restore(self.spread_to(version))

    def put_back_between(self, version):
        """To a time after the commit itself, and before that of its file."""
        self.table.restore(self.spread_to(version) - timedelta(seconds=5))

    def spread_to(self, version):
        later_s = int(time.time()) + 60  # than any commit
        for file in sorted(Path(self.url, "_delta_log").glob("*.json")):
            written_s = later_s + 10 * int(file.stem)
            os.utime(file, (written_s, written_s))
        return datetime.fromtimestamp(later_s + 10 * version, UTC)


class IcebergPlace:
    def __init__(self, folder):
        properties = {
            "type": "sql",
            "uri": f"sqlite:///{folder}/catalog.db",
            "warehouse": f"file://{folder}/warehouse",
        }
        self.catalog = load_catalog("lake", **properties)
        self.catalog.create_namespace("shop")
        self.catalog.create_table("shop.o", Schema(NestedField(1, "id", LongType())))
        self.sink = Iceberg("lake.shop.o", properties=properties, name="o")

    @property
    def table(self):
        return self.catalog.load_table("shop.o")

    def now(self):
        return self.table.current_snapshot().snapshot_id

    def append(self, number):
        self.table.append(pa.table({"id": [number]}, SCHEMA))

    def put_back(self, snapshot):
        self.table.manage_snapshots().rollback_to_snapshot(snapshot).commit()

    def ids(self):
        return sorted(self.table.scan().to_arrow().column("id").to_pylist())


class IcebergExpired(IcebergPlace):
    """What was rolled back is gone for good."""

    def put_back(self, snapshot):
        super().put_back(snapshot)
        kept = {one.snapshot_id for one in self.table.metadata.snapshots if one.snapshot_id}
        lineage, at = set(), self.table.current_snapshot()
        while at is not None:
            lineage.add(at.snapshot_id)
            parent = at.parent_snapshot_id
            at = None if parent is None else self.table.snapshot_by_id(parent)
        expiry = self.table.maintenance.expire_snapshots()
        for gone in kept - lineage:
            expiry.by_id(gone)
        expiry.commit()


@pytest.fixture(params=[DeltaPlace, DeltaByTime, IcebergPlace, IcebergExpired])
def place(request, tmp_path):
    place = request.param(tmp_path)
    yield place
    if isinstance(place, IcebergPlace):
        place.catalog.close()


def session(place, tmp_path):
    return Session("p", sinks=[place.sink], log=tmp_path / "log", schema=SCHEMA)


def epoch(session, number, *, rows=1):
    session.begin(number, offsets=f"row {number}")
    session.write([{"id": number}] * rows)
    session.commit()


def test_epochs_that_are_gone_are_noticed_by_a_running_driver_and_at_a_start(place, tmp_path):
    with session(place, tmp_path) as running:
        epoch(running, 0)
        epoch(running, 1)
        before = place.now()
        epoch(running, 2)
        epoch(running, 3)
        place.put_back(before)
        with pytest.raises(WentBack, match="proves epochs up to 1, and epoch 3 was committed"):
            epoch(running, 4)
    with pytest.raises(WentBack, match="Missing there: epochs 2 to 3"):
        session(place, tmp_path)
    assert place.ids() == [0, 1]
    word = Accepted(
        sink="o",
        after=EpochNumber(1),
        since=EpochNumber(2),
        through=EpochNumber(3),
        by="ann",
        because="put back",
    )
    by_hand.accept(open_log(tmp_path / "log"), word)
    with session(place, tmp_path) as after:
        epoch(after, 4)
        epoch(after, 5, rows=0)
        epoch(after, 6)
    with session(place, tmp_path) as again:
        epoch(again, 7)
    assert place.ids() == [0, 1, 4, 6, 7]


def test_a_table_that_was_put_back_to_a_time_is_judged_by_its_files(tmp_path):
    place = DeltaByTime(tmp_path)
    with session(place, tmp_path) as running:
        for number in range(4):
            epoch(running, number)
        place.put_back_between(place.now() - 2)
        with pytest.raises(WentBack, match="proves epochs up to 0, and epoch 3 was committed"):
            epoch(running, 4)
    assert place.ids() == [0]


def test_what_others_wrote_may_be_put_back(place, tmp_path):
    with session(place, tmp_path) as running:
        epoch(running, 0)
        epoch(running, 1)
        before = place.now()
        place.append(100)
        place.put_back(before)
        epoch(running, 2)
        epoch(running, 3, rows=0)
        before = place.now()
        place.append(101)
        place.put_back(before)
    with session(place, tmp_path) as after:
        epoch(after, 4)
    assert place.ids() == [0, 1, 2, 4]
