"""The epoch log: numbered records in a store, each written once. Decisions live here.

    00000000000000000041.json    record 41
    00000000000000000042.json    record 42
    lists/<sha256>               receipts of a large decision: see protocol.receipts
    history/                     a store beside the log, for people: see telemetry.history

A log only stores. The rules of the sequence (nonces, list after put, a gap is not an end), and
which lists may be deleted, are the journal's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from epochal.storage import Store, open_store
from epochal.storage.memory import MemoryStore
from epochal.storage.urls import canonical, require_expanded

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_RECORD = re.compile(r"(?P<number>[0-9]{20})\.json")
_LISTS = "lists"
_FOLDER = "epochal/log"


class StoredLog:
    """The epoch log in any store: the `EpochLog` of the journal. Usable from any thread."""

    def __init__(self, store: Store) -> None:
        self.store = store

    @property
    def place(self) -> str:
        return self.store.location

    def put_if_absent(self, number: int, record: bytes) -> bool:
        return self.store.put_if_absent(record_name(number), record)

    def numbers(self) -> Sequence[int]:
        numbers = (record_number(name) for name in self.store.names())
        return sorted(number for number in numbers if number is not None)

    def read(self, number: int) -> bytes | None:
        return self.store.read(record_name(number))

    def delete(self, numbers: Sequence[int]) -> None:
        self.store.delete([record_name(number) for number in numbers])

    def put_list(self, name: str, content: bytes) -> None:
        # Not if absent: the name is a digest of the content, so a repeated put changes nothing.
        self.store.put(f"{_LISTS}/{name}", content)

    def read_list(self, name: str) -> bytes | None:
        return self.store.read(f"{_LISTS}/{name}")

    def list_names(self) -> Sequence[str]:
        return self.store.names(_LISTS)

    def delete_lists(self, names: Sequence[str]) -> None:
        self.store.delete([f"{_LISTS}/{name}" for name in names])

    def close(self) -> None:
        self.store.close()


class MemoryLog(StoredLog):
    """For tests, simulation and sessions whose targets end with the process, as this log does."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())


def open_log(place: str | os.PathLike[str], *, spark: SparkSession | None = None) -> StoredLog:
    """The epoch log at a path or URL, as `open_store` reads it. Opening creates nothing."""
    return StoredLog(open_store(place, spark=spark))


def checkpoint_log(
    checkpoint: str | os.PathLike[str], *, spark: SparkSession | None = None
) -> StoredLog:
    """
    The default log of a pipeline: the folder `epochal/log` inside Spark's checkpoint location.

    A path without a scheme is where Spark sees it: on a cluster that may be HDFS.
    """
    return open_log(f"{located(checkpoint, spark)}/{_FOLDER}", spark=spark)


def checkpoint_of(place: str) -> str | None:
    """The checkpoint that a log at this place lies in; None where it lies by itself."""
    folder = place.removesuffix(f"/{_FOLDER}")
    return None if folder == place else folder


def located(checkpoint: str | os.PathLike[str], spark: SparkSession | None = None) -> str:
    """A checkpoint's location in the one form that identity is compared by."""
    text = os.fspath(checkpoint)
    require_expanded(text)
    if spark is not None:
        from epochal.storage.hadoop import qualified  # noqa: PLC0415  needs py4j, as Spark does

        text = qualified(spark, text)
    return canonical(text)


def record_name(number: int) -> str:
    """Twenty digits, so that names sort as numbers do."""
    return f"{number:020d}.json"


def record_number(name: str) -> int | None:
    """The number in a record's name, None where the key is not a record."""
    found = _RECORD.fullmatch(name)
    return None if found is None else int(found["number"])
