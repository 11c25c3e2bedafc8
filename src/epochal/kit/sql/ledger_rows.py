"""The ledger's rows: their columns, and the statements that insert them.

Tasks that leave a prepared transaction write their own row into it; everything else of the ledger
(`ledger.Ledger`) is the driver's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from epochal.errors import Misconfigured
from epochal.kit.sql.dialect import Dialect
from epochal.terms import Claim, Handle, Identity, Receipt

WITHIN_SINK = ("epoch", "part", "generation", "attempt", "claim")
KEY = ("uid", "sink", *WITHIN_SINK)
_COLUMNS = (*KEY, "owner", "pipeline", "sink_name", "run", "row_count")
NAME_CHARS_MAX = 255
_ROWS_PER_STATEMENT_MAX = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRows:
    """The ledger in one schema, as one sink of one pipeline writes it."""

    schema: str
    identity: Identity
    dialect: Dialect

    def __post_init__(self) -> None:
        for what, name in (("pipeline", self.identity.pipeline), ("sink", self.identity.sink)):
            if len(name) > NAME_CHARS_MAX:
                raise Misconfigured(
                    f"the name of the {what} has {len(name)} characters: the ledger takes up to "
                    f"{NAME_CHARS_MAX}",
                    "name= gives a shorter one",
                )

    @property
    def table(self) -> str:
        return self.dialect.quote(self.schema, self.dialect.ledger)

    def record(self, receipts: Sequence[Receipt]) -> list[str]:
        """Statements that insert one row per handle, for the transaction that holds its rows."""
        return self._inserts([self._of_handle(receipt) for receipt in receipts])

    def _of_handle(self, receipt: Receipt) -> str:
        return self._row(key_of(receipt.handle), receipt.handle.claim, receipt.rows)

    def _inserts(self, rows: Sequence[str]) -> list[str]:
        return [
            f"INSERT INTO {self.table} ({self._columns()}) {self.dialect.values(some)}"
            for some in in_pieces(rows)
        ]

    def _name(self, column: str) -> str:
        return self.dialect.quote(column)

    def _columns(self) -> str:
        return ", ".join(map(self._name, _COLUMNS))

    def _row(self, key: Sequence[str | int], owner: Claim, rows: int) -> str:
        who = self.identity
        values = (*key, owner, who.pipeline, who.sink, who.run, rows)
        return ", ".join(map(self.dialect.literal, values))


def key_of(handle: Handle) -> tuple[str | int, ...]:
    """The key of a handle's row, in the order of `KEY`."""
    numbers = (handle.epoch, handle.partition, handle.generation, handle.attempt)
    return (handle.uid, handle.sink, *numbers, handle.claim)


def in_pieces(items: Sequence[str]) -> Iterator[Sequence[str]]:
    """So many of them as one statement takes."""
    size = _ROWS_PER_STATEMENT_MAX
    return (items[start : start + size] for start in range(0, len(items), size))
