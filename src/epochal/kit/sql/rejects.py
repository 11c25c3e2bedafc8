"""Rows that a table refuses: how they are found again, reported, and set apart before the decision.

A rehearsal that meets refused rows deletes them from staging in a transaction of their own, and is
tried again. An epoch that is applied after that, in any process, leaves out the same rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa

from epochal.errors import InvariantBroken, RowRejected, TryAgain
from epochal.kit.sql.errors import BAD_ROWS
from epochal.kit.sql.types import json_text
from epochal.terms import EpochNumber, Handle, Receipt

if TYPE_CHECKING:
    from epochal.kit.sql.apply import Source
    from epochal.kit.sql.client import Session

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
"""The columns that another sink gets for a rejected row: the row itself is JSON text."""
_SHOWN_CHARS_MAX = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    table: str
    """Its staging table."""
    file: int
    """See `Held.file`."""
    place: str
    """Its place there."""
    part: int
    row: str
    """The row as JSON text."""
    sqlstate: str
    reason: str

    def __str__(self) -> str:
        return f"partition {self.part}, row {self.row[:_SHOWN_CHARS_MAX]}: {self.reason}"


class Rows(Protocol):
    """Some rows of a staging table."""

    @property
    def condition(self) -> str: ...

    @property
    def only(self) -> str | None:
        """The place of the row, where it is a single one."""

    def halves(self, session: Session, source: Source) -> Sequence[Rows]: ...


@dataclass(frozen=True, slots=True)
class NumberedRows:
    """Rows by a column that counts them."""

    column: str
    first: int
    last: int

    @property
    def condition(self) -> str:
        return f"s.{self.column} BETWEEN {self.first} AND {self.last}"

    @property
    def only(self) -> str | None:
        return str(self.first) if self.first == self.last else None

    def halves(self, session: Session, source: Source) -> Sequence[Rows]:  # noqa: ARG002
        middle = (self.first + self.last) // 2
        return (
            NumberedRows(self.column, self.first, middle),
            NumberedRows(self.column, middle + 1, self.last),
        )


def table_of(sink: str, epoch: int, rejected: Sequence[Rejected]) -> pa.Table:
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


def shown_rows(block: pa.Table) -> list[dict[str, object]]:
    """Rows for people: Python has no dates after the year 9999, and no year 0; Arrow has both."""
    columns = [_shown(values) for values in block.columns]
    return [dict(zip(block.column_names, row, strict=True)) for row in zip(*columns, strict=True)]


def _shown(values: pa.ChunkedArray) -> list[object]:
    try:
        found: list[object] = values.to_pylist()
    except (OverflowError, ValueError):
        is_nested = pa.types.is_nested(values.type)
        found = (json_text(values) if is_nested else values.cast(pa.large_string())).to_pylist()
    return found


def row_text(row: Mapping[str, object], *, is_ascii: bool = False) -> str:
    return json.dumps(row, default=_json_value, ensure_ascii=is_ascii)


def _json_value(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)


def too_many(where: str, table: str, limit: int, first: object) -> RowRejected:
    return RowRejected(
        f"{where}: {table} refuses more than {limit} rows, among them {first}",
        "so many are not bad rows but a wrong query or table; rejects_max= is the limit",
    )


def refusal(table: object, epoch: int, rejected: Sequence[Rejected], reason: str) -> RowRejected:
    """The error for rows that the table will never take as they are."""
    if not rejected:
        return RowRejected(
            f"epoch {epoch}: {table} refuses rows: {reason}",
            "no single row is refused alone: rows of this epoch exclude each other",
        )
    return RowRejected(
        f"epoch {epoch}: {table} refuses {'; '.join(map(str, rejected))}",
        BAD_ROWS,
    )


class SetApart:
    """
    The rows of one rehearsal that the table refuses.

    They are collected over all its attempts: a row once set apart stays so. Otherwise a row that a
    later attempt would accept could be both in the table and among the rejected.
    """

    def __init__(self, table: str, limit: int) -> None:
        self._table = table
        self._limit = limit
        self._of: tuple[EpochNumber, frozenset[Handle]] | None = None
        self._unfit: dict[tuple[str, str], Rejected] = {}
        self._found: dict[tuple[str, str], Rejected] = {}
        self.is_removed = True
        """All that were found are deleted from staging, durably."""

    def begin(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        """With the receipts of all attempts that staged rows."""
        of = (epoch, frozenset(receipt.handle for receipt in receipts))
        if of != self._of:
            self._of, self._unfit, self._found, self.is_removed = of, {}, {}, True

    @property
    def attempts(self) -> tuple[EpochNumber, Sequence[Handle]]:
        """The epoch of this rehearsal, and its attempts that staged rows."""
        if self._of is None:
            raise InvariantBroken(f"{self._table}: rows are set apart outside a rehearsal")
        epoch, handles = self._of
        return epoch, sorted(handles)

    def note(self, unfit: Sequence[Rejected]) -> None:
        """Add rows that a task kept as text, as no column could hold them: none is applied."""
        self._unfit |= self._new(unfit)

    def add(self, found: Sequence[Rejected]) -> None:
        """Add rows that the table refused just now: to be removed before the next attempt."""
        new = self._new(found)
        if not new:
            raise InvariantBroken(
                f"{self._where}: {self._table} refuses {found[0]}, which was taken out of staging",
                "somebody else writes to the staging tables; nothing was decided",
            )
        self._found |= new
        self.is_removed = False

    def _new(self, rejected: Sequence[Rejected]) -> dict[tuple[str, str], Rejected]:
        self.require_in_place({one.table: one.file for one in rejected})
        known = self._unfit.keys() | self._found.keys()
        new = {
            (one.table, one.place): one for one in rejected if (one.table, one.place) not in known
        }
        if len(new) > self.left:
            raise too_many(self._where, self._table, self._limit, rejected[0])
        return new

    def require_in_place(self, files: Mapping[str, int]) -> None:
        """Raise where rows that were found before have other places in these staging tables."""
        moved = {one.table for one in self.rows if files.get(one.table, one.file) != one.file}
        if moved:
            raise TryAgain(
                f"{self._where}: {', '.join(sorted(moved))} was rewritten while rows of it were "
                "set apart, by VACUUM FULL or CLUSTER; no decision was made",
                "the epoch is tried again whole",
            )

    @property
    def left(self) -> int:
        """How many more are allowed."""
        return self._limit - len(self)

    @property
    def rows(self) -> Sequence[Rejected]:
        return (*self._unfit.values(), *self._found.values())

    def __len__(self) -> int:
        return len(self._unfit) + len(self._found)

    def removals(self) -> Iterator[tuple[str, Sequence[str]]]:
        """Staging tables, and the places of rows to delete from each; none where that is done."""
        if self.is_removed:
            return
        for table in {one.table for one in self._found.values()}:
            yield table, tuple(one.place for one in self._found.values() if one.table == table)

    @property
    def _where(self) -> str:
        return "" if self._of is None else f"epoch {self._of[0]}"
