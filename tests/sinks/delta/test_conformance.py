"""The promises of `contract`, judged as every sink is judged."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
from sinks.delta.delta_stage import leftovers, made, rows

from epochal.sinks.delta import Delta
from epochal.testing.conformance import SinkConformance, Target
from epochal.testing.trial import SCHEMA

SECRET = "hunter2-s3cret"


class _Conformance(SinkConformance):
    options: Mapping[str, Any] = MappingProxyType({})
    schema = SCHEMA
    partitioned: tuple[str, ...] = ()

    def make(self, tmp_path: Path) -> Target:
        folder = tmp_path / "table"
        table = made(folder, self.schema, partition_by=list(self.partitioned))
        table.alter.add_constraint({"not_refused": "name IS NULL OR name <> 'refused'"})
        # A small buffer: memory must not grow once it is full.
        options = {
            "storage_options": {"secret_access_key": SECRET},
            "buffer_bytes_max": 4 << 20,
            **self.options,
        }
        return Target(
            sink=Delta(folder, partition_by=self.partitioned or None, **options),
            visible=lambda: rows(folder),
            leftovers=lambda: leftovers(folder),
            schema=self.schema,
            secrets=[SECRET],
            refused=(2, "refused"),
            misconfigured={"a missing table": Delta(tmp_path / "nowhere", **options)},
            cannot={"be unreachable": "a table in a folder has no server"},
        )


class TestAppend(_Conformance):
    pass


class TestPartitionedAppend(_Conformance):
    schema = SCHEMA.append(pa.field("day", pa.date32()))
    partitioned = ("day",)


class TestMerge(_Conformance):
    options = MappingProxyType({"mode": "merge", "keys": ["id"]})
