"""A table and a pipeline in miniature for each test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from sinks.delta import delta_stage
from sinks.life import Life

from epochal.sinks.delta import Delta


@dataclass(kw_only=True)
class Lake:
    """One table of one test."""

    folder: Path

    def made(self, schema: pa.Schema, **options: Any) -> Any:
        return delta_stage.made(self.folder, schema, **options)

    def life(self, **options: Any) -> Life:
        return Life(sink=Delta(self.folder, **options))

    def rows(self, columns: str = "*") -> list[tuple[Any, ...]]:
        found = delta_stage.rows(self.folder, columns)
        return sorted((tuple(row.values()) for row in found), key=repr)

    def ids(self) -> list[int]:
        return sorted(row["id"] for row in delta_stage.rows(self.folder, "id"))

    def leftovers(self) -> list[str]:
        return delta_stage.leftovers(self.folder)


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(folder=tmp_path / "table")


ORDERS = pa.schema([pa.field("id", pa.int64()), pa.field("name", pa.string())])


@pytest.fixture
def orders(lake: Lake) -> Lake:
    lake.made(ORDERS)
    return lake


@pytest.fixture
def some() -> Callable[..., pa.Table]:
    """Rows with these ids."""

    def made(*ids: int, name: str = "n") -> pa.Table:
        names = [f"{name}{number}" for number in ids]
        return pa.table({"id": list(ids), "name": names}, schema=ORDERS)

    return made
