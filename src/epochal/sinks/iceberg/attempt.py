"""The files of one attempt: a marker first, then data, each file in one partition.

Whoever aborts an attempt removes its files, then its marker, then whatever came in between; whoever
writes one looks for its marker once more when all is written. So of an attempt that is aborted
while it still writes, one of the two removes every file.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass

import pyarrow as pa
from pyiceberg.manifest import DataFile
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.typedef import Record

from epochal.errors import TryAgain
from epochal.kit import parquet
from epochal.sinks.iceberg.inside import ParquetFile
from epochal.sinks.iceberg.layout import Layout
from epochal.sinks.iceberg.splitting import in_order, split
from epochal.sinks.iceberg.storage import Storage
from epochal.terms import Handle


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLimits:
    file_bytes_max: int
    open_files_max: int


class Attempt:
    """Writes rows, already in the table's columns, to files below the attempt's own folder."""

    def __init__(
        self,
        handle: Handle,
        *,
        metadata: TableMetadata,
        storage: Storage,
        layout: Layout,
        limits: FileLimits,
    ) -> None:
        self._handle = handle
        self._metadata = metadata
        self._storage = storage
        self._layout = layout
        self._limits = limits
        self._schema = metadata.schema()
        self._order = metadata.sort_order()
        self._open: OrderedDict[str, ParquetFile] = OrderedDict()
        self._done: list[DataFile] = []
        self._dictionaries: list[str] | None = None
        self._is_marked = False
        self._number = 0

    @property
    def folder(self) -> str:
        return self._layout.folder(self._handle)

    @property
    def is_sorted(self) -> bool:
        return bool(self._order.fields)

    def write(self, rows: pa.Table) -> None:
        if not rows.num_rows:
            return
        if not self._is_marked:
            self._storage.put(self._layout.marker(self._handle))
            self._is_marked = True
        if self._dictionaries is None:
            self._dictionaries = parquet.repeating(parquet.sample(rows))
        if self.is_sorted:
            rows = in_order(rows, self._order, self._schema)
        for partition, some in split(rows, self._metadata.spec(), self._schema):
            self._write(partition, some)
        # A file is sorted only as a whole, so what comes next belongs into another one.
        for key in list(self._open) if self.is_sorted else ():
            self._close(key)

    def finish(self) -> list[DataFile]:
        """Make all files durable; afterwards the attempt is prepared."""
        try:
            for key in list(self._open):
                self._close(key)
            is_aborted = self._is_marked and not self._is_still_marked()
        except FileNotFoundError:
            is_aborted = True
        if is_aborted:
            self._remove_files()
            raise TryAgain(f"{self._handle} was aborted while it was still writing")
        return self._done

    def discard(self) -> None:
        for file in self._open.values():
            with suppress(Exception):
                file.close(sort_order_id=None)
        self._open.clear()
        self._done.clear()
        if self._is_marked:
            discard(self._handle, storage=self._storage, layout=self._layout)

    def _write(self, partition: Record, rows: pa.Table) -> None:
        key = repr(partition)
        file = self._open.get(key)
        if file is None:
            if len(self._open) >= self._limits.open_files_max:
                self._close(next(iter(self._open)))
            file = self._open[key] = self._new(partition)
        self._open.move_to_end(key)
        file.write(rows)
        if file.arrow_bytes >= self._limits.file_bytes_max:
            self._close(key)

    def _new(self, partition: Record) -> ParquetFile:
        location = self._layout.file(self._handle, f"{self._number:05d}.parquet")
        self._number += 1
        self._storage.make_room(location)
        return ParquetFile(
            self._storage.io,
            self._metadata,
            location,
            partition,
            dictionaries=self._dictionaries or (),
        )

    def _close(self, key: str) -> None:
        file = self._open.pop(key)
        order = self._order.order_id if self.is_sorted else None
        self._done.append(file.close(sort_order_id=order))
        self._storage.settle(file.location)

    def _is_still_marked(self) -> bool:
        return self._storage.exists(self._layout.marker(self._handle))

    def _remove_files(self) -> None:
        self._storage.delete(self._storage.below(self.folder))
        self._storage.remove_folder(self.folder)


def discard(handle: Handle, *, storage: Storage, layout: Layout) -> None:
    """Remove what an attempt left, whether it still writes or not. May be repeated."""
    folder = layout.folder(handle)
    storage.delete(storage.below(folder))
    storage.delete([layout.marker(handle)])
    storage.delete(storage.below(folder))
    storage.remove_folder(folder)
