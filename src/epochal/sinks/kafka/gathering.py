"""Rows that wait for company, so that batches are full.

Rows of one partition come in pieces, slices of the batches that a task is given. A piece is cut
where a batch is full, and only a batch of several pieces is copied together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa

from epochal.kafka import batches
from epochal.kafka.batches import Columns
from epochal.kafka.varints import Ints


class Waiting:
    """Rows of one partition."""

    __slots__ = ("_pieces", "_sizes", "bytes")

    def __init__(self) -> None:
        self._pieces: list[Columns] = []
        self._sizes: list[Ints] = []
        self.bytes = 0
        """What all of them take, never too few."""

    def add(self, rows: Columns, sizes: Ints) -> None:
        """`sizes` says what each row takes, as `batches.row_bytes` does."""
        self._pieces.append(rows)
        self._sizes.append(sizes)
        self.bytes += int(sizes.sum())

    def take(self, batch_bytes_max: int, *, with_rest: bool) -> Iterator[Columns]:
        """Batches that are full; what fills none goes on waiting, or comes last."""
        pieces, sizes = self._pieces, self._sizes
        self._pieces, self._sizes, self.bytes = [], [], 0
        *full, rest = batches.portions(sizes, batch_bytes_max)
        for portion in full:
            yield joined([pieces[at].slice(start, end - start) for at, start, end in portion])
        for at, start, end in rest:
            self.add(pieces[at].slice(start, end - start), sizes[at][start:end])
        if with_rest or self.bytes >= batch_bytes_max:
            last, self._pieces, self._sizes, self.bytes = self._pieces, [], [], 0
            yield joined(last)

    def __bool__(self) -> bool:
        return bool(self._pieces)


def joined(pieces: Sequence[Columns]) -> Columns:
    if len(pieces) == 1:
        return pieces[0]

    def both(name: str) -> pa.Array | None:
        columns = [getattr(piece, name) for piece in pieces]
        return None if columns[0] is None else pa.concat_arrays(columns)

    return Columns(
        value=both("value"),
        key=both("key"),
        timestamp_ms=both("timestamp_ms"),
        headers=both("headers"),
    )
