"""
Rows of attempts, kept by handle until their epoch is settled.

    <root>/rows/<uid>-s<tag>/<handle>.arrow    an Arrow stream, compressed with zstd

A task writes, the driver reads, lists and removes: from any machine that reaches the place. What is
written is fixed from then on, so rows have numbers: the first row of a handle is 0, in the order in
which they were written, however often they are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from epochal.errors import InvariantBroken, PreparedLost
from epochal.kit.spool.places import UNFINISHED, Outlet, Place, open_place
from epochal.terms import Handle, InDoubt, SinkTag, Uid, handle_prefix

_SUFFIX = ".arrow"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spooled:
    """What `SpoolWriter.finish` made durable."""

    rows: int
    bytes: int


class SpoolWriter:
    """
    One attempt's rows on their way into the spool. In a task, in one thread.

    `write` any number of times, then `finish` (durable on return) or `discard`. Memory is that of
    one batch. No row at all leaves no file, so empty tasks cost nothing.
    """

    def __init__(self, place: Place, handle: Handle, schema: pa.Schema) -> None:
        self._place = place
        self._name = _name(handle)
        self._schema = schema
        self._outlet: Outlet | None = None
        self._stream: Any = None
        self._encoder: Any = None
        self._rows = 0
        self._bytes = 0

    def write(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        if self._encoder is None:
            self._begin()
        self._encoder.write_batch(batch)
        self._rows += batch.num_rows

    def finish(self) -> Spooled:
        if self._outlet is not None:
            self._encoder.close()
            self._outlet.finish()
            self._outlet = None
        return Spooled(rows=self._rows, bytes=self._bytes)

    def discard(self) -> None:
        """Leave nothing behind; also after `finish`, as far as this task can reach it."""
        if self._outlet is not None:
            self._outlet.discard()
            self._outlet = None
        self._place.remove([self._name])

    def _begin(self) -> None:
        self._outlet = self._place.create(self._name)
        self._stream = pa.PythonFile(_Counting(self._outlet, self._count), mode="w")
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        self._encoder = pa.ipc.new_stream(self._stream, self._schema, options=options)

    def _count(self, size: int) -> None:
        self._bytes += size


class _Counting:
    """What Arrow expects of a Python file, over an outlet."""

    closed = False

    def __init__(self, outlet: Outlet, count: Any) -> None:
        self._outlet = outlet
        self._count = count

    def write(self, piece: Any) -> int:
        self._outlet.write(piece)
        self._count(len(piece))
        return len(piece)

    def flush(self) -> None:
        """The outlet decides when."""

    def close(self) -> None:
        """Arrow closes what it is done with; the outlet is finished by its owner."""


class RowSpool:
    """Every verb may be repeated at any time, from any process that reaches the place."""

    def __init__(self, place: Place) -> None:
        self.place = place

    @classmethod
    def at(cls, url: str) -> RowSpool:
        """The spool at what `spool_url` gave."""
        return cls(open_place(url))

    def writer(self, handle: Handle, schema: pa.Schema) -> SpoolWriter:
        return SpoolWriter(self.place, handle, schema)

    def has(self, handle: Handle) -> bool:
        return self.place.has(_name(handle))

    def read(self, handle: Handle, *, rows: int) -> Iterator[pa.RecordBatch]:
        """
        The batches of a handle in the order in which they were written.

        `rows` is the receipt's count: none means that there is no file. Raises `PreparedLost` where
        the file is gone, before the first batch; `InvariantBroken` where it holds other rows.
        """
        if not rows:
            return iter(())
        file = self.place.open(_name(handle))
        if file is None:
            raise PreparedLost(
                f"the spool {self.place.told} no longer holds the {rows} rows of {handle}",
                "somebody removed them: files of a spool belong to the pipeline",
                handles=(str(handle),),
            )
        return _batches(file, handle, rows, self.place.told)

    def listed(self, uid: Uid, tag: SinkTag) -> Sequence[InDoubt]:
        """All attempts of one pipeline's sink, also those that are still being written (I5)."""
        found: dict[str, InDoubt] = {}
        for entry in self.place.files(_folder(uid, tag)):
            name = entry.name.removesuffix(UNFINISHED).removesuffix(_SUFFIX)
            if name.startswith(handle_prefix(uid)):
                found[name] = InDoubt(name=name, handle=Handle.parse(name), age_s=entry.age_s)
        return [found[name] for name in sorted(found)]

    def remove(self, handles: Iterable[Handle]) -> None:
        """Remove attempts, finished or not. A task that still writes one of them fails."""
        names = [_name(handle) for handle in handles]
        self.place.remove([name for one in names for name in (one + UNFINISHED, one)])

    def forget(self, uid: Uid, tag: SinkTag) -> None:
        """Remove the folder of one pipeline's sink. Only once nothing of it is needed any more."""
        self.place.remove_folder(_folder(uid, tag))


def _batches(file: pa.NativeFile, handle: Handle, rows: int, told: str) -> Iterator[pa.RecordBatch]:
    seen = 0
    try:
        for batch in pa.ipc.open_stream(file):
            seen += batch.num_rows
            yield batch
    finally:
        with suppress(OSError, pa.ArrowException):
            file.close()
    if seen != rows:
        raise InvariantBroken(
            f"the spool {told} holds {seen} rows of {handle}, and its receipt says {rows}",
            "the file was changed by somebody else, or its disk lost a part of it",
        )


def _folder(uid: Uid, tag: SinkTag) -> str:
    return f"rows/{uid}-s{tag}"


def _name(handle: Handle) -> str:
    return f"{_folder(handle.uid, handle.sink)}/{handle}{_SUFFIX}"
