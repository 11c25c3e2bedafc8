"""The staging tables of an epoch: which there must be, and what it means where there is none."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from epochal.errors import Fenced, PreparedLost, Refused
from epochal.kit.sql.names import staging_name
from epochal.kit.sql.receipts import has_rows
from epochal.terms import EpochNumber, Identity, Receipt


def staged_tables(
    epoch: EpochNumber,
    receipts: Sequence[Receipt],
    meta: str,
    present: Callable[[Collection[str]], Collection[str]],
) -> dict[str, int]:
    """The staging tables of these receipts, with their partitions; `PreparedLost` without one."""
    wanted = {staging_name(one.handle): one.handle for one in receipts if has_rows(one)}
    there = present(wanted.keys())
    lost = tuple(str(handle) for name, handle in wanted.items() if name not in there)
    if lost:
        raise PreparedLost(
            f"epoch {epoch}: {len(lost)} of {len(receipts)} staging tables are not in {meta}, and "
            "the ledger does not prove them committed",
            "somebody dropped them, or the server was restored from a backup",
            handles=lost,
        )
    return {name: handle.partition for name, handle in wanted.items()}


def committed_elsewhere(
    table: str, epoch: EpochNumber, by: int | None, mine: Identity
) -> Fenced | Refused:
    """Why an epoch can't be rehearsed whose ledger shows it committed, by that generation."""
    fact = f"epoch {epoch} is being written, and {table} proves it committed"
    if by is not None and by > mine.generation:
        return Fenced(
            f"{fact} by generation {by}; this driver is {mine.generation}",
            "another driver has taken this checkpoint over: leave this one stopped",
        )
    return Refused(
        f"{fact} already: the epoch log is older than the table",
        "the log or the checkpoint was restored from a backup: start with the newer one, or with a "
        "run= of its own",
    )
