"""
The writer of an Iceberg sink: data files of the table, which no snapshot names yet.

Batches are collected into blocks; while one is being filled, at most one other is encoded, in a
thread of its own, as Arrow releases the interpreter meanwhile. Memory stays within two blocks and
what open files hold back.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyiceberg.manifest import DataFile
from pyiceberg.table.metadata import TableMetadata, TableMetadataUtil
from pyiceberg.typedef import Record

from epochal.contract import Task
from epochal.errors import Misconfigured, TryAgain
from epochal.kit import parquet
from epochal.sinks.iceberg.data_files import receipt_of
from epochal.sinks.iceberg.errors import translate_errors
from epochal.sinks.iceberg.partitions import in_order, split
from epochal.sinks.iceberg.pyiceberg_private import ParquetFile
from epochal.sinks.iceberg.table_files import Layout, TableFiles, discard, layout_of
from epochal.sinks.iceberg.types import ColumnMatch, mismatches
from epochal.terms import Fingerprint, Handle, Receipt

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog

    from epochal.sinks.iceberg.sink import Iceberg

_FILE_BYTES_MAX = 128 * 1024 * 1024


class IcebergWriter:
    """One attempt's rows. Nothing is opened before the first of them."""

    def __init__(self, sink: Iceberg, task: Task) -> None:
        self._sink = sink
        self._task = task
        self._catalog: Catalog | None = None
        self._metadata: TableMetadata | None = None
        self._attempt: Attempt | None = None
        self._match: ColumnMatch | None = None
        self._batches: list[pa.RecordBatch] = []
        self._bytes = 0
        self._rows = 0
        self._encoder: ThreadPoolExecutor | None = None
        self._encoding: Future[None] | None = None

    def write(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        self._batches.append(batch)
        self._rows += batch.num_rows
        self._bytes += batch.nbytes
        if self._bytes >= self._block_bytes:
            self._wait()
            if self._encoder is None:
                self._encoder = ThreadPoolExecutor(1, thread_name_prefix="epochal-encode")
            self._encoding = self._encoder.submit(self._encode, self._taken())

    def prepare(self) -> Receipt:
        with self._errors("prepare"):
            self._wait()
            if self._batches:
                self._encode(self._taken())
        with self._errors("prepare"):
            receipt = self._receipt()
        self._close()
        return receipt

    def abort(self) -> None:
        self._batches = []
        try:
            if self._encoding is not None:
                self._encoding.exception()
            if self._attempt is not None:
                self._attempt.discard()
        finally:
            self._close()

    @property
    def _block_bytes(self) -> int:
        # A file is sorted as a whole, so where there is an order a block is a file.
        whole = self._attempt is not None and self._attempt.is_sorted
        return file_limits(self._sink).file_bytes_max if whole else self._sink.buffer_bytes_max // 2

    def _taken(self) -> pa.Table:
        block = pa.Table.from_batches(self._batches)
        self._batches, self._bytes = [], 0
        return block

    def _encode(self, block: pa.Table) -> None:
        with self._errors("write"):
            if self._attempt is None or self._match is None:
                self._attempt, self._match = self._opened(block.schema)
        with self._errors("write"):
            self._attempt.write(self._match.cast(block))

    def _opened(self, rows: pa.Schema) -> tuple[Attempt, ColumnMatch]:
        metadata, table_files = self._table()
        refused = mismatches(rows, metadata.schema())
        if refused:
            raise Misconfigured(
                f"{self._sink.address} does not take these rows: {'; '.join(refused)}",
                "the table changed while the query ran: start it again",
            )
        self._metadata = metadata
        attempt = Attempt(
            self._task.handle,
            metadata=metadata,
            files=table_files,
            layout=layout_of(metadata.location, metadata.properties),
            limits=file_limits(self._sink),
        )
        return attempt, ColumnMatch(rows, metadata.schema())

    def _table(self) -> tuple[TableMetadata, TableFiles]:
        """As the driver handed it out; from the catalog where that issues keys of its own."""
        given: Any = self._task.handout
        if given and given.get("metadata") is not None:
            metadata = TableMetadataUtil.parse_raw(json.dumps(given["metadata"]))
            return metadata, TableFiles(self._sink.address.files(metadata))
        self._catalog = self._sink.address.open()
        table = self._sink.address.load(self._catalog)
        return table.metadata, TableFiles(table.io)

    def _receipt(self) -> Receipt:
        fingerprint = Fingerprint(self._rows)
        if self._attempt is None or self._metadata is None:
            return Receipt(handle=self._task.handle, fingerprint=fingerprint, token={"files": []})
        return receipt_of(
            self._task.handle,
            fingerprint,
            self._attempt.finish(),
            folder=self._attempt.folder,
            metadata=self._metadata,
        )

    def _wait(self) -> None:
        if self._encoding is not None:
            encoding, self._encoding = self._encoding, None
            encoding.result()

    def _close(self) -> None:
        if self._encoder is not None:
            self._encoder.shutdown(wait=True)
            self._encoder = None
        if self._catalog is not None:
            self._catalog.close()
            self._catalog = None

    def _errors(self, verb: str) -> Any:
        place = f", in {self._attempt.folder}" if self._attempt is not None else ""
        doing = f"{verb} for {self._sink.address}{place}"
        return translate_errors(doing, scrub=self._sink.address.scrub)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLimits:
    file_bytes_max: int
    open_files_max: int


def file_limits(sink: Iceberg) -> FileLimits:
    file_bytes_max = sink.file_bytes_max or _FILE_BYTES_MAX
    return FileLimits(file_bytes_max=file_bytes_max, open_files_max=sink.open_files_max)


class Attempt:
    """
    The files of one attempt, below a folder of its own: a marker first, then data.

    Rows come in the table's own columns; each file is of one partition.
    """

    def __init__(
        self,
        handle: Handle,
        *,
        metadata: TableMetadata,
        files: TableFiles,
        layout: Layout,
        limits: FileLimits,
    ) -> None:
        self._handle = handle
        self._metadata = metadata
        self._files = files
        self._layout = layout
        self._limits = limits
        self._schema = metadata.schema()
        self._order = metadata.sort_order()
        self._open: OrderedDict[str, ParquetFile] = OrderedDict()
        self._done: list[DataFile] = []
        self._dictionaries: list[str] | None = None
        self._markers = layout.markers(files)
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
            self._markers.put(self._handle)
            self._is_marked = True
        if self._dictionaries is None:
            self._dictionaries = parquet.repeating(parquet.sample(rows))
        if self.is_sorted:
            rows = in_order(rows, self._order, self._schema)
        for partition, some in split(rows, self._metadata.spec(), self._schema):
            self._write(partition, some)
        # A file is sorted only as a whole, so what comes next belongs in another one.
        if self.is_sorted:
            self.close_files()

    def close_files(self) -> None:
        """Rows that come from here on are written to other files."""
        for key in list(self._open):
            self._close(key)

    def finish(self) -> list[DataFile]:
        """Make all files durable; afterwards the attempt is prepared."""
        try:
            self.close_files()
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
            discard(self._handle, files=self._files, layout=self._layout)

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
        self._files.make_folder_for(location)
        return ParquetFile(
            self._files.io,
            self._metadata,
            location,
            partition,
            dictionaries=self._dictionaries or (),
        )

    def _close(self, key: str) -> None:
        file = self._open.pop(key)
        order = self._order.order_id if self.is_sorted else None
        self._done.append(file.close(sort_order_id=order))
        self._files.make_durable(file.location)

    def _is_still_marked(self) -> bool:
        return self._markers.exists(self._handle)

    def _remove_files(self) -> None:
        self._files.delete(self._files.below(self.folder))
        self._files.remove_folder(self.folder)
