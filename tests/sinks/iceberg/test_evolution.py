"""Columns and partitions that change between any two steps of an epoch."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.transforms import BucketTransform, IdentityTransform, TruncateTransform
from pyiceberg.types import (
    IcebergType,
    IntegerType,
    LongType,
    NestedField,
    StringType,
)
from servers.iceberg import planned_by_java
from sinks.changing_table import AdaptedDriver
from sinks.iceberg.conftest import Warehouse
from sinks.life import Life

from epochal.errors import PreparedLost

BY_AREA = PartitionSpec(PartitionField(3, 1000, TruncateTransform(2), "area_start"))
ORDERS = Schema(
    NestedField(1, "id", LongType()),
    NestedField(2, "name", StringType()),
    NestedField(3, "area", StringType()),
    NestedField(4, "quantity", IntegerType()),
)
_ARROW = {LongType: pa.int64(), IntegerType: pa.int32(), StringType: pa.string()}
MERGING = {"commit.manifest.min-count-to-merge": "3"}


def written(table: Table, ids: range) -> pa.Table:
    """Rows with a value in every column that the table has; it follows from the id and the type."""
    columns = {
        column.name: pa.array(
            [value_of(number, column.field_type) for number in ids], _ARROW[type(column.field_type)]
        )
        for column in table.schema().fields
    }
    return pa.table(columns)


def value_of(number: int, kind: IcebergType) -> Any:
    return f"{number % 7} of {number}" if isinstance(kind, StringType) else number


def drop(warehouse: Warehouse, name: str, column: str) -> None:
    table = warehouse.load(name)
    by = [
        one.name
        for one in table.spec().fields
        if table.schema().find_column_name(one.source_id) == column
    ]
    if by:
        with table.update_spec() as spec:
            for one in by:
                spec.remove_field(one)
    with warehouse.load(name).update_schema(allow_incompatible_changes=True) as schema:
        schema.delete_column(column)


def add(warehouse: Warehouse, name: str, column: str, kind: IcebergType) -> None:
    with warehouse.load(name).update_schema() as schema:
        schema.add_column(column, kind)


@pytest.mark.parametrize("version", ["1", "2"])
def test_epochs_go_on_after_a_former_partition_column_was_dropped(warehouse, live, version):
    name = warehouse.create(ORDERS, BY_AREA, properties={**MERGING, "format-version": version})
    first = live(warehouse.sink(name))
    for epoch in range(2):
        first.write(epoch, written(warehouse.load(name), range(epoch * 10, epoch * 10 + 3)))
    drop(warehouse, name, "area")
    second = live(warehouse.sink(name), generation=2)
    for epoch in range(2, 5):
        second.write(epoch, written(warehouse.load(name), range(epoch * 10, epoch * 10 + 3)))
    assert warehouse.ids(name) == [i for e in range(5) for i in range(e * 10, e * 10 + 3)]


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_partition_column_dropped_after_the_decision_leaves_a_table_that_can_be_read(
    warehouse, live, is_restarted
):
    name = warehouse.create(ORDERS, BY_AREA, properties=MERGING)
    life = live(warehouse.sink(name))
    life.start(written(warehouse.load(name), range(1)))
    receipts = [life.prepare(written(warehouse.load(name), range(3)), 0)]
    life.rehearse(0, receipts)
    drop(warehouse, name, "area")
    (live(warehouse.sink(name), generation=2) if is_restarted else life).commit(0, receipts)
    assert [(row["id"], row["quantity"]) for row in warehouse.rows(name)] == [
        (0, 0),
        (1, 1),
        (2, 2),
    ]


@pytest.mark.parametrize("is_restarted", [False, True])
def test_rows_for_a_column_that_was_replaced_after_the_decision_are_reported_as_lost(
    warehouse, live, is_restarted
):
    name = warehouse.create(ORDERS)
    life = live(warehouse.sink(name))
    life.start(written(warehouse.load(name), range(1)))
    receipts = [life.prepare(written(warehouse.load(name), range(3)), 0)]
    life.rehearse(0, receipts)
    drop(warehouse, name, "quantity")
    add(warehouse, name, "quantity", StringType())
    with pytest.raises(PreparedLost, match="quantity was dropped and added again"):
        (live(warehouse.sink(name), generation=2) if is_restarted else life).commit(0, receipts)
    assert warehouse.rows(name) == []


def test_a_prepared_file_that_was_cut_is_reported_as_lost(warehouse, live, some):
    name = warehouse.create()
    life = live(warehouse.sink(name))
    life.start(some(1))
    receipts = [life.prepare(some(1, 2, 3), 0)]
    life.rehearse(0, receipts)
    (file,) = (Path(warehouse.load(name).location().removeprefix("file://"))).rglob("*.parquet")
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(PreparedLost, match="bytes, and was prepared with"):
        live(warehouse.sink(name), generation=2).commit(0, receipts)
    assert warehouse.rows(name) == []


@dataclass
class Changes:
    """What others do to a table, by chance."""

    warehouse: Warehouse
    name: str
    chance: random.Random
    numbers: int = 0
    done: list[str] = field(default_factory=list)

    def maybe(self, likely: float = 0.3) -> None:
        if self.chance.random() < likely:
            verb = self.chance.choice(
                [self.add, self.drop, self.replace, self.rename, self.widen, self.split, self.join]
            )
            self.done.append(verb.__name__)
            verb()

    def add(self) -> None:
        self.numbers += 1
        kind = self.chance.choice([StringType(), IntegerType(), LongType()])
        add(self.warehouse, self.name, f"added{self.numbers}", kind)

    def drop(self) -> None:
        for column in self._some():
            drop(self.warehouse, self.name, column.name)

    def replace(self) -> None:
        for column in self._some():
            drop(self.warehouse, self.name, column.name)
            is_text = isinstance(column.field_type, StringType)
            add(self.warehouse, self.name, column.name, LongType() if is_text else StringType())

    def rename(self) -> None:
        self.numbers += 1
        for column in self._some():
            with self._table().update_schema() as schema:
                schema.rename_column(column.name, f"renamed{self.numbers}")

    def widen(self) -> None:
        for column in self._table().schema().fields:
            if isinstance(column.field_type, IntegerType):
                with self._table().update_schema() as schema:
                    schema.update_column(column.name, LongType())

    def split(self) -> None:
        for column in self._some():
            is_text = isinstance(column.field_type, StringType)
            transform = self.chance.choice(
                [IdentityTransform(), BucketTransform(3), TruncateTransform(1 if is_text else 5)]
            )
            self.numbers += 1
            if not any(one.source_id == column.field_id for one in self._table().spec().fields):
                with self._table().update_spec() as spec:
                    spec.add_field(column.name, transform, f"part{self.numbers}")

    def join(self) -> None:
        for one in self._table().spec().fields[:1]:
            with self._table().update_spec() as spec:
                spec.remove_field(one.name)

    def _some(self) -> list[NestedField]:
        """One column that may go, if there is one."""
        kept = [one for one in self._table().schema().fields if one.name not in ("id", "name")]
        return [self.chance.choice(kept)] if kept else []

    def _table(self) -> Table:
        return self.warehouse.load(self.name)


@dataclass
class Driver(AdaptedDriver):
    changes: Changes
    live: Callable[..., Life]
    options: dict[str, Any]
    generation: int = 0

    def started(self) -> Life:
        self.generation += 1
        sink = self.changes.warehouse.sink(self.changes.name, **self.options)
        return self.live(sink, generation=self.generation)

    def rows(self, ids: range) -> pa.Table:
        return written(self.table(), ids)

    def table(self) -> Table:
        return self.changes.warehouse.load(self.changes.name)

    def judge(self, ids: range, names: Sequence[str]) -> None:
        """No value of a column that the epoch was decided with is missing."""
        kept = [name for name in names if name in self.table().schema().column_names]
        for row in self.changes.warehouse.rows(self.changes.name):
            if row["id"] in ids:
                assert None not in [row[name] for name in kept], (row, self.changes.done)


def right(rows: list[dict[str, Any]], schema: Schema) -> list[int]:
    """The ids of rows, each of which has its own values or none."""
    for row in rows:
        for column in schema.fields:
            value = row[column.name]
            assert value is None or value == value_of(row["id"], column.field_type), (row, column)
        assert row["name"] is not None
    return sorted(row["id"] for row in rows)


def planned(table: Table) -> set[tuple[str, ...]]:
    return {
        (
            table.metadata_location,
            task.file.file_path,
            str(task.file.record_count),
            str(task.file.file_size_in_bytes),
            str(task.file.spec_id),
        )
        for task in table.scan().plan_files()
    }


@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_whatever_changes_between_two_steps_every_row_is_there_once_with_its_values(
    warehouse, live, mode
):
    """Three times, by chance; at the end Iceberg's own library sees the same files."""
    options = {"mode": mode, "keys": "id"} if mode == "upsert" else {"mode": mode}
    shift = 6 if mode == "upsert" else 8
    tables = []
    for seed in range(3):
        name = warehouse.create(ORDERS, BY_AREA, properties=MERGING)
        changes = Changes(warehouse, name, random.Random(f"{seed} {mode}"))
        driver = Driver(changes, live, options)
        for epoch in range(6):
            driver.epoch(epoch, range(epoch * shift, epoch * shift + 8))
            found = right(warehouse.rows(name), warehouse.load(name).schema())
            assert found == list(range(epoch * shift + 8)), (seed, changes.done)
        driver.sweep()
        assert warehouse.leftovers(name) == []
        tables.append(warehouse.load(name))
        driver.started().committer.compact(target_bytes=2**20, is_dry_run=False)
        assert right(warehouse.rows(name), warehouse.load(name).schema()) == found
        tables.append(warehouse.load(name))
    expected = set().union(*map(planned, tables))
    assert planned_by_java(*(table.metadata_location for table in tables)) == expected
