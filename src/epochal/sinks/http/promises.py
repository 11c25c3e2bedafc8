"""What Http promises and what it can't do, as data for docs and conformance suite."""

from __future__ import annotations

from epochal.kit.promises import Promises

TWO_PHASE = Promises(
    sink="`Http`, two-phase",
    at_one_instant="a task's rows; whole epochs by the receiver's `whole_epochs`",
    proof="the receiver's marks",
    limits=["needs a receiver that implements the two phases"],
    cannot={"refuse rows": "only a handler of the receiver's owner refuses rows"},
)
IDEMPOTENCY_KEY = Promises(
    sink="`Http`, idempotency keys",
    at_one_instant="a call",
    readers_must="be a service that remembers keys; else at least once",
    proof="the spool",
    limits=["the service can't refuse an epoch before the decision"],
    cannot={
        "refuse rows": "the service is called for decided epochs only: what it refuses stops the "
        "query, or is kept by `on_reject`",
        "be unreachable": "rows are prepared in the spool, without the service",
        "be misconfigured": "one endpoint has nothing that could be asked beforehand",
    },
)
PROMISES = (TWO_PHASE, IDEMPOTENCY_KEY)
