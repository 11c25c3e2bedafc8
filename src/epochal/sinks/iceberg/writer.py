"""Prepares rows as data files of the table.

Batches are gathered into blocks; while one is being filled, at most one other is encoded, in a
thread of its own, as Arrow lets go of the interpreter meanwhile. Memory stays within two blocks and
what open files hold back.
"""

from __future__ import annotations

import json
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyiceberg.table.metadata import TableMetadata, TableMetadataUtil

from epochal.contract import Task
from epochal.errors import Misconfigured
from epochal.sinks.iceberg.attempt import Attempt
from epochal.sinks.iceberg.data_files import files_out
from epochal.sinks.iceberg.fitting import Fitting, misfits
from epochal.sinks.iceberg.layout import layout_of
from epochal.sinks.iceberg.sorting import sorting
from epochal.sinks.iceberg.storage import Storage
from epochal.terms import Fingerprint, Json, Receipt

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog

    from epochal.sinks.iceberg.sink import Iceberg


class IcebergWriter:
    """One attempt's rows. Nothing is opened before the first of them."""

    def __init__(self, sink: Iceberg, task: Task) -> None:
        self._sink = sink
        self._task = task
        self._catalog: Catalog | None = None
        self._metadata: TableMetadata | None = None
        self._attempt: Attempt | None = None
        self._fitting: Fitting | None = None
        self._batches: list[pa.RecordBatch] = []
        self._bytes = 0
        self._rows = 0
        self._encoder: ThreadPoolExecutor | None = None
        self._under_way: Future[None] | None = None

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
            self._under_way = self._encoder.submit(self._encode, self._taken())

    def prepare(self) -> Receipt:
        with self._sorting("prepare"):
            self._wait()
            if self._batches:
                self._encode(self._taken())
            token, size = self._finished()
        self._let_go()
        return Receipt(
            handle=self._task.handle,
            fingerprint=Fingerprint(self._rows),
            bytes=size,
            token=token,
        )

    def abort(self) -> None:
        self._batches = []
        try:
            if self._under_way is not None:
                self._under_way.exception()
            if self._attempt is not None:
                self._attempt.discard()
        finally:
            self._let_go()

    @property
    def _block_bytes(self) -> int:
        # A file is sorted as a whole, so where there is an order a block is a file.
        whole = self._attempt is not None and self._attempt.is_sorted
        return self._sink.file_bytes_max if whole else self._sink.buffer_bytes_max // 2

    def _taken(self) -> pa.Table:
        block = pa.Table.from_batches(self._batches)
        self._batches, self._bytes = [], 0
        return block

    def _encode(self, block: pa.Table) -> None:
        with self._sorting("write"):
            if self._attempt is None or self._fitting is None:
                self._attempt, self._fitting = self._opened(block.schema)
            self._attempt.write(self._fitting.fit(block))

    def _opened(self, rows: pa.Schema) -> tuple[Attempt, Fitting]:
        metadata, storage = self._table()
        refused = misfits(rows, metadata.schema())
        if refused:
            raise Misconfigured(
                f"{self._sink.place} does not take these rows: {'; '.join(refused)}",
                "the table changed while the query ran: start it again",
            )
        self._metadata = metadata
        attempt = Attempt(
            self._task.handle,
            metadata=metadata,
            storage=storage,
            layout=layout_of(metadata.location, metadata.properties),
            limits=self._sink.file_limits,
        )
        return attempt, Fitting(rows, metadata.schema())

    def _table(self) -> tuple[TableMetadata, Storage]:
        """As the driver handed it out; asked from the catalog where that gives its own keys."""
        handed: Any = self._task.handout
        if handed and handed.get("metadata") is not None:
            metadata = TableMetadataUtil.parse_raw(json.dumps(handed["metadata"]))
            return metadata, Storage(self._sink.place.files(metadata))
        self._catalog = self._sink.place.open()
        table = self._sink.place.load(self._catalog)
        return table.metadata, Storage(table.io)

    def _finished(self) -> tuple[dict[str, Json], int]:
        if self._attempt is None or self._metadata is None:
            return {"files": []}, 0
        files = self._attempt.finish()
        folder = self._attempt.folder
        token: dict[str, Json] = {
            "folder": folder,
            "table": str(self._metadata.table_uuid),
            "spec": self._metadata.default_spec_id,
            "files": [*files_out(files, folder, self._metadata)],
        }
        return token, sum(file.file_size_in_bytes for file in files)

    def _wait(self) -> None:
        if self._under_way is not None:
            under_way, self._under_way = self._under_way, None
            under_way.result()

    def _let_go(self) -> None:
        if self._encoder is not None:
            self._encoder.shutdown(wait=True)
            self._encoder = None
        if self._catalog is not None:
            self._catalog.close()
            self._catalog = None

    def _sorting(self, verb: str) -> Any:
        return sorting(f"{verb} for {self._sink.place}", scrub=self._sink.place.scrub)
