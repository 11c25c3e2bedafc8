"""The folder of a demonstration and the pipeline that is declared in it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from epochal.contract import Sink
from epochal.terms import SinkName

PIPELINE = "demo"
ORDERS = SinkName("orders")
EVENTS = SinkName("events")
AMOUNTS = SinkName("amounts")
TABLE = "orders"
TOPIC = "orders"


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
