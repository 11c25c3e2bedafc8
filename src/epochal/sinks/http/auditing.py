"""Counting at a receiver, and what it may forget of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from epochal.contract import Dropped, Recount
from epochal.errors import InvariantBroken
from epochal.sinks.http.connecting import Client
from epochal.terms import EpochNumber, Identity, Mark


def recount(client: Client, about: Mapping[str, Any], identity: Identity) -> Recount:
    """The rows that the receiver shows of one sink of one uid, by epoch."""
    if not about.get("counts"):
        return Recount(rows=None, because="the receiver keeps no rows, or can't count them")
    body = client.ask("GET", "/counts", params=_life(identity)).body
    listed = body.get("epochs")
    if not isinstance(listed, list):
        raise InvariantBroken(f"the receiver's answer has no epochs: {str(dict(body))[:200]}")
    epochs = {EpochNumber(one["epoch"]): int(one["rows"]) for one in listed}
    return Recount(
        rows=sum(epochs.values()),
        epochs=epochs,
        because="rows that the receiver shows, counted there",
    )


def forget(
    client: Client, marks: Sequence[Mark], identity: Identity, *, is_dry_run: bool
) -> Dropped:
    """All proofs below the newest. That one stays: readers of whole epochs go by it."""
    newest = max((mark.epoch for mark in marks if mark.uid == identity.uid), default=None)
    if newest is None:
        return Dropped()
    if not is_dry_run:
        client.ask("DELETE", "/marks", params={**_life(identity), "below": str(newest)})
    return Dropped(
        removed=[f"proofs of epochs below {newest}, as far as they are kept"],
        kept=f"the mark of epoch {newest}: readers of whole epochs find the rows by it",
    )


def _life(identity: Identity) -> dict[str, str]:
    return {"uid": identity.uid, "tag": identity.tag}
