"""What a receiver must not hold of a sink once all is settled."""

from __future__ import annotations

from epochal.terms import sink_tag


def left_at(receiver, name: str) -> list[str]:
    listed = receiver.get("/transactions")["transactions"]
    return [one["txn"] for one in listed if f"-s{sink_tag(name)}-" in one["txn"]]
