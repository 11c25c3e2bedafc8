"""Ending the prepared transactions of an epoch, one a task, on whichever database.

Each ends by itself and in its own time. What is told of all of them together is here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor

from epochal.errors import PreparedLost, TryAgain
from epochal.kit.sql.receipts import has_rows
from epochal.terms import EpochNumber, Handle, Receipt


def each(
    verb: Callable[[Receipt], Handle | None], receipts: Sequence[Receipt], *, at_once_max: int
) -> list[Handle | None]:
    """The same for many at a time: each waits for the disk by itself."""
    if len(receipts) <= 1:
        return [verb(receipt) for receipt in receipts]
    workers = min(len(receipts), at_once_max)
    with ThreadPoolExecutor(workers, thread_name_prefix="epochal-commit") as threads:
        return list(threads.map(verb, receipts))


def require_listed(
    epoch: EpochNumber,
    receipts: Sequence[Receipt],
    listed: Collection[Handle | None],
) -> None:
    """Before the decision: all that was prepared must still be there."""
    gone = [one.handle for one in receipts if has_rows(one) and one.handle not in listed]
    if gone:
        raise TryAgain(
            f"epoch {epoch}: {len(gone)} of {len(receipts)} prepared transactions are not on the "
            f"server any more, {gone[0]} among them; no decision was made",
            "somebody rolled them back",
        )


def require_none_lost(
    epoch: EpochNumber,
    receipts: Sequence[Receipt],
    lost: Collection[Handle | None],
) -> None:
    """After the decision: none may be neither on the server nor in its ledger."""
    handles = tuple(str(handle) for handle in lost if handle is not None)
    if handles:
        raise PreparedLost(
            f"epoch {epoch}: {len(handles)} of {len(receipts)} prepared transactions are neither "
            "on the server nor in its ledger: they were rolled back",
            "a person or a script rolled them back, or the server was restored",
            handles=handles,
        )
