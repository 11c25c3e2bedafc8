"""How rows leave a task: as columns, which are encoded here, or as bytes that are ready."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from epochal.sinks.postgres.connecting import Server
from epochal.sinks.postgres.packing import places_of_nul
from epochal.sinks.postgres.tasks import ArrowConnection, BytesConnection, Place, TaskConnection
from epochal.sinks.postgres.types import Sent


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """One field on its way into a column."""

    field: str
    column: str
    sent: Sent
    wanted: pa.DataType | None = None
    """What the column reads, where numbers must be widened or narrowed."""

    def values(self, block: pa.Table) -> pa.ChunkedArray:
        values = block.column(self.field)
        if self.sent.convert is not None:
            values = self.sent.convert(values)
        return values if self.wanted in {None, values.type} else values.cast(self.wanted)


def to_staging(sent: Mapping[str, Sent]) -> list[Copied]:
    """Under the fields' own names."""
    return [Copied(field=name, column=name, sent=one) for name, one in sent.items()]


class Sending(Protocol):
    def connect(self, server: Server, application: str) -> TaskConnection[Any]: ...

    def send(self, connection: Any, place: Place, block: pa.Table) -> None:
        """Copy one block; `pa.ArrowInvalid` where a value does not fit its column."""

    def nuls(self, block: pa.Table) -> Iterator[tuple[str, int]]:
        """Fields that hold the character NUL, each with its first row of the block."""


class ByColumns:
    def __init__(self, copied: Sequence[Copied]) -> None:
        self._copied = copied

    connect = ArrowConnection

    def send(self, connection: ArrowConnection, place: Place, block: pa.Table) -> None:
        columns = {one.column: one.values(block) for one in self._copied}
        connection.ingest(place, pa.table(columns))

    def nuls(self, block: pa.Table) -> Iterator[tuple[str, int]]:
        for one in self._copied:
            values = block.column(one.field)
            if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
                place = pc.index(pc.match_substring(values, "\0"), True).as_py()
                if place >= 0:
                    yield one.field, int(place)


class ByBytes:
    def __init__(self, copied: Sequence[Copied]) -> None:
        self._copied = copied

    connect = BytesConnection

    def send(self, connection: BytesConnection, place: Place, block: pa.Table) -> None:
        columns = [one.column for one in self._copied]
        connection.copy(place, columns, map(_bytes_of, block.column(0).chunks))

    def nuls(self, block: pa.Table) -> Iterator[tuple[str, int]]:
        texts = [place for place, one in enumerate(self._copied) if one.sent.type.base == "text"]
        found = places_of_nul(block.column(0).to_pylist(), texts)
        return ((self._copied[place].field, row) for place, row in found.items())


def _bytes_of(rows: pa.BinaryArray) -> memoryview:
    """What lies in the array's buffer one after the other."""
    _, offsets, data = rows.buffers()
    if data is None:
        return memoryview(b"")
    first, last = np.frombuffer(offsets, np.int32)[[rows.offset, rows.offset + len(rows)]]
    return memoryview(data)[first:last]
