"""A warehouse with a SQL catalog, and a pipeline in miniature for each test."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.types import LongType, NestedField, StringType
from sinks.life import Life

from epochal.sinks.iceberg import Iceberg

_numbers = itertools.count(1)
ORDERS = Schema(NestedField(1, "id", LongType()), NestedField(2, "name", StringType()))


@dataclass
class Warehouse:
    """A catalog as its users open it, and a reader of its tables that knows nothing of ours."""

    properties: dict[str, str]
    numbers: Iterator[int] = field(default_factory=lambda: _numbers)
    catalog: Catalog = field(init=False)

    def __post_init__(self) -> None:
        self.catalog = load_catalog("lake", **self.properties)
        self.catalog.create_namespace_if_not_exists("shop")

    def create(
        self,
        schema: Schema = ORDERS,
        spec: PartitionSpec = UNPARTITIONED_PARTITION_SPEC,
        **options: Any,
    ) -> str:
        name = f"shop.orders{next(self.numbers)}"
        self.catalog.create_table(name, schema=schema, partition_spec=spec, **options)
        return name

    def sink(self, table: str, **options: Any) -> Iceberg:
        return Iceberg(f"lake.{table}", **{"properties": self.properties, **options})

    def load(self, name: str) -> Table:
        return self.catalog.load_table(name)

    def rows(self, name: str, **scan: Any) -> list[dict[str, Any]]:
        return self.load(name).scan(**scan).to_arrow().to_pylist()

    def ids(self, name: str) -> list[int]:
        return sorted(row["id"] for row in self.rows(name))

    def history(self, name: str) -> list[dict[str, str]]:
        """The summaries of all snapshots, in order."""
        return [dict(one.summary.additional_properties) for one in self.load(name).snapshots()]

    def leftovers(self, name: str) -> list[str]:
        """Files of ours that no live snapshot of the table needs."""
        table = self.load(name)
        folder = Path(table.location().removeprefix("file://")) / "data" / "epochal"
        used = {
            entry.data_file.file_path.removeprefix("file://")
            for snapshot in table.snapshots()
            for manifest in snapshot.manifests(table.io)
            for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=False)
        }
        there = [path for path in folder.rglob("*") if path.is_file()]
        empty = [path for path in folder.glob("epochal-*") if not any(path.iterdir())]
        return [str(path) for path in [*there, *empty] if str(path) not in used]


@pytest.fixture
def open_warehouse() -> Iterator[Callable[[dict[str, str]], Warehouse]]:
    made: list[Warehouse] = []

    def opened(properties: dict[str, str]) -> Warehouse:
        made.append(Warehouse(properties))
        return made[-1]

    yield opened
    for warehouse in made:
        warehouse.catalog.close()


@pytest.fixture
def warehouse(tmp_path: Path, open_warehouse) -> Warehouse:
    """SQLite and a local folder: a whole Iceberg, with nothing to start."""
    return open_warehouse(
        {
            "type": "sql",
            "uri": f"sqlite:///{tmp_path}/catalog.db",
            "warehouse": f"file://{tmp_path}/warehouse",
        }
    )


@pytest.fixture
def live() -> Iterator[Callable[..., Life]]:
    lives: list[Life] = []

    def born(sink: Iceberg, **changes: Any) -> Life:
        lives.append(Life(sink=sink, **changes))
        return lives[-1]

    yield born
    for life in lives:
        life.close()


def orders(*ids: int, name: str = "row") -> pa.Table:
    return pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "name": pa.array([f"{name} {i}" for i in ids], pa.string()),
        }
    )


@pytest.fixture
def some() -> Callable[..., pa.Table]:
    """Rows with these ids."""
    return orders
