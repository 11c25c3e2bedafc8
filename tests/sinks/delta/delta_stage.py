"""Tables to write to, read by deltalake's own reader, and what must not be left below them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder


def made(folder: Path, schema: pa.Schema, **options: Any) -> DeltaTable:
    return DeltaTable.create(str(folder), schema, **options)


def rows(folder: Path, columns: str = "*") -> list[dict[str, Any]]:
    """What a reader of the newest version sees, by deltalake's SQL engine."""
    query = QueryBuilder().register("t", DeltaTable(str(folder)))
    return pa.table(query.execute(f"SELECT {columns} FROM t").read_all()).to_pylist()


def leftovers(folder: Path) -> list[str]:
    """Notes, staged rows, and files of ours that no version names, now or before."""
    named = set()
    for version in range(DeltaTable(str(folder)).version() + 1):
        named |= set(DeltaTable(str(folder), version=version).file_uris())
    hidden = [path for path in (folder / "_epochal").rglob("*") if path.is_file()]
    data = [path for path in folder.rglob("epochal-*.parquet") if str(path) not in named]
    return [str(path) for path in (*hidden, *data)]
