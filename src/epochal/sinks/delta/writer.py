"""
Prepares rows as parquet files that no version of the table names yet.

Files are written where they will stay: the log is what makes them visible. Rows wait by partition
folder, in memory that is bounded over all folders; many partition values cost smaller files, never
more memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.parquet as pq

from epochal.contract import Task
from epochal.errors import Misconfigured, TryAgain
from epochal.sinks.delta.place import STAGED, Place, note_path
from epochal.sinks.delta.stats import Statistics
from epochal.sinks.files.partitions import split, values_of
from epochal.terms import Fingerprint, Json, Receipt

_GROUP_ROWS = 1_000_000
_PART_OVERHEAD_BYTES = 4096
"""What a waiting part costs beside its values, so that many tiny parts count as what they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How files are to look: from the declaration, and from the table where it says more."""

    partition_by: tuple[str, ...]
    is_staged: bool
    """A merge reads these rows: they are in no folder of the table's."""
    types: Mapping[str, pa.DataType]
    """The table's own types, where they are wider than what arrives."""
    compression: str
    max_file_bytes: int
    buffer_bytes_max: int
    open_files_max: int
    stats_columns_max: int


@dataclass(slots=True)
class _Waiting:
    parts: list[pa.RecordBatch] = field(default_factory=list)
    rows: int = 0
    bytes: int = 0


@dataclass(slots=True)
class _File:
    path: str
    stream: pa.NativeFile
    encoder: pq.ParquetWriter
    statistics: Statistics
    footer: pq.FileMetaData | None = None

    def write(self, rows: pa.Table) -> None:
        self.statistics.take(rows)
        self.encoder.write_table(rows, row_group_size=rows.num_rows)

    def close(self) -> None:
        self.encoder.close()
        self.footer = self.encoder.writer.metadata
        self.stream.close()


class DeltaWriter:
    """One attempt's files, with a note beside the log that says so."""

    def __init__(self, task: Task, place: Place, shape: Shape) -> None:
        self._task = task
        self._place = place
        self._shape = shape
        self._schema = _in_types(task.schema, shape.types)
        self._columns = pa.schema(
            [column for column in self._schema if column.name not in shape.partition_by]
        )
        self._arrived = _Waiting()
        self._waiting: dict[str, _Waiting] = {}
        self._open: dict[str, _File] = {}
        self._made: list[_File] = []

    def write(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        _add(self._arrived, batch)
        is_enough = self._arrived.rows >= self._task.limits.buffer_rows
        if is_enough or self._arrived.bytes > self._shape.buffer_bytes_max // 2:
            self._sort_in()

    def prepare(self) -> Receipt:
        self._sort_in()
        for folder in list(self._waiting):
            self._write_out(folder)
        for folder in list(self._open):
            self._open.pop(folder).close()
        sizes = self._sealed()
        is_partitioned = bool(self._shape.partition_by)
        nulls = {
            name for file in self._made for name, some in file.statistics.nulls.items() if some
        }
        return Receipt(
            handle=self._task.handle,
            fingerprint=Fingerprint(sum(file.statistics.rows for file in self._made)),
            bytes=sum(sizes),
            token={
                "files": [
                    _told(file, size, is_partitioned)
                    for file, size in zip(self._made, sizes, strict=True)
                ],
                "nulls": sorted(nulls),
            },
        )

    def abort(self) -> None:
        for file in self._open.values():
            with suppress(OSError, pa.ArrowException):
                file.close()
        self._place.remove([file.path for file in self._made])
        if self._made:
            self._place.remove_note(self._task.handle)

    def _sealed(self) -> list[int]:
        """Make all files durable and see that nobody cleared them away meanwhile."""
        if not self._made:
            return []
        paths = [file.path for file in self._made]
        self._place.make_durable(paths)
        note, *sizes = self._place.sizes([note_path(self._task.handle), *paths])
        if note is None or None in sizes:
            self._place.remove(paths)
            raise TryAgain(f"{self._task.handle} was cleared away while it was being written")
        self._place.put_note(self._task.handle, paths)
        return [size for size in sizes if size is not None]

    # Rows on their way to a file

    def _sort_in(self) -> None:
        arrived, self._arrived = self._arrived, _Waiting()
        if not arrived.parts:
            return
        rows = pa.Table.from_batches(arrived.parts)
        if rows.schema != self._schema:
            rows = rows.cast(self._schema)
        for batch in rows.combine_chunks().to_batches():
            for folder, part in split(batch, self._shape.partition_by):
                waiting = self._waiting.setdefault(folder, _Waiting())
                _add(waiting, part)
                if waiting.rows >= _GROUP_ROWS:
                    self._write_out(folder)
        self._make_room()

    def _make_room(self) -> None:
        """Halve what waits where it is too much, the largest first."""
        held = sum(waiting.bytes for waiting in self._waiting.values())
        if held <= self._shape.buffer_bytes_max:
            return
        for folder in sorted(self._waiting, key=lambda key: self._waiting[key].bytes, reverse=True):
            if held * 2 <= self._shape.buffer_bytes_max:
                return
            held -= self._waiting[folder].bytes
            self._write_out(folder)

    def _write_out(self, folder: str) -> None:
        waiting = self._waiting.pop(folder)
        file = self._open.pop(folder, None) or self._create(folder)
        self._open[folder] = file
        file.write(pa.Table.from_batches(waiting.parts, schema=self._columns))
        if file.stream.tell() >= self._shape.max_file_bytes:
            self._open.pop(folder).close()

    def _create(self, folder: str) -> _File:
        while len(self._open) >= self._shape.open_files_max:
            self._open.pop(next(iter(self._open))).close()
        if not self._made:
            self._place.put_note(self._task.handle)
        mark = "" if self._shape.compression == "none" else f".{self._shape.compression}"
        name = f"{self._task.handle}-{len(self._made):05d}{mark}.parquet"
        top = STAGED if self._shape.is_staged else folder
        path = f"{top}/{name}" if top else name
        stream = self._place.create(path)
        encoder = pq.ParquetWriter(
            stream, self._columns, compression=self._shape.compression, version="2.6"
        )
        statistics = Statistics(self._columns, self._shape.stats_columns_max)
        file = _File(path=path, stream=stream, encoder=encoder, statistics=statistics)
        self._made.append(file)
        return file


def _add(waiting: _Waiting, part: pa.RecordBatch) -> None:
    waiting.parts.append(part)
    waiting.rows += part.num_rows
    waiting.bytes += part.nbytes + _PART_OVERHEAD_BYTES


def _in_types(schema: pa.Schema, types: Mapping[str, pa.DataType]) -> pa.Schema:
    return pa.schema([column.with_type(types.get(column.name, column.type)) for column in schema])


def _told(file: _File, size: int, is_partitioned: bool) -> Json:
    if file.footer is None:
        raise Misconfigured(f"{file.path} was not closed")
    return {
        "path": file.path,
        "bytes": size,
        "partition": values_of(file.path) if is_partitioned else {},
        "stats": file.statistics.told(file.footer),
    }
