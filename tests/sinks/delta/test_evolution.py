"""Columns and partitions that change between any two steps of an epoch."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.schema import Field, PrimitiveType
from sinks.changing_table import AdaptedDriver
from sinks.delta.conftest import Lake
from sinks.life import Life

from epochal.errors import Misconfigured, PreparedLost, RowRejected

KINDS = {"string": pa.string(), "long": pa.int64(), "integer": pa.int32()}


def table_of(lake: Lake) -> pa.Table:
    return DeltaTable(str(lake.folder)).to_pyarrow_table()


def put(lake: Lake, rows: pa.Table, partition_by: list[str] | None = None) -> None:
    """Somebody writes the whole table anew."""
    write_deltalake(
        str(lake.folder),
        rows,
        mode="overwrite",
        schema_mode="overwrite",
        partition_by=partition_by or [],
    )


@pytest.mark.parametrize("options", [{}, {"mode": "merge", "keys": "id"}], ids=["append", "merge"])
@pytest.mark.parametrize("is_restarted", [False, True])
def test_rows_for_columns_that_were_overwritten_after_the_decision_are_reported_as_lost(
    orders, some, options, is_restarted
):
    life = orders.life(**options)
    life.start(some(1))
    receipts = [life.prepare(some(1), 0)]
    life.rehearse(0, receipts)
    put(orders, pa.table({"id": [5], "name": [5]}))
    with pytest.raises(PreparedLost, match="its column 'name' is long now"):
        (life.fresh() if is_restarted else life).commit(0, receipts)
    assert orders.rows() == [(5, 5)]


def test_a_column_that_was_added_after_the_decision_loses_no_row(orders, some):
    life = orders.life()
    life.start(some(1))
    receipts = [life.prepare(some(1), 0)]
    life.rehearse(0, receipts)
    added = Field("note", PrimitiveType("string"), nullable=True)
    DeltaTable(str(orders.folder)).alter.add_columns([added])
    life.commit(0, receipts)
    assert orders.rows() == [(1, "n1", None)]


def map_columns(lake: Lake, mode: str, names: dict[str, str]) -> None:
    """Somebody makes the table map column names, to these in its files: delta-rs can't."""
    version = DeltaTable(str(lake.folder)).version()
    log = lake.folder / "_delta_log"
    lines = [json.loads(line) for line in (log / f"{0:020d}.json").read_text().splitlines()]
    (metadata,) = [one["metaData"] for one in lines if "metaData" in one]
    schema = json.loads(metadata["schemaString"])
    for number, column in enumerate(schema["fields"], 1):
        column["metadata"] = {
            "delta.columnMapping.id": number,
            "delta.columnMapping.physicalName": names.get(column["name"], column["name"]),
        }
    metadata |= {
        "schemaString": json.dumps(schema),
        "configuration": {"delta.columnMapping.mode": mode, "delta.columnMapping.maxColumnId": "9"},
    }
    actions = [{"protocol": {"minReaderVersion": 2, "minWriterVersion": 5}}, {"metaData": metadata}]
    path = log / f"{version + 1:020d}.json"
    path.write_text("\n".join(map(json.dumps, actions)))


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize(
    "mapped",
    [
        ("name", {}, None),
        ("name", {"name": "col-7"}, "its column 'name' has another name in files now"),
        ("id", {}, "readers know columns by number now"),
    ],
)
def test_rows_whose_columns_are_mapped_after_the_decision_are_committed_only_if_readers_find_them(
    orders, some, mapped, is_restarted
):
    """A column that is dropped and added again has another name in files than before."""
    mode, names, why = mapped
    life = orders.life()
    life.start(some(1))
    receipts = [life.prepare(some(1), 0)]
    life.rehearse(0, receipts)
    map_columns(orders, mode, names)
    driver = life.fresh() if is_restarted else life
    if why is None:
        driver.commit(0, receipts)
        assert orders.rows() == [(1, "n1")]
    else:
        with pytest.raises(PreparedLost, match=why):
            driver.commit(0, receipts)
        assert orders.rows() == []
    with pytest.raises(Misconfigured, match=f"columnMapping.mode={mode}") as refused:
        life.fresh().committer.check(some(1).schema)
    assert "DROP FEATURE columnMapping" in refused.value.hint


