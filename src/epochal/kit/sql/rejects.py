"""Rows that a table refuses: how they are told, and how they are set apart before the decision."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from epochal.errors import InvariantBroken, RowRejected
from epochal.terms import EpochNumber, Handle, Receipt

REJECTED = pa.schema(
    [
        pa.field("sink", pa.string(), nullable=False),
        pa.field("epoch", pa.int64(), nullable=False),
        pa.field("partition", pa.int32(), nullable=False),
        pa.field("sqlstate", pa.string(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("row", pa.string(), nullable=False),
    ]
)
"""What another sink gets of a rejected row: the row itself as JSON text."""
_SHOWN_CHARS_MAX = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    table: str
    """Its staging table."""
    at: str
    """Its place there."""
    part: int
    row: str
    """The row as JSON text."""
    sqlstate: str
    reason: str

    def __str__(self) -> str:
        return f"partition {self.part}, row {self.row[:_SHOWN_CHARS_MAX]}: {self.reason}"


def rows_of(sink: str, epoch: int, rejected: Sequence[Rejected]) -> pa.Table:
    """Rejected rows as another sink takes them."""
    return pa.Table.from_pylist(
        [
            {
                "sink": sink,
                "epoch": epoch,
                "partition": one.part,
                "sqlstate": one.sqlstate,
                "reason": one.reason,
                "row": one.row,
            }
            for one in rejected
        ],
        schema=REJECTED,
    )


def row_text(row: Mapping[str, object]) -> str:
    return json.dumps(row, default=_plain, ensure_ascii=False)


def _plain(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)


def too_many(where: str, table: str, limit: int, first: object) -> RowRejected:
    return RowRejected(
        f"{where}: {table} refuses more than {limit} rows, among them {first}",
        "so many are not bad rows but a wrong query or table; rejects_max= is the limit",
    )


class SetApart:
    """
    The rows of one rehearsal that the table refuses.

    They are gathered over all its attempts: what was once set apart stays so, or a row that another
    attempt would take after all could be both in the table and among the rejected.
    """

    def __init__(self, table: str, limit: int) -> None:
        self._table = table
        self._limit = limit
        self._of: tuple[EpochNumber, frozenset[Handle]] | None = None
        self._unfit: dict[tuple[str, str], Rejected] = {}
        self._found: dict[tuple[str, str], Rejected] = {}
        self.is_removed = True
        """All that were found are out of staging, durably."""

    def begin(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        of = (epoch, frozenset(receipt.handle for receipt in receipts))
        if of != self._of:
            self._of, self._unfit, self._found, self.is_removed = of, {}, {}, True

    def note(self, unfit: Sequence[Rejected]) -> None:
        """Rows that a task kept out of the others' way: nothing is applied from there."""
        self._unfit |= self._new(unfit)

    def add(self, found: Sequence[Rejected]) -> None:
        """Rows that the table refused just now: they leave staging before it is asked again."""
        new = self._new(found)
        if not new:
            raise InvariantBroken(
                f"{self._where}: {self._table} refuses {found[0]}, which was taken out of staging",
                "somebody else writes to the staging tables; nothing was decided",
            )
        self._found |= new
        self.is_removed = False

    def _new(self, told: Sequence[Rejected]) -> dict[tuple[str, str], Rejected]:
        known = self._unfit.keys() | self._found.keys()
        new = {(one.table, one.at): one for one in told if (one.table, one.at) not in known}
        if len(new) > self.left:
            raise too_many(self._where, self._table, self._limit, told[0])
        return new

    @property
    def left(self) -> int:
        """How many more there may be."""
        return self._limit - len(self)

    @property
    def rows(self) -> Sequence[Rejected]:
        return (*self._unfit.values(), *self._found.values())

    def __len__(self) -> int:
        return len(self._unfit) + len(self._found)

    def removals(self) -> Iterator[tuple[str, Sequence[str]]]:
        """Staging tables, and the places of rows to take out of each; none where that is done."""
        if self.is_removed:
            return
        for table in {one.table for one in self._found.values()}:
            yield table, tuple(one.at for one in self._found.values() if one.table == table)

    @property
    def _where(self) -> str:
        return "" if self._of is None else f"epoch {self._of[0]}"
