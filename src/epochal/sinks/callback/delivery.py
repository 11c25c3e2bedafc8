"""Calls a function with the rows of a decided epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from epochal.kit.spool import RowSpool
from epochal.terms import Ability, EpochNumber, Identity, Json, Receipt


@dataclass(frozen=True, slots=True, kw_only=True)
class CallbackEpoch:
    """What the function is given: a decided epoch with all its rows."""

    pipeline: str
    sink: str
    number: EpochNumber
    token: str
    """The same at every call for this epoch, and for no other: what to deduplicate by."""
    rows: int
    _batches: Callable[[], Iterator[pa.RecordBatch]] = field(repr=False)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows, in the same order at every call; read from the spool as they are asked for."""
        return self._batches()

    def table(self) -> pa.Table:
        """All rows at once, in memory."""
        return pa.Table.from_batches(list(self._batches()))


class CallbackDelivery:
    """Runs on the driver, once a commit; a commit that was cut short calls again."""

    def __init__(
        self, identity: Identity, spool: RowSpool, function: Callable[[CallbackEpoch], Any]
    ) -> None:
        self._identity = identity
        self._spool = spool
        self._function = function

    def check(self, schema: pa.Schema | None) -> Sequence[Ability]:  # noqa: ARG002
        return [
            Ability(
                name="called once an epoch",
                granted=False,
                because="a driver that dies during the call makes it again: deduplicate by token",
            )
        ]

    def deliver(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> Mapping[str, Json]:
        ordered = sorted(receipts, key=lambda receipt: receipt.handle.partition)
        rows = sum(receipt.rows for receipt in ordered)

        def batches() -> Iterator[pa.RecordBatch]:
            for receipt in ordered:
                yield from self._spool.read(receipt.handle, rows=receipt.rows)

        if rows:
            self._function(
                CallbackEpoch(
                    pipeline=self._identity.pipeline,
                    sink=self._identity.sink,
                    number=epoch,
                    token=f"epochal-{self._identity.uid}-s{self._identity.tag}-e{epoch}",
                    rows=rows,
                    _batches=batches,
                )
            )
        return {"rows": rows}

    def kept(self) -> str:
        return ""

    def close(self) -> None:
        """The function keeps what it opened."""
