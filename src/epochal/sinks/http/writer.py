"""Prepares rows at a receiver: `POST /prepare/{txn}`.

What fits one request goes in one. More goes in numbered parts, each of which may be sent again by
itself, and a last word that all are there; so a lost reply costs one part and not the task, and
memory is that of one part.
"""

from __future__ import annotations

import os
from contextlib import suppress
from functools import lru_cache

import pyarrow as pa

from epochal.contract import Task
from epochal.errors import EpochalError, InvariantBroken, TryAgain
from epochal.sinks.http.connecting import Client, Reply
from epochal.sinks.http.parts import Format, sliced
from epochal.sinks.http.service import Service
from epochal.terms import Fingerprint, Receipt

_KEPT_CLIENTS = 8


@lru_cache(maxsize=_KEPT_CLIENTS)
def kept_client(service: Service, _process: int) -> Client:
    """Connections outlive a task; a forked worker must not speak on its parent's sockets."""
    return Client(service)


class HttpWriter:
    def __init__(self, task: Task, service: Service, form: Format, *, part_bytes: int) -> None:
        self._task = task
        self._client = kept_client(service, os.getpid())
        self._form = form
        self._part_bytes = part_bytes
        self._path = f"/prepare/{task.handle}"
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_bytes = 0
        self._parts = 0
        self._rows = 0
        self._bytes = 0

    def write(self, batch: pa.RecordBatch) -> None:
        for piece in sliced(batch, self._part_bytes):
            if self._waiting_bytes + piece.nbytes > self._part_bytes:
                self._send_part()
            self._waiting.append(piece)
            self._waiting_bytes += piece.nbytes
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
        self._waiting.clear()
        if self._rows:
            with suppress(EpochalError):
                self._client.ask("POST", f"/abort/{self._task.handle}", reads=(409,))

    def _send_part(self) -> None:
        if self._waiting:
            self._send({"part": str(self._parts)})
            self._parts += 1

    def _send(self, params: dict[str, str]) -> Reply:
        body = self._form.encode(self._waiting)
        self._waiting, self._waiting_bytes = [], 0
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
            # Swept as an orphan while it was written: another attempt has a name of its own.
            raise TryAgain(f"{self._path} answered {reply.status}: {reply.told}")
        return reply

    def _require_all(self, reply: Reply) -> None:
        if reply.body.get("state") != "prepared" or reply.body.get("rows") != self._rows:
            raise InvariantBroken(
                f"{self._rows} rows were sent to {self._path}, and the receiver says "
                f"{reply.body.get('state')} with {reply.body.get('rows')} rows",
                "this is a defect of the receiver; nothing was decided",
            )
