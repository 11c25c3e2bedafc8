"""
Prepares rows as parquet files that no version of the table names yet.

Files are written where they will stay: the log is what makes them visible.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import pyarrow as pa
import pyarrow.parquet as pq

from epochal.contract import Task
from epochal.errors import Misconfigured, TryAgain
from epochal.kit import parquet
from epochal.sinks.delta.place import STAGED, Place, note_path
from epochal.sinks.delta.stats import Statistics
from epochal.sinks.files.gathering import Gathering, Room
from epochal.sinks.files.partitions import values_of
from epochal.terms import Fingerprint, Json, Receipt

GROUP_ROWS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How files are to look: from the declaration, and from the table where it says more."""

    room: Room
    is_staged: bool
    """A merge reads these rows: they are in no folder of the table's."""
    types: Mapping[str, pa.DataType]
    """The table's own types, where they are wider than what arrives."""
    compression: str
    stats_columns_max: int


@dataclass(slots=True)
class _File:
    path: str
    stream: pa.NativeFile
    encoder: parquet.Encoder
    statistics: Statistics
    footer: pq.FileMetaData | None = None

    @property
    def size_bytes(self) -> int:
        return int(self.stream.tell())

    def write(self, rows: pa.Table) -> None:
        self.statistics.take(rows)
        self.encoder.write(rows)

    def close(self) -> None:
        self.footer = self.encoder.close()
        self.stream.close()


class DeltaWriter:
    """One attempt's files, with a note beside the log that says so."""

    def __init__(self, task: Task, place: Place, shape: Shape) -> None:
        self._task = task
        self._place = place
        self._shape = shape
        self._rows = Gathering(_in_types(task.schema, shape.types), shape.room, self._create)

    def write(self, batch: pa.RecordBatch) -> None:
        self._rows.write(batch)

    def prepare(self) -> Receipt:
        self._rows.finish()
        made, sizes = self._rows.made, self._sealed()
        is_partitioned = bool(self._shape.room.partition_by)
        nulls = {name for file in made for name, some in file.statistics.nulls.items() if some}
        return Receipt(
            handle=self._task.handle,
            fingerprint=Fingerprint(sum(file.statistics.rows for file in made)),
            bytes=sum(sizes),
            token={
                "files": [
                    _told(file, size, is_partitioned)
                    for file, size in zip(made, sizes, strict=True)
                ],
                "nulls": sorted(nulls),
            },
        )

    def abort(self) -> None:
        self._rows.abandon()
        self._place.remove(self._paths)
        if self._rows.made:
            self._place.remove_note(self._task.handle)

    @property
    def _paths(self) -> list[str]:
        return [file.path for file in self._rows.made]

    def _sealed(self) -> list[int]:
        """Make all files durable and see that nobody cleared them away meanwhile."""
        paths = self._paths
        if not paths:
            return []
        self._place.make_durable(paths)
        note, *sizes = self._place.sizes([note_path(self._task.handle), *paths])
        if note is None or None in sizes:
            self._place.remove(paths)
            raise TryAgain(f"{self._task.handle} was cleared away while it was being written")
        self._place.put_note(self._task.handle, paths)
        return [size for size in sizes if size is not None]

    @cached_property
    def _encoder(self) -> Callable[[pa.NativeFile], parquet.Encoder]:
        return parquet.encoder(self._rows.sample, self._shape.compression)

    def _create(self, folder: str, number: int) -> _File:
        if not number:
            self._place.put_note(self._task.handle)
        mark = "" if self._shape.compression == "none" else f".{self._shape.compression}"
        name = f"{self._task.handle}-{number:05d}{mark}.parquet"
        top = STAGED if self._shape.is_staged else folder
        path = f"{top}/{name}" if top else name
        stream = self._place.create(path)
        statistics = Statistics(self._rows.columns, self._shape.stats_columns_max)
        return _File(path=path, stream=stream, encoder=self._encoder(stream), statistics=statistics)


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
