"""The source of a demonstration: numbered orders in files, each of which becomes an epoch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

SCHEMA = "id BIGINT, part INT, customer STRING, amount DOUBLE"

_MTIME_FIRST = 1_700_000_000


def write_source(folder: Path, *, rows: int, parts: int) -> None:
    """Write `rows` orders as `parts` files; their times rise, as Spark reads the oldest first."""
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
