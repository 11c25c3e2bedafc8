"""Writers of both modes: `HttpWriter` sends rows to a receiver, `CallSpoolingWriter` spools calls.

`POST /prepare/{txn}`: rows that fit one request go in one. More go in numbered parts, each of which
may be sent again by itself, and a last request with the count of parts; so a lost reply costs one
part and not the task, and memory is that of one part.

    POST /prepare/{txn}?part=0   rows      ┐ any of them may be repeated
    POST /prepare/{txn}?part=1   rows      ┘
    POST /prepare/{txn}?parts=2            the receiver has all of them: prepared
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import pyarrow as pa

from epochal.contract import Task
from epochal.errors import EpochalError, InvariantBroken, TryAgain
from epochal.kit import json_lines
from epochal.kit.spool.rows import RowSpool, SpoolingWriter
from epochal.terms import Fingerprint, Receipt

if TYPE_CHECKING:
    from epochal.sinks.http.client import Client, Reply

NDJSON = "application/x-ndjson"
ARROW = "application/vnd.apache.arrow.stream"
ROWS_PER_CALL = "rows_per_call"
"""In the receipt: taken from a later declaration, a key would name other rows."""


def _as_ndjson(batches: Sequence[pa.RecordBatch]) -> bytes:
    return b"".join(json_lines.lines(batch).to_pybytes() for batch in batches)


def _as_arrow(batches: Sequence[pa.RecordBatch]) -> bytes:
    stream = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(stream, batches[0].schema, options=options) as encoder:
        for batch in batches:
            encoder.write_batch(batch)
    encoded: bytes = stream.getvalue().to_pybytes()
    return encoded


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How rows are encoded in a request's body."""

    content_type: str
    encode: Callable[[Sequence[pa.RecordBatch]], bytes]


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "ndjson": Format(content_type=NDJSON, encode=_as_ndjson),
        "arrow": Format(content_type=ARROW, encode=_as_arrow),
    }
)


class HttpWriter:
    """Two-phase mode."""

    def __init__(self, task: Task, client: Client, form: Format, *, part_bytes: int) -> None:
        self._task = task
        self._client = client
        self._form = form
        self._part_bytes = part_bytes
        self._path = f"/prepare/{task.handle}"
        self._buffer: list[pa.RecordBatch] = []
        self._buffer_bytes = 0
        self._parts = 0
        self._rows = 0
        self._bytes = 0

    def write(self, batch: pa.RecordBatch) -> None:
        for piece in _sliced(batch, self._part_bytes):
            if self._buffer_bytes + piece.nbytes > self._part_bytes:
                self._send_part()
            self._buffer.append(piece)
            self._buffer_bytes += piece.nbytes
            self._rows += piece.num_rows

    def prepare(self) -> Receipt:
        if self._parts:
            self._send_part()
            self._require_all(self._post(b"", {"parts": str(self._parts)}))
        elif self._rows:
            self._require_all(self._send({}))
        return Receipt(
            handle=self._task.handle,
            fingerprint=Fingerprint(self._rows),
            bytes=self._bytes,
            token={"parts": self._parts},
        )

    def abort(self) -> None:
        self._buffer.clear()
        if self._rows:
            with suppress(EpochalError):
                self._client.ask("POST", f"/abort/{self._task.handle}", reads=(409,))

    def _send_part(self) -> None:
        if self._buffer:
            self._send({"part": str(self._parts)})
            self._parts += 1

    def _send(self, params: dict[str, str]) -> Reply:
        body = self._form.encode(self._buffer)
        self._buffer, self._buffer_bytes = [], 0
        self._bytes += len(body)
        return self._post(body, params)

    def _post(self, body: bytes, params: dict[str, str]) -> Reply:
        key = "-".join((str(self._task.handle), *(f"{k}{v}" for k, v in params.items())))
        headers = {"Content-Type": self._form.content_type, "Idempotency-Key": key}
        reply = self._client.ask(
            "POST",
            self._path,
            content=body,
            params=params,
            headers=headers,
            reads=(409, 410),
        )
        if reply.status in (409, 410):
            # Aborted as an orphan while it was written: another attempt has its own name.
            raise TryAgain(f"{self._path} answered {reply.status}: {reply.text}")
        return reply

    def _require_all(self, reply: Reply) -> None:
        if reply.body.get("state") != "prepared" or reply.body.get("rows") != self._rows:
            raise InvariantBroken(
                f"{self._rows} rows were sent to {self._path}, and the receiver answers "
                f"{reply.body.get('state')} with {reply.body.get('rows')} rows",
                "this is a defect of the receiver; nothing was decided",
            )


def _sliced(batch: pa.RecordBatch, most_bytes: int) -> Iterator[pa.RecordBatch]:
    """The batch in pieces of about so many bytes, and of one row at least."""
    pieces = max(1, -(-batch.nbytes // most_bytes))
    rows = max(1, -(-batch.num_rows // pieces))
    for first in range(0, batch.num_rows, rows):
        yield batch.slice(first, rows)


class CallSpoolingWriter(SpoolingWriter):
    """Idempotency-key mode: the rows go to the spool, and the driver makes calls of them."""

    def __init__(self, task: Task, spool: RowSpool, *, rows_per_call: int) -> None:
        super().__init__(task, spool)
        self._rows_per_call = rows_per_call

    def prepare(self) -> Receipt:
        return replace(super().prepare(), token={ROWS_PER_CALL: self._rows_per_call})
