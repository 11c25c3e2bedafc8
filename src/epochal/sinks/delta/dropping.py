"""Forgetting a pipeline at a table: what a log can't forget is said."""

from __future__ import annotations

from epochal.contract import Dropped
from epochal.sinks.delta.place import Place, handle_in
from epochal.terms import Identity


def drop(place: Place, identity: Identity, ledger: str, *, is_dry_run: bool) -> Dropped:
    """
    Rows that a late task staged for a merge after its note was gone: VACUUM passes over them. Data
    files of such tasks are VACUUM's, as all that no version names.
    """
    orphans = [
        path
        for path in place.staged()
        if (handle := handle_in(path)) is not None
        and (handle.uid, handle.sink) == (identity.uid, identity.tag)
    ]
    if not is_dry_run:
        place.remove(orphans)
    return Dropped(
        removed=[f"the staged file {path}" for path in orphans],
        kept=f"the application transaction {ledger} and those that tell its name: a Delta log has "
        "no way to remove one; delta.setTransactionRetentionDuration lets the table forget it",
    )
