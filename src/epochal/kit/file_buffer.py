"""
The buffer between a task's batches and its files, by partition folder.

Rows wait in memory until there are enough of them for one row group. Memory is bounded by bytes
over all folders and by open files: reaching either limit writes the largest group out, or closes
the file that has rested longest. So many partition values cost more and smaller files, never more
memory. Splitting costs something per value and batch, so some batches are collected first.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import pyarrow as pa

from epochal.kit import parquet
from epochal.kit.hive_partitions import split

_PART_OVERHEAD_BYTES = 4096
"""What a waiting part costs beside its values, so that many tiny parts count as what they are."""


class OpenFile(Protocol):
    """A file that is being written."""

    @property
    def size_bytes(self) -> int:
        """What has reached it so far."""

    def write(self, rows: pa.Table) -> None: ...

    def close(self) -> None: ...


_File = TypeVar("_File", bound=OpenFile)


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferLimits:
    """How rows are laid out, and how many may be held at a time."""

    partition_by: tuple[str, ...]
    split_rows: int
    """Rows that are collected before they are split by partition."""
    group_rows: int
    """Rows of one folder that are written at a time."""
    max_file_bytes: int
    buffer_bytes_max: int
    open_files_max: int


@dataclass(slots=True)
class _Waiting:
    """Rows of one folder that are not in a file yet."""

    parts: list[pa.RecordBatch] = field(default_factory=list)
    rows: int = 0
    bytes: int = 0

    def add(self, part: pa.RecordBatch) -> int:
        """Take a part, and return what it costs."""
        size: int = part.nbytes + _PART_OVERHEAD_BYTES
        self.parts.append(part)
        self.rows += part.num_rows
        self.bytes += size
        return size


class FileBuffer(Generic[_File]):
    """
    One attempt's rows, from batches to files.

    `create` makes a file in a folder; its second argument is the number of files before it.
    `held_bytes` returns what open files keep in memory beside what waits here.
    """

    def __init__(
        self,
        schema: pa.Schema,
        limits: BufferLimits,
        create: Callable[[str, int], _File],
        *,
        held_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        self.made: list[_File] = []
        """Every file, in the order of their numbers."""
        self.columns = pa.schema(
            [column for column in schema if column.name not in limits.partition_by]
        )
        """What files hold: a folder's name holds the rest."""
        # Not schema.empty_table(): that imports pandas, which a task does without.
        self.sample = pa.Table.from_batches([], schema=self.columns)
        """Some of the first rows, there before the first file is made."""
        self._schema = schema
        self._limits = limits
        self._create = create
        self._held_bytes = held_bytes
        self._arrived = _Waiting()
        self._waiting: dict[str, _Waiting] = {}
        self._waiting_bytes = 0
        self._open: dict[str, _File] = {}

    def write(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        self._arrived.add(batch)
        is_enough = self._arrived.rows >= self._limits.split_rows
        if is_enough or self._arrived.bytes + self._waiting_bytes > self._limits.buffer_bytes_max:
            self._split_arrived()

    def finish(self) -> None:
        """Write every row to a file and close every file."""
        self._split_arrived()
        for folder in list(self._waiting):
            self._write_out(folder)
        for folder in list(self._open):
            self._close(folder)

    def abandon(self) -> None:
        """Close what is open; the files are thrown away."""
        for folder in list(self._open):
            with suppress(OSError, pa.ArrowException):
                self._close(folder)

    def _split_arrived(self) -> None:
        """Sort what has arrived into its folders, and write out what is enough or too much."""
        arrived, self._arrived = self._arrived, _Waiting()
        if not arrived.parts:
            return
        rows = self._cast(arrived.parts)
        if not self.sample.num_rows:
            self.sample = parquet.sample(rows.drop_columns(list(self._limits.partition_by)))
        for batch in rows.to_batches():
            for folder, part in split(batch, self._limits.partition_by):
                waiting = self._waiting.setdefault(folder, _Waiting())
                self._waiting_bytes += waiting.add(part)
                if waiting.rows >= self._limits.group_rows:
                    self._write_out(folder)
        if self._waiting_bytes > self._limits.buffer_bytes_max:
            self._write_largest_out()

    def _cast(self, parts: list[pa.RecordBatch]) -> pa.Table:
        """In the types that files are to have, and in one piece where it is to be split."""
        rows = pa.Table.from_batches(parts)
        if rows.schema != self._schema:
            rows = rows.cast(self._schema)
        return rows.combine_chunks() if self._limits.partition_by else rows

    def _write_largest_out(self) -> None:
        """Halve what waits, the largest first: one scan then pays for many batches."""
        largest = sorted(self._waiting, key=lambda key: self._waiting[key].bytes, reverse=True)
        for folder in largest:
            if self._waiting_bytes * 2 <= self._limits.buffer_bytes_max:
                return
            self._write_out(folder)

    def _write_out(self, folder: str) -> None:
        waiting = self._waiting.pop(folder)
        self._waiting_bytes -= waiting.bytes
        file = self._file(folder)
        file.write(pa.Table.from_batches(waiting.parts, schema=self.columns))
        if file.size_bytes >= self._limits.max_file_bytes:
            self._close(folder)
        while self._open and self._held_bytes() > self._limits.buffer_bytes_max:
            self._close(next(iter(self._open)))

    def _file(self, folder: str) -> _File:
        """The folder's open file, which becomes the last to be closed for want of memory."""
        file = self._open.pop(folder, None)
        if file is None:
            while len(self._open) >= self._limits.open_files_max:
                self._close(next(iter(self._open)))
            file = self._create(folder, len(self.made))
            self.made.append(file)
        self._open[folder] = file
        return file

    def _close(self, folder: str) -> None:
        self._open.pop(folder).close()
