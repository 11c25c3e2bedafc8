"""What Callback promises and what it can't do, as data for docs and conformance suite."""

from __future__ import annotations

from epochal.kit.promises import Promises

PROMISES = (
    Promises(
        sink="`Callback`",
        at_one_instant="what the function makes of it",
        readers_must="keep the token with what was done; else at least once",
        proof="the spool",
        limits=["at least once by design"],
        cannot={
            "refuse rows": "the function is called for decided epochs only",
            "be unreachable": "rows are prepared in the spool, without the function",
            "be misconfigured": "nobody but the function knows its target",
        },
    ),
)
