"""
Spooled rows: the rows of attempts, kept by handle until their epoch is settled.

    <spool>/rows/<uid>-s<tag>/<handle>.arrow         an Arrow stream, compressed with zstd
    <spool>/rows/<uid>-s<tag>/<handle>.arrow.part    the same while it is written, in a folder

The spool is a folder that driver and executors reach under the same path, or in an object store. A
task writes; the driver reads, lists and removes. What is written never changes, so rows have
numbers: the first row of a handle is 0, in the order in which they were written, however often they
are read.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa

from epochal.contract import Task
from epochal.errors import EpochalError, InvariantBroken, Misconfigured, PreparedLost
from epochal.storage import UNFINISHED, FileStore, Output, open_file_store
from epochal.storage.local import LocalStore
from epochal.storage.urls import OBJECT_SCHEMES, absolute_path, scheme_of, without_secrets
from epochal.terms import Fingerprint, Handle, InDoubt, Receipt, SinkTag, Uid, handle_prefix

_SUFFIX = ".arrow"
_FOLDER = "epochal/spool"


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

    def __init__(self, store: FileStore, handle: Handle, schema: pa.Schema) -> None:
        self._store = store
        self._name = _name(handle)
        self._schema = schema
        self._output: Output | None = None
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
        if self._output is not None:
            self._encoder.close()
            self._output.finish()
            self._output = None
        return Spooled(rows=self._rows, bytes=self._bytes)

    def discard(self) -> None:
        """Leave nothing behind; also after `finish`, as far as this task can reach it."""
        if self._output is not None:
            self._output.discard()
            self._output = None
        self._store.delete([self._name])

    def _begin(self) -> None:
        self._output = self._store.create(self._name)
        self._stream = pa.PythonFile(_Counting(self._output, self._count), mode="w")
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        self._encoder = pa.ipc.new_stream(self._stream, self._schema, options=options)

    def _count(self, size: int) -> None:
        self._bytes += size


class _Counting:
    """An output of a store as the Python file that Arrow writes to."""

    closed = False

    def __init__(self, output: Output, count: Callable[[int], None]) -> None:
        self._output = output
        self._count = count

    def write(self, piece: Any) -> int:
        self._output.write(memoryview(piece))
        self._count(len(piece))
        return len(piece)

    def flush(self) -> None:
        """The store decides when."""

    def close(self) -> None:
        """Arrow closes its file after the last batch; `SpoolWriter.finish` finishes the output."""


class SpoolingWriter:
    """The whole writer of a sink that delivers from a spool."""

    def __init__(self, task: Task, spool: RowSpool) -> None:
        self._task = task
        self._rows = spool.writer(task.handle, task.schema)

    def write(self, batch: pa.RecordBatch) -> None:
        self._rows.write(batch)

    def prepare(self) -> Receipt:
        spooled = self._rows.finish()
        return Receipt(
            handle=self._task.handle,
            fingerprint=Fingerprint(spooled.rows),
            bytes=spooled.bytes,
        )

    def abort(self) -> None:
        with suppress(EpochalError):
            self._rows.discard()


class RowSpool:
    """Every verb may be repeated at any time, from any process that reaches the store."""

    def __init__(self, store: FileStore) -> None:
        self.store = store

    @classmethod
    def at(cls, url: str) -> RowSpool:
        """The spool at a URL that `spool_url` returned. Opening creates nothing."""
        return cls(open_file_store(url))

    def writer(self, handle: Handle, schema: pa.Schema) -> SpoolWriter:
        return SpoolWriter(self.store, handle, schema)

    def has(self, handle: Handle) -> bool:
        return self.store.entry(_name(handle)) is not None

    def can_read(self, handle: Handle) -> bool:
        """
        Whether its rows are there, and can be read here. Raises `Misconfigured` where this user may
        not read or remove what a task has written as another.
        """
        file = self.store.open(_name(handle))
        if file is None:
            return False
        file.close()
        if isinstance(self.store, LocalStore):
            self.store.require_removable(_name(handle))
        return True

    def read(self, handle: Handle, *, rows: int) -> Iterator[pa.RecordBatch]:
        """
        The batches of a handle in the order in which they were written.

        `rows` is the receipt's count: none means that there is no file. Raises `PreparedLost` where
        the file is gone, before the first batch; `InvariantBroken` where it holds other rows.
        """
        if not rows:
            return iter(())
        file = self.store.open(_name(handle))
        if file is None:
            raise PreparedLost(
                f"the spool {self.store.location} no longer holds the {rows} rows of {handle}",
                "somebody removed them: files of a spool belong to the pipeline",
                handles=(str(handle),),
            )
        stream = pa.PythonFile(file, mode="r")
        return _batches(stream, handle, rows, self.store.location)

    def listed(self, uid: Uid, tag: SinkTag) -> Sequence[InDoubt]:
        """All attempts of one pipeline's sink, also those that are still being written (I5)."""
        found: dict[str, InDoubt] = {}
        now = time.time()
        for entry in self.store.entries(_folder(uid, tag)):
            name = entry.name.removesuffix(UNFINISHED).removesuffix(_SUFFIX)
            if name.startswith(handle_prefix(uid)):
                age_s = max(0.0, now - entry.modified_at)
                found[name] = InDoubt(name=name, handle=Handle.parse(name), age_s=age_s)
        return [found[name] for name in sorted(found)]

    def size(self, uid: Uid, tag: SinkTag) -> int:
        """How many bytes all attempts of one pipeline's sink take."""
        return sum(entry.size for entry in self.store.entries(_folder(uid, tag)))

    def remove(self, handles: Iterable[Handle]) -> None:
        """Remove attempts, finished or not. A task that still writes one of them fails."""
        names = [_name(handle) for handle in handles]
        self.store.delete([name for one in names for name in (one + UNFINISHED, one)])

    def forget(self, uid: Uid, tag: SinkTag) -> None:
        """Remove all attempts of one pipeline's sink, once nothing of it is needed any more."""
        folder = _folder(uid, tag)
        self.store.delete([f"{folder}/{name}" for name in self.store.names(folder)])