@pytest.mark.parametrize("value", ["", "__HIVE_DEFAULT_PARTITION__", "a\0b"])
def test_a_partition_value_that_names_no_folder_is_refused(lake, value):
    schema = pa.schema([("id", pa.int64()), ("area", pa.string())])
    lake.made(schema, partition_by=["area"])
    life = lake.life()
    life.write(0, pa.table({"id": [1, 2], "area": ["a", None]}, schema=schema))
    with pytest.raises(RowRejected, match="'area' has "):
        life.prepare(pa.table({"id": [3], "area": [value]}, schema=schema), 1)
    assert lake.rows("id, area") == [(1, "a"), (2, None)]


@dataclass
class Changes:
    """What others do to a table, by chance. All rows stay, and their values as far as they can."""

    lake: Lake
    chance: random.Random
    numbers: int = 0
    done: list[str] = field(default_factory=list)

    def maybe(self, likely: float = 0.3) -> None:
        if self.chance.random() < likely:
            verb = self.chance.choice([self.add, self.drop, self.retype, self.split, self.join])
            self.done.append(verb.__name__)
            verb()

    def add(self) -> None:
        self.numbers += 1
        kind = PrimitiveType(self.chance.choice(list(KINDS)))
        added = Field(f"added{self.numbers}", kind, nullable=True)
        DeltaTable(str(self.lake.folder)).alter.add_columns([added])

    def drop(self) -> None:
        for name in self._some():
            put(self.lake, table_of(self.lake).drop_columns([name]))

    def retype(self) -> None:
        for name in self._some():
            rows = table_of(self.lake)
            at = rows.schema.get_field_index(name)
            kind = self.chance.choice(list(KINDS.values()))
            put(self.lake, rows.set_column(at, name, rows.column(name).cast(kind)))

    def split(self) -> None:
        put(self.lake, table_of(self.lake), self._some())

    def join(self) -> None:
        put(self.lake, table_of(self.lake))

    def _some(self) -> list[str]:
        """One column that may go, if there is one."""
        kept = [name for name in table_of(self.lake).schema.names if name not in ("id", "name")]
        return [self.chance.choice(kept)] if kept else []


def written(schema: pa.Schema, ids: range) -> pa.Table:
    """Rows with a value in every column that the table has; it follows from the id and the type."""
    values = [pa.array(ids, pa.int64()).cast(one.type) for one in schema]
    return pa.table(values, names=schema.names)


@dataclass
class Driver(AdaptedDriver):
    changes: Changes
    options: dict[str, Any]
    generation: int = 0

    def started(self) -> Life:
        self.generation += 1
        return self.changes.lake.life(**self.options).fresh(generation=self.generation)

    def rows(self, ids: range) -> pa.Table:
        return written(table_of(self.changes.lake).schema, ids)


def of_other_types(lake: Lake) -> list[tuple[str, str]]:
    """Columns of files that are not of the table's type: only some readers cast them."""
    table = DeltaTable(str(lake.folder))
    types = {column.name: column.type for column in pa.schema(table.schema())}
    return [
        (path, column.name)
        for path in table.file_uris()
        for column in pq.read_schema(path)
        # A merge of delta-rs writes Arrow's views, which are the same in parquet.
        if str(column.type).removesuffix("_view") != str(types.get(column.name, column.type))
    ]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mode", ["append", "merge"])
def test_whatever_changes_between_two_steps_every_row_is_there_once_with_its_values(
    lake, seed, mode
):
    lake.made(pa.schema([("id", pa.int64()), ("name", pa.string()), ("area", pa.string())]))
    changes = Changes(lake, random.Random(f"{seed} {mode}"))
    driver = Driver(changes, {"mode": mode, "keys": "id" if mode == "merge" else ()})
    shift = 6 if mode == "merge" else 8
    for epoch in range(6):
        driver.epoch(epoch, range(epoch * shift, epoch * shift + 8))
        assert of_other_types(lake) == [], changes.done
        rows = table_of(lake).sort_by("id")
        assert rows.column("id").to_pylist() == list(range(epoch * shift + 8)), changes.done
        assert rows.column("name").to_pylist() == [str(one) for one in range(epoch * shift + 8)]
        for row in rows.to_pylist():
            assert {str(value) for value in row.values()} <= {str(row["id"]), "None"}, row
    driver.sweep()
    assert lake.leftovers() == []
