"""Values of the protocol, made short."""

from dataclasses import replace

import pytest

from epochal.protocol.state import State, decided
from epochal.terms import (
    Claim,
    Decision,
    EpochNumber,
    Fingerprint,
    Generation,
    Handle,
    Offsets,
    Receipt,
    SinkName,
    Uid,
    sink_tag,
)

UID = Uid("abcdefghij27")
CLAIM = Claim("k7q2m4xz")


class Maker:
    """Receipts, decisions and states of one pipeline."""

    uid = UID
    orders = SinkName("orders")
    audit = SinkName("audit")

    def handle(
        self,
        sink="orders",
        *,
        generation=1,
        claim=CLAIM,
        epoch=0,
        partition=0,
        attempt=1,
        uid=UID,
    ):
        return Handle(
            uid=uid,
            generation=Generation(generation),
            claim=claim,
            epoch=EpochNumber(epoch),
            sink=sink_tag(SinkName(sink)),
            partition=partition,
            attempt=attempt,
        )

    def receipt(self, sink="orders", *, rows=1, hash_sum=7, token=None, **handle):
        return Receipt(
            handle=self.handle(sink, **handle),
            fingerprint=Fingerprint(rows, hash_sum),
            bytes=rows * 10,
            token=token or {},
        )

    def decision(self, epoch=0, sinks=("orders", "audit"), generation=1):
        return Decision(
            epoch=EpochNumber(epoch),
            generation=Generation(generation),
            offsets=Offsets(digest=f"digest-{epoch}", text=f"offsets of {epoch}"),
            receipts={
                SinkName(sink): (self.receipt(sink, epoch=epoch, generation=generation),)
                for sink in sinks
            },
            decided_at=1.5,
        )

    def fresh(self, **changes):
        state = State(
            uid=UID,
            pipeline="shop",
            location="/chk",
            generation=Generation(1),
            claims=(CLAIM,),
            query_id="query",
            sinks={
                self.orders: {"kind": "memory", "target": "orders"},
                self.audit: {"kind": "memory", "target": "audit"},
            },
        )
        return replace(state, **changes)

    def unsettled(self, **changes):
        return replace(decided(self.fresh(), self.decision()), **changes)


@pytest.fixture
def make():
    return Maker()
