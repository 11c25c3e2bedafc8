"""What MySQL promises and what it can't do, as data for docs and conformance suite."""

from __future__ import annotations

from epochal.kit.promises import Promises

STAGED = Promises(
    sink="`MySQL`, staged",
    at_one_instant="a whole epoch",
    proof="a row in the same transaction",
    by_key="upsert, replace",
    deletes="`delete_when`",
    output_modes="append; with keys also update",
    limits=["tested with MariaDB only"],
)
PREPARED = Promises(
    sink="`MySQL`, XA",
    at_one_instant="a task's rows",
    proof="a row in the same transaction",
    limits=[
        "refused if rows can collide in a unique index",
        "the server holds prepared transactions while the pipeline is down",
    ],
)
PROMISES = (STAGED, PREPARED)
