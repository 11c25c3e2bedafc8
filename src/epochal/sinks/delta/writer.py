"""
The writer of a Delta sink: parquet files that no version of the table names yet.

Files are written where they will stay: the table's log makes them visible.
"""

from __future__ import annotations

import datetime as dt
import decimal
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from epochal.contract import Task
from epochal.errors import InvariantBroken
from epochal.kit import parquet
from epochal.kit.file_buffer import BufferLimits, FileBuffer
from epochal.kit.hive_partitions import values_of
from epochal.sinks.delta.table_files import STAGED, TableFiles
from epochal.terms import Fingerprint, Handle, Json, Receipt

GROUP_ROWS = 1_000_000
_TEXT_MAX = 32
_DIGITS_MAX = 15
"""Decimal digits that every reader of a JSON number keeps."""
_GREATEST = "\U0010ffff"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileShape:
    """How files are to look: by the declaration and by the table."""

    limits: BufferLimits
    is_staged: bool
    """A merge reads these rows: they are in no folder of the table's."""
    types: Mapping[str, pa.DataType]
    """The table's own types, where they are wider than what arrives."""
    compression: str
    stats_columns_max: int
    columns: str
    """The digest of the table's columns."""


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

    @property
    def data_file(self) -> DataFile:
        if self.footer is None:
            raise InvariantBroken(f"{self.path} was not closed")
        return DataFile(path=self.path, footer=self.footer, statistics=self.statistics)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """A parquet file of an attempt, closed."""

    path: str
    footer: pq.FileMetaData
    statistics: Statistics

    def describe(self, size: int, *, is_partitioned: bool) -> Json:
        """The file as its receipt has it: what an add action of the log needs."""
        return {
            "path": self.path,
            "bytes": size,
            "partition": values_of(self.path) if is_partitioned else {},
            "stats": self.statistics.to_json(self.footer),
        }


def sealed_receipt(
    table: TableFiles,
    handle: Handle,
    files: Sequence[DataFile],
    *,
    fingerprint: Fingerprint,
    is_partitioned: bool,
    columns: str,
) -> Receipt:
    """Make the files of an attempt durable: the receipt describes them."""
    sizes = table.seal(handle, [file.path for file in files])
    nulls = {name for file in files for name, some in file.statistics.nulls.items() if some}
    return Receipt(
        handle=handle,
        fingerprint=fingerprint,
        bytes=sum(sizes),
        token={
            "files": [
                file.describe(size, is_partitioned=is_partitioned)
                for file, size in zip(files, sizes, strict=True)
            ],
            "nulls": sorted(nulls),
            "columns": columns,
        },
    )


class DeltaWriter:
    """One attempt's files, and its marker beside the log."""

    def __init__(self, task: Task, files: TableFiles, shape: FileShape) -> None:
        self._task = task
        self._files = files
        self._shape = shape
        schema = _with_types(task.schema, shape.types)
        self._rows = FileBuffer(schema, shape.limits, self._create)

    def write(self, batch: pa.RecordBatch) -> None:
        with self._files.errors():
            self._rows.write(batch)

    def prepare(self) -> Receipt:
        with self._files.errors():
            self._rows.finish()
            return self._receipt()

    def _receipt(self) -> Receipt:
        made = [file.data_file for file in self._rows.made]
        return sealed_receipt(
            self._files,
            self._task.handle,
            made,
            fingerprint=Fingerprint(sum(file.statistics.rows for file in made)),
            is_partitioned=bool(self._shape.limits.partition_by),
            columns=self._shape.columns,
        )

    def abort(self) -> None:
        self._rows.abandon()
        self._files.delete(self._paths)
        if self._rows.made:
            self._files.markers.delete([self._task.handle])

    @property
    def _paths(self) -> list[str]:
        return [file.path for file in self._rows.made]

    @cached_property
    def _encoder(self) -> Callable[[pa.NativeFile], parquet.Encoder]:
        return parquet.encoder(self._rows.sample, self._shape.compression)

    def _create(self, folder: str, number: int) -> _File:
        if not number:
            self._files.markers.put(self._task.handle)
        top = STAGED if self._shape.is_staged else folder
        path = data_path(top, self._task.handle, number, self._shape.compression)
        stream = self._files.create(path)
        statistics = Statistics(self._rows.columns, self._shape.stats_columns_max)
        return _File(path=path, stream=stream, encoder=self._encoder(stream), statistics=statistics)