def spool_url(sink: str, spool: str | os.PathLike[str] | None) -> str:
    """The spool's URL as it travels with a sink: absolute, and refused where it is missing."""
    if not spool:
        raise Misconfigured(
            f"{sink} needs spool=…: where rows wait between their epoch's decision and delivery",
            'a folder that driver and all executors share (spool="/mnt/shared/spool"; on one '
            'machine any folder), or an object store (spool="s3://bucket/spool")',
        )
    text = os.fspath(spool)
    if scheme_of(text) is None:
        return absolute_path(text)
    parts = urlsplit(text)
    if parts.scheme != "file":
        return text
    if parts.netloc not in ("", "localhost"):
        raise Misconfigured(
            f"{sink}: the spool's URL names the machine {parts.netloc!r}",
            f"file:///{parts.netloc}{parts.path}",
        )
    return os.path.normpath(unquote(parts.path))


def spool_below(sink: str, location: str) -> str:
    """The spool inside a pipeline's own location; refused where that has no room for files."""
    if location.startswith("/") or scheme_of(location) in OBJECT_SCHEMES:
        return f"{location}/{_FOLDER}"
    raise Misconfigured(
        f"{sink}: {without_secrets(location)} is neither a folder nor in an object store",
        'name a location that driver and executors share: spool="s3://bucket/spool", or a folder',
    )


def _batches(
    file: pa.NativeFile, handle: Handle, rows: int, location: str
) -> Iterator[pa.RecordBatch]:
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
            f"the spool {location} holds {seen} rows of {handle}, and its receipt names {rows}",
            "the file was changed by somebody else, or its disk lost a part of it",
        )


def _folder(uid: Uid, tag: SinkTag) -> str:
    return f"rows/{uid}-s{tag}"


def _name(handle: Handle) -> str:
    return f"{_folder(handle.uid, handle.sink)}/{handle}{_SUFFIX}"
