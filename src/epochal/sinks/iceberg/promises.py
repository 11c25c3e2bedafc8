"""What Iceberg promises and what it can't do, as data for docs and conformance suite."""

from __future__ import annotations

from epochal.kit.promises import Promises

PROMISES = (
    Promises(
        sink="`Iceberg`",
        at_one_instant="a whole epoch: one snapshot",
        proof="a property of the table",
        append="yes, and overwrite_partitions",
        by_key="upsert",
        output_modes="append; upsert also update",
        limits=[
            "keyed modes are computed in the driver's memory",
            "unknown table features are refused",
        ],
        cannot={"refuse rows": "Iceberg has no constraints but the schema, which `check` compares"},
    ),
)
