"""The promises of `contract`, judged as every sink is judged."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from epochal.sinks.iceberg.sink import PROMISES
from epochal.testing.conformance import SinkConformance, Target

SECRET = "hunter2-s3cret"


class TestIceberg(SinkConformance):
    # A small buffer: memory must not grow once it is full.
    options: Mapping[str, Any] = MappingProxyType({"buffer_bytes_max": 4 << 20})

    @pytest.fixture(autouse=True)
    def _at(self, warehouse) -> None:
        self._warehouse = warehouse

    def make(self, tmp_path: Path) -> Target:
        warehouse = self._warehouse
        name = warehouse.create()
        properties = {**warehouse.properties, "s3.secret-access-key": SECRET}
        return Target(
            sink=warehouse.sink(name, properties=properties, **self.options),
            visible=lambda: warehouse.rows(name),
            leftovers=lambda: warehouse.leftovers(name),
            secrets=[SECRET],
            misconfigured={"a missing table": warehouse.sink("shop.nowhere", **self.options)},
            cannot={**PROMISES[0].cannot, "be unreachable": "the catalog and the table are files"},
        )
