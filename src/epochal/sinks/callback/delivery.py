"""`CallbackDelivery`: calls a function with the rows of a decided epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from epochal.kit.spool.rows import RowSpool
from epochal.sinks.callback.sink import CallbackEpoch
from epochal.terms import Ability, EpochNumber, Identity, Json, Receipt


class CallbackDelivery:
    """Runs on the driver, once per commit; a commit that was interrupted calls again."""

    def __init__(
        self, identity: Identity, spool: RowSpool, function: Callable[[CallbackEpoch], Any]
    ) -> None:
        self._identity = identity
        self._spool = spool
        self._function = function

    def check(self, schema: pa.Schema | None) -> Sequence[Ability]:  # noqa: ARG002
        return [
            Ability(
                name="called once per epoch",
                granted=False,
                because="a driver that dies during the call calls again: deduplicate by token",
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
        """What the function opened stays open."""
