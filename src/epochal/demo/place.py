"""Where a demonstration keeps its things, and the pipeline that both its processes know."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from epochal.contract import Sink
from epochal.sinks.files import Files
from epochal.terms import SinkName

PIPELINE = "demo"
ORDERS = SinkName("orders")
AMOUNTS = SinkName("amounts")


@dataclass(frozen=True, slots=True)
class Place:
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

    def target(self, sink: SinkName) -> Path:
        return self.root / "targets" / sink

    def sinks(self) -> list[Sink]:
        """Two sinks under one decision: all columns as parquet, three of them as CSV."""
        return [
            Files(str(self.target(ORDERS)), name=ORDERS),
            Files(
                str(self.target(AMOUNTS)),
                format="csv",
                select=["id", "part", "amount"],
                name=AMOUNTS,
            ),
        ]
