"""Prepares rows as files.

Rows wait in memory, by partition folder, until there are enough of them for one row group. Memory
is bounded by bytes over all folders and by open files: whichever is reached writes the largest
group out, or closes the file that rested longest. So many partition values cost more and smaller
files, never more memory. Splitting a batch costs something for each value in it, so some batches
are gathered first.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

import pyarrow as pa

from epochal.contract import Task
from epochal.sinks.files.formats import Encoder, Format
from epochal.sinks.files.layout import file_name
from epochal.sinks.files.partitions import split
from epochal.sinks.files.places import Attempt
from epochal.sinks.files.schemas import keep_schema
from epochal.terms import Fingerprint, Json, Receipt

_PART_OVERHEAD_BYTES = 4096
"""What a waiting part costs beside its values, so that many tiny parts count as what they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How rows are laid out, from the sink's declaration."""

    format: Format
    compression: str
    partition_by: tuple[str, ...]
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
        """Take a part, and say what it costs."""
        size: int = part.nbytes + _PART_OVERHEAD_BYTES
        self.parts.append(part)
        self.rows += part.num_rows
        self.bytes += size
        return size


@dataclass(slots=True)
class _File:
    relative: str
    stream: pa.NativeFile
    encoder: Encoder
    rows: int = 0


class FileWriter:
    """One attempt's files, where its back end prepares them."""

    def __init__(self, task: Task, plan: Plan, attempt: Attempt) -> None:
        self._task = task
        self._plan = plan
        self._attempt = attempt
        self._columns = pa.schema(
            [column for column in task.schema if column.name not in plan.partition_by]
        )
        self._arrived = _Waiting()
        self._waiting: dict[str, _Waiting] = {}
        self._waiting_bytes = 0
        self._open: dict[str, _File] = {}
        self._made: list[_File] = []

    def write(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        self._arrived.add(batch)
        is_enough = self._arrived.rows >= self._task.limits.buffer_rows
        if is_enough or self._arrived.bytes + self._waiting_bytes > self._plan.buffer_bytes_max:
            self._sort_in()

    def prepare(self) -> Receipt:
        self._sort_in()
        for where in list(self._waiting):
            self._write_out(where)
        for where in list(self._open):
            self._close(where)
        token: dict[str, Json] = {"files": []}
        sealed: list[dict[str, Json]] = []
        if self._made:
            token["schema"] = keep_schema(self._attempt.store, self._task.schema)
            sealed = self._attempt.seal([file.relative for file in self._made])
            token["files"] = [
                {**told, "rows": file.rows} for file, told in zip(self._made, sealed, strict=True)
            ]
        rows = sum(file.rows for file in self._made)
        size = sum(int(str(told["bytes"])) for told in sealed)
        return Receipt(
            handle=self._task.handle, fingerprint=Fingerprint(rows), bytes=size, token=token
        )

    def abort(self) -> None:
        # First: what is closed after it goes nowhere, and is not sent only to be thrown away.
        self._attempt.discard()
        for where in list(self._open):
            with suppress(OSError, pa.ArrowException):
                self._close(where)

    def _sort_in(self) -> None:
        """Put what has arrived to its folders, and write out what is enough or too much."""
        arrived, self._arrived = self._arrived, _Waiting()
        for batch in self._gathered(arrived):
            for where, part in split(batch, self._plan.partition_by):
                waiting = self._waiting.setdefault(where, _Waiting())
                self._waiting_bytes += waiting.add(part)
                if waiting.rows >= self._plan.format.rows_at_once:
                    self._write_out(where)
        if self._waiting_bytes > self._plan.buffer_bytes_max:
            self._write_largest_out()

    def _gathered(self, arrived: _Waiting) -> list[pa.RecordBatch]:
        if not self._plan.partition_by or not arrived.parts:
            return arrived.parts
        return [pa.concat_batches(arrived.parts)]

    def _write_largest_out(self) -> None:
        """Halve what waits, the largest first: one scan then pays for many batches."""
        for where in sorted(self._waiting, key=lambda key: self._waiting[key].bytes, reverse=True):
            if self._waiting_bytes * 2 <= self._plan.buffer_bytes_max:
                return
            self._write_out(where)

    def _write_out(self, where: str) -> None:
        waiting = self._waiting.pop(where)
        self._waiting_bytes -= waiting.bytes
        file = self._file(where)
        file.encoder.write(pa.Table.from_batches(waiting.parts, schema=self._columns))
        file.rows += waiting.rows
        if file.stream.tell() >= self._plan.max_file_bytes:
            self._close(where)
        while self._open and self._attempt.held_bytes > self._plan.buffer_bytes_max:
            self._close(next(iter(self._open)))

    def _file(self, where: str) -> _File:
        """The folder's open file, which becomes the last of those to be closed for want of room."""
        file = self._open.pop(where, None) or self._create(where)
        self._open[where] = file
        return file

    def _create(self, where: str) -> _File:
        while len(self._open) >= self._plan.open_files_max:
            self._close(next(iter(self._open)))
        suffix = self._plan.format.suffix(self._plan.compression)
        name = file_name(self._task.handle, len(self._made), suffix)
        relative = f"{where}/{name}" if where else name
        stream = self._attempt.create(relative)
        encoder = self._plan.format.open(stream, self._columns, self._plan.compression)
        file = _File(relative, stream, encoder)
        self._made.append(file)
        return file

    def _close(self, where: str) -> None:
        file = self._open.pop(where)
        file.encoder.close()
        file.stream.close()
