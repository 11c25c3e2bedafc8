"""An operator's verbs at a receiver: `recount` (`epochal verify`), `forget` (`epochal drop`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from epochal.contract import Dropped, Recount
from epochal.errors import InvariantBroken
from epochal.sinks.http.client import Client
from epochal.terms import EpochNumber, Identity, Mark


def recount(client: Client, about: Mapping[str, Any], identity: Identity) -> Recount:
    """The visible rows of one sink of one uid, by epoch, counted by the receiver."""
    if not about.get("counts"):
        return Recount(rows=None, because="the receiver keeps no rows, or can't count them")
    body = client.ask("GET", "/counts", params=_owner(identity)).body
    listed = body.get("epochs")
    if not isinstance(listed, list):
        raise InvariantBroken(f"the receiver's answer has no epochs: {str(dict(body))[:200]}")
    epochs = {EpochNumber(one["epoch"]): int(one["rows"]) for one in listed}
    return Recount(
        rows=sum(epochs.values()),
        epochs=epochs,
        because="visible rows, counted by the receiver",
    )


def forget(
    client: Client, marks: Sequence[Mark], identity: Identity, *, is_dry_run: bool
) -> Dropped:
    """Delete all proofs below the newest, which readers of whole epochs still need."""
    newest = max((mark.epoch for mark in marks if mark.uid == identity.uid), default=None)
    if newest is None:
        return Dropped()
    if not is_dry_run:
        client.ask("DELETE", "/marks", params={**_owner(identity), "below": str(newest)})
    return Dropped(
        removed=[f"proofs of epochs below {newest}, as far as they are kept"],
        kept=f"the mark of epoch {newest}: readers of whole epochs need it",
    )


def _owner(identity: Identity) -> dict[str, str]:
    return {"uid": identity.uid, "tag": identity.tag}
