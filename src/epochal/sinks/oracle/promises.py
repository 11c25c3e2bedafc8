"""What Oracle promises and what it can't do, as data for docs and conformance suite."""

from __future__ import annotations

from epochal.kit.promises import Promises

STAGED = Promises(
    sink="`Oracle`, staged",
    at_one_instant="a whole epoch",
    proof="a row in the same transaction",
    by_key="upsert, replace",
    deletes="`delete_when`",
    output_modes="append; with keys also update",
    limits=["never run against an Oracle server"],
)
PREPARED = Promises(
    sink="`Oracle`, two-phase",
    at_one_instant="a task's rows",
    proof="a row in the same transaction",
    limits=["never run against an Oracle server"],
)
PROMISES = (STAGED, PREPARED)
