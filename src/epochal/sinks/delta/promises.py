"""What Delta promises and what it can't do, as data for docs and conformance suite."""

from __future__ import annotations

from epochal.kit.promises import Promises

PROMISES = (
    Promises(
        sink="`Delta`",
        at_one_instant="a whole epoch: one version",
        proof="the table's application transaction",
        append="yes, and overwrite_partitions",
        by_key="merge",
        deletes="`delete_when`",
        output_modes="append; merge also update",
        limits=[
            "keyed modes are computed in the driver's memory",
            "unknown table features are refused",
        ],
        cannot={
            "refuse rows": "a table with CHECK constraints is refused by `check`; what is left of "
            "the schema is compared before the first row",
        },
    ),
)
