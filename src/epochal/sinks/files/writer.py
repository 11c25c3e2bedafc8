"""Prepares rows as files, where the sink's back end keeps them invisible."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import pyarrow as pa

from epochal.contract import Task
from epochal.sinks.files.formats import Encoder, Format
from epochal.sinks.files.gathering import Gathering, Room
from epochal.sinks.files.layout import file_name
from epochal.sinks.files.places import Attempt
from epochal.sinks.files.schemas import keep_schema
from epochal.terms import Fingerprint, Json, Receipt


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How files are to look, from the sink's declaration."""

    format: Format
    compression: str
    room: Room


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
    """One attempt's files, where its back end prepares them."""

    def __init__(self, task: Task, plan: Plan, attempt: Attempt) -> None:
        self._task = task
        self._plan = plan
        self._attempt = attempt
        self._rows = Gathering(
            task.schema, plan.room, self._create, held_bytes=lambda: attempt.held_bytes
        )

    def write(self, batch: pa.RecordBatch) -> None:
        self._rows.write(batch)

    def prepare(self) -> Receipt:
        self._rows.finish()
        made = self._rows.made
        token: dict[str, Json] = {"files": []}
        sealed: list[dict[str, Json]] = []
        if made:
            token["schema"] = keep_schema(self._attempt.store, self._task.schema)
            sealed = self._attempt.seal([file.relative for file in made])
            token["files"] = [
                {**told, "rows": file.rows} for file, told in zip(made, sealed, strict=True)
            ]
        return Receipt(
            handle=self._task.handle,
            fingerprint=Fingerprint(sum(file.rows for file in made)),
            bytes=sum(int(str(told["bytes"])) for told in sealed),
            token=token,
        )

    def abort(self) -> None:
        # First: what is closed after it goes nowhere, and is not sent only to be thrown away.
        self._attempt.discard()
        self._rows.abandon()

    @cached_property
    def _encoder(self) -> Callable[[pa.NativeFile], Encoder]:
        return self._plan.format.encoder(self._rows.sample, self._plan.compression)

    def _create(self, folder: str, number: int) -> _File:
        suffix = self._plan.format.suffix(self._plan.compression)
        name = file_name(self._task.handle, number, suffix)
        relative = f"{folder}/{name}" if folder else name
        stream = self._attempt.create(relative)
        return _File(relative, stream, self._encoder(stream))
