"""The folder of a demonstration: its paths, the source in it, and the pipeline."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from epochal.contract import Sink
from epochal.terms import SinkName

PIPELINE = "demo"
ORDERS = SinkName("orders")
EVENTS = SinkName("events")
AMOUNTS = SinkName("amounts")
TABLE = "orders"
TOPIC = "orders"
SCHEMA = "id BIGINT, part INT, customer STRING, amount DOUBLE"
_MTIME_FIRST = 1_700_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """Of the servers of a demonstration."""

    postgres: str
    kafka: str


@dataclass(frozen=True, slots=True)
class Workspace:
    """The paths of a demonstration, which its drivers derive from `root` too."""

    root: Path

    @property
    def source(self) -> Path:
        return self.root / "source"

    @property
    def checkpoint(self) -> Path:
        return self.root / "checkpoint"

    @property
    def driver_log(self) -> Path:
        return self.root / "driver.log"

    @property
    def amounts(self) -> Path:
        return self.root / "amounts"

    @property
    def addresses(self) -> Addresses:
        return Addresses(**json.loads(self._addresses.read_text()))

    def save_addresses(self, addresses: Addresses) -> None:
        """For the drivers, which are other processes."""
        self._addresses.write_text(json.dumps(asdict(addresses)))

    @property
    def _addresses(self) -> Path:
        return self.root / "addresses.json"

    def sinks(self) -> list[Sink]:
        """Three sinks under one decision: a table, a topic, and three of the columns as CSV."""
        from epochal.sinks.files import Files  # noqa: PLC0415  drivers are the demo's extras
        from epochal.sinks.kafka import Kafka  # noqa: PLC0415  the same
        from epochal.sinks.postgres import Postgres  # noqa: PLC0415  the same

        at = self.addresses
        return [
            Postgres(at.postgres, table=TABLE, create_table="if_missing", name=ORDERS),
            Kafka(at.kafka, topic=TOPIC, key="id", name=EVENTS),
            Files(
                str(self.amounts),
                format="csv",
                select=["id", "part", "amount"],
                name=AMOUNTS,
            ),
        ]


def write_source(folder: Path, *, rows: int, parts: int) -> None:
    """
    Write `rows` numbered orders as `parts` files, each of which becomes an epoch; their times rise,
    as Spark reads the oldest first.
    """
    folder.mkdir(parents=True)
    for part, ids in enumerate(_shares(rows, parts)):
        table = pa.table(
            {
                "id": pa.array(ids, pa.int64()),
                "part": pa.array([part] * len(ids), pa.int32()),
                "customer": pa.array([f"customer {number % 997}" for number in ids]),
                "amount": pa.array([number % 10_000 / 100 for number in ids]),
            }
        )
        file = folder / f"part-{part:05d}.parquet"
        pq.write_table(table, file)
        os.utime(file, (_MTIME_FIRST + part, _MTIME_FIRST + part))


def part_sizes(rows: int, parts: int) -> list[int]:
    """Return the number of rows of each part."""
    return [len(ids) for ids in _shares(rows, parts)]


def _shares(rows: int, parts: int) -> Iterator[range]:
    bounds = [rows * at // parts for at in range(parts + 1)]
    return (range(low, high) for low, high in pairwise(bounds))