def _with_types(schema: pa.Schema, types: Mapping[str, pa.DataType]) -> pa.Schema:
    return pa.schema([column.with_type(types.get(column.name, column.type)) for column in schema])


def data_path(folder: str, handle: Handle, number: int, compression: str) -> str:
    """Where a data file lies in its table."""
    suffix = ".parquet" if compression == "none" else f".{compression}.parquet"
    name = f"{handle}-{number:05d}{suffix}"
    return f"{folder}/{name}" if folder else name


class Statistics:
    """
    A file's statistics in the log: rows, nulls, the least and the greatest value of each column.

    Readers skip files by it, so it must never claim too little: a value that has no exact form is
    left out, or rounded outwards. Nulls are counted of every column, as NOT NULL is judged by them.
    """

    def __init__(self, schema: pa.Schema, columns_max: int) -> None:
        plain = [field.name for field in schema if not pa.types.is_nested(field.type)]
        self._columns = plain[:columns_max]
        self._floats = [field.name for field in schema if pa.types.is_floating(field.type)]
        self._has_nan: set[str] = set()
        self.rows = 0
        self.nulls = dict.fromkeys(schema.names, 0)

    def take(self, rows: pa.Table) -> None:
        self.rows += rows.num_rows
        for name in self.nulls:
            self.nulls[name] += rows.column(name).null_count
        for name in self._floats:
            # Readers order NaN above all numbers, and parquet's statistics pass over it.
            if name not in self._has_nan and pc.any(pc.is_nan(rows.column(name))).as_py():
                self._has_nan.add(name)

    def take_file(self, opened: Callable[[], pa.NativeFile], footer: pq.FileMetaData) -> None:
        """
        What `take` counts, of a file that parquet-java wrote. It orders NaN above all numbers, so
        that a column with NaN has it as its greatest value, or has no bounds; and it keeps no
        statistics of long values, so that their nulls are counted by reading them.
        """
        self.rows += footer.num_rows
        for name, groups in parquet.column_statistics(footer).items():
            nulls = parquet.null_count(groups)
            if nulls is None:
                with opened() as file:
                    nulls = pq.read_table(file, columns=[name]).column(0).null_count
            self.nulls[name] += nulls
            if name in self._floats and any(
                group is None or parquet.has_nan(group) for group in groups
            ):
                self._has_nan.add(name)

    def to_json(self, footer: pq.FileMetaData) -> str:
        """The log's form of it, with bounds from the footer of the closed file."""
        least: dict[str, Json] = {}
        greatest: dict[str, Json] = {}
        for name, groups in parquet.column_statistics(footer).items():
            if name not in self._columns or name in self._has_nan:
                continue
            bounds = parquet.bounds(groups)
            if bounds is None:
                continue
            low, high = _lower_bound(bounds[0]), _upper_bound(bounds[1])
            if low is not None and high is not None:
                least[name], greatest[name] = low, high
        return json.dumps(
            {
                "numRecords": self.rows,
                "minValues": least,
                "maxValues": greatest,
                "nullCount": {name: self.nulls[name] for name in self._columns},
            }
        )


def _lower_bound(value: Any) -> Json:
    if isinstance(value, str):
        return value[:_TEXT_MAX]
    return _exact(value)


def _upper_bound(value: Any) -> Json:
    if isinstance(value, str):
        if len(value) <= _TEXT_MAX:
            return value
        is_below = value[_TEXT_MAX] != _GREATEST
        return value[:_TEXT_MAX] + _GREATEST if is_below else None
    return _exact(value)


def _exact(value: Any) -> Json:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return value if abs(value) != float("inf") else None
    if isinstance(value, decimal.Decimal):
        return float(value) if len(value.as_tuple().digits) <= _DIGITS_MAX else None
    if isinstance(value, dt.datetime):
        text = value.replace(tzinfo=None).isoformat(timespec="microseconds")
        return f"{text}Z" if value.tzinfo else text
    return value.isoformat() if isinstance(value, dt.date) else None
