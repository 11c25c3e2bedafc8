"""What Memory promises and what it can't do, as data for docs and conformance suite."""

from __future__ import annotations

from epochal.kit.promises import Promises

PROMISES = (
    Promises(
        sink="`Memory`",
        at_one_instant="a whole epoch",
        readers_must="be the driver's process",
        proof="a dictionary, gone with the process",
        output_modes="append and update, or complete",
        cannot={
            "refuse rows": "nothing in memory refuses a row",
            "be unreachable": "the rows are in the driver's own process",
            "be misconfigured": "there is nothing to configure",
            "bound memory": "memory is the target",
        },
    ),
)
