"""
Files that one job of Spark's own writer has left in a folder of its own.

    <folder>/day=2026-01-31/part-00003-….snappy.parquet    as the commit of the job put it there
    <folder>/_temporary/0/…                                what late tasks still write

A sink moves the first kind to where it prepares files, under a name that holds the job's handle.
Nothing is taken from `_temporary/`: those are attempts that don't count.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from epochal.errors import Misconfigured, TryAgain
from epochal.kit.marked_files import at_once
from epochal.terms import quantity

_SHARED = (
    "the folder must be one and the same for the driver and every executor: a shared mount, or one "
    "machine (local[*])"
)
_SPARK_CODECS = {"lz4": "lz4_raw"}
"""Spark's names of codecs, where they differ from Arrow's."""


def writer_options(compression: str) -> dict[str, str]:
    """Options of Spark's parquet writer."""
    return {"compression": _SPARK_CODECS.get(compression, compression)}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFile:
    """A parquet file as Spark's writer has left it, with at least one row."""

    path: Path
    partition: str
    """Its folder below that of the job, as `day=2026-01-31`; empty without partitions."""
    footer: pq.FileMetaData

    @property
    def rows(self) -> int:
        return int(self.footer.num_rows)

    def move_to(self, place: Path) -> None:
        self.path.rename(place)
        _checksum_of(self.path).unlink(missing_ok=True)


def engine_files(folder: Path, *, rows: int) -> list[EngineFile]:
    """
    The files of a job that succeeded; those without rows are removed.

    Raises where they don't hold as many rows as the writer was given: one was lost between the
    commit of its task and that of the job, or the driver does not see what executors write.
    """
    found = sorted(_written(folder))
    footers = at_once(_footer_of, found)
    counted = sum(int(footer.num_rows) for footer in footers)
    if counted != rows:
        raise _not_as_written(folder, len(found), counted, rows)
    files = [
        EngineFile(path=path, partition=_partition(folder, path), footer=footer)
        for path, footer in zip(found, footers, strict=True)
    ]
    for file in files:
        if not file.rows:
            _checksum_of(file.path).unlink(missing_ok=True)
            file.path.unlink()
    return [file for file in files if file.rows]


def _written(folder: Path) -> Iterator[Path]:
    """Files of committed tasks: Hadoop keeps its own under names that begin with `_` or `.`."""
    for inner, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(("_", "."))]
        yield from (Path(inner) / name for name in names if not name.startswith(("_", ".")))


def _partition(folder: Path, path: Path) -> str:
    relative = path.parent.relative_to(folder)
    return "" if relative == Path() else str(relative)


def _checksum_of(path: Path) -> Path:
    """Hadoop keeps one beside each file of a local disk."""
    return path.with_name(f".{path.name}.crc")


def _footer_of(path: Path) -> pq.FileMetaData:
    try:
        return pq.read_metadata(path)
    except (OSError, pa.ArrowException) as error:
        raise TryAgain(
            f"{path}, which Spark has just written, can't be read: {error}",
            "the epoch is tried again at the next start",
        ) from error


def _not_as_written(folder: Path, files: int, counted: int, rows: int) -> Misconfigured | TryAgain:
    fact = (
        f"Spark has written {quantity(rows, 'row')}, and the {quantity(files, 'file')} in {folder} "
        f"have {quantity(counted, 'row')}"
    )
    if not files:
        return Misconfigured(fact, _SHARED)
    return TryAgain(
        fact,
        "an executor that Spark had given up removed or replaced files of another; nothing was "
        "decided, and the epoch is tried again at the next start",
    )
