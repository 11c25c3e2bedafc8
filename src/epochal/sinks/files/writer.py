"""The writer of a Files sink: files of one attempt, which its back end keeps invisible."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256

import pyarrow as pa

from epochal.contract import Task
from epochal.errors import InvariantBroken
from epochal.kit.file_buffer import BufferLimits, FileBuffer
from epochal.kit.parquet import nullable_inside
from epochal.sinks.files import layout
from epochal.sinks.files.backend import Attempt
from epochal.sinks.files.formats import Encoder, Format
from epochal.storage import Store
from epochal.terms import Fingerprint, Handle, Json, Receipt


@dataclass(frozen=True, slots=True, kw_only=True)
class FileShape:
    """How files are to look, from the sink's declaration."""

    format: Format
    compression: str
    limits: BufferLimits


@dataclass(slots=True)
class _File:
    relative: str
    stream: pa.NativeFile
    encoder: Encoder
    rows: int = 0

    @property
    def size_bytes(self) -> int:
        return int(self.stream.tell())

    def write(self, rows: pa.Table) -> None:
        self.encoder.write(rows)
        self.rows += rows.num_rows

    def close(self) -> None:
        self.encoder.close()
        self.stream.close()


class FileWriter:
    """One attempt's files."""

    def __init__(self, task: Task, shape: FileShape, attempt: Attempt) -> None:
        self._task = task
        self._shape = shape
        self._attempt = attempt
        self._rows = FileBuffer(
            task.schema, shape.limits, self._create, held_bytes=lambda: attempt.held_bytes
        )

    def write(self, batch: pa.RecordBatch) -> None:
        with self._attempt.errors():
            self._rows.write(batch)

    def prepare(self) -> Receipt:
        with self._attempt.errors():
            self._rows.finish()
            return receipt_of(
                self._attempt,
                self._task.handle,
                self._task.schema,
                {file.relative: file.rows for file in self._rows.made},
            )

    def abort(self) -> None:
        # First: what is closed after it is not sent only to be thrown away.
        self._attempt.discard()
        self._rows.abandon()

    @cached_property
    def _encoder(self) -> Callable[[pa.NativeFile], Encoder]:
        encoder = self._shape.format.encoder
        if encoder is None:
            raise InvariantBroken(f"no task writes {self._shape.format.extension} files")
        return encoder(self._rows.sample, self._shape.compression)

    def _create(self, folder: str, number: int) -> _File:
        suffix = self._shape.format.suffix(self._shape.compression)
        name = layout.file_name(self._task.handle, number, suffix)
        relative = f"{folder}/{name}" if folder else name
        stream = self._attempt.create(relative)
        return _File(relative, stream, self._encoder(stream))


def receipt_of(
    attempt: Attempt,
    handle: Handle,
    schema: pa.Schema,
    files: Mapping[str, int | None],
    *,
    fingerprint: Fingerprint | None = None,
) -> Receipt:
    """
    Make the files of an attempt durable: the receipt names them. `files` are the rows of each,
    None where they are not counted file by file; `fingerprint` is of all rows, where more than
    their number is known.
    """
    token: dict[str, Json] = {"files": []}
    sealed: list[dict[str, Json]] = []
    if files:
        token["schema"] = _keep_schema(attempt.ours, nullable_inside(schema))
        sealed = attempt.seal(list(files))
        token["files"] = [
            {**fields, "rows": rows} for rows, fields in zip(files.values(), sealed, strict=True)
        ]
    return Receipt(
        handle=handle,
        fingerprint=fingerprint or Fingerprint(sum(rows or 0 for rows in files.values())),
        bytes=sum(int(str(fields["bytes"])) for fields in sealed),
        token=token,
    )


def _keep_schema(store: Store, schema: pa.Schema) -> str:
    """
    Keep the columns beside the rows, once per schema, so that readers need not guess types.

    The key is a digest of the content and is never deleted: every process puts the same.
    """
    content = schema.serialize().to_pybytes()
    digest = sha256(content).hexdigest()[:16]
    if store.read(layout.schema(digest)) is None:
        store.put_if_absent(layout.schema(digest), content)
    return digest
