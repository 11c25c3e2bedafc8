"""Counting a table, and forgetting a pipeline: what operators ask of every database."""

from __future__ import annotations

from epochal.contract import Dropped, Recount
from epochal.kit.sql.dialect import Session
from epochal.kit.sql.ledger import Ledger
from epochal.kit.sql.modes import WriteMode
from epochal.terms import quantity


def recountable(mode: WriteMode) -> str:
    """Why a count would say nothing; empty where it does."""
    if not mode.is_keyed:
        return ""
    return f"mode={mode.mode!r} changes rows in place: their number says nothing"


def recount(session: Session, quoted: str, table: str) -> Recount:
    """All rows of the table: it does not say whose they are."""
    ((rows,),) = session.query(f"SELECT COUNT(*) FROM {quoted}")
    return Recount(
        rows=int(rows), because=f"all rows of {table}, whoever wrote them", is_alone=False
    )


def forget(session: Session, ledger: Ledger, *, is_dry_run: bool) -> Dropped:
    """The ledger rows of one sink of one uid. Staging tables are in doubt, and gone by now."""
    count = ledger.count(session) if is_dry_run else ledger.forget(session)
    told = f"{quantity(count, 'row')} of {ledger.schema}.{ledger.dialect.ledger}"
    return Dropped(removed=[told] if count else [])
