"""`OpenTransaction`, in a receipt from task to driver, and `Handout`, from driver to tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from epochal.errors import InvariantBroken
from epochal.terms import Json, Receipt

WITNESSES_MAX = 3
_CLOCKS_APART_MAX_S = 1.0


@dataclass(frozen=True, slots=True)
class Witness:
    """The offset of a row of a transaction: a marker behind it shows how the transaction ended."""

    topic: str
    partition: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenTransaction:
    """A transaction that a task left open: all that is needed to end it from another machine."""

    transactional_id: str
    producer_id: int
    producer_epoch: int
    is_v2: bool
    """Whether the newer transaction protocol was used; EndTxn must use the same."""
    cluster: str = ""
    partitions: int = 0
    witnesses: Sequence[Witness] = ()
    timeout_ms: int = 0
    opened_at_s: float = 0.0
    """
    When its first request was sent, in seconds since 1970: the broker counts the timeout from that
    request on, and readers wait from then on.
    """
    open_s: float = 0.0
    """How long it had been open when its task was done, by a clock that is never set."""
    spooled: int = 0
    """How many of its rows the spool keeps."""

    def to_token(self) -> Mapping[str, Json]:
        return {
            "transactional_id": self.transactional_id,
            "producer_id": self.producer_id,
            "producer_epoch": self.producer_epoch,
            "protocol": 2 if self.is_v2 else 1,
            "cluster": self.cluster,
            "partitions": self.partitions,
            "witnesses": [[one.topic, one.partition, one.offset] for one in self.witnesses],
            "timeout_ms": self.timeout_ms,
            "opened_at_s": round(self.opened_at_s, 3),
            "open_s": round(self.open_s, 3),
            **({"spooled": self.spooled} if self.spooled else {}),
        }

    def age_s(self, now_s: float, at_most_s: float) -> float:
        """
        How long it has been open at `now_s` of the driver's clock, where it can't have been open
        for longer than `at_most_s`. Clocks of two machines differ: where the task's own duration
        shows that they differ by much, the age is not known and the most is taken.
        """
        by_clock_s = now_s - self.opened_at_s
        if by_clock_s < self.open_s - _CLOCKS_APART_MAX_S:
            return at_most_s
        return min(max(by_clock_s, self.open_s), at_most_s)


def transaction_of(receipt: Receipt) -> OpenTransaction | None:
    """The transaction of a receipt; None where its task had no rows and opened none."""
    token = cast("Mapping[str, Any]", receipt.token)
    if not token:
        return None
    try:
        return OpenTransaction(
            transactional_id=str(token["transactional_id"]),
            producer_id=int(token["producer_id"]),
            producer_epoch=int(token["producer_epoch"]),
            is_v2=int(token["protocol"]) >= 2,
            cluster=str(token["cluster"]),
            partitions=int(token["partitions"]),
            witnesses=tuple(
                Witness(str(topic), int(partition), int(offset))
                for topic, partition, offset in token["witnesses"]
            ),
            timeout_ms=int(token["timeout_ms"]),
            opened_at_s=float(token["opened_at_s"]),
            open_s=float(token["open_s"]),
            spooled=int(token.get("spooled", 0)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InvariantBroken(
            f"the receipt {receipt.handle} does not name a Kafka transaction: {error}"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Handout:
    """What the driver gives to every task of an epoch."""

    cluster: str
    group: str
    """The consumer group that is the ledger; every transaction commits its epoch to it."""
    metadata: str
    """Committed to the ledger together with the epoch."""
    timeout_ms: int
    is_v2: bool
    batch_bytes_max: int
    """The largest batch that the topic accepts."""
    partitions: int
    """Of the topic. All tasks of an epoch must agree on the partition of a key."""
    slots: Mapping[int, tuple[int, int]]
    """Task partition → producer id and epoch that its first attempt may use."""
    value: Json = None
    """Needed to encode values; None where the driver did not know the columns of the rows."""
    location: str | None = None
    """The pipeline's own folder, where a spool may be."""

    def to_json(self) -> Json:
        return {
            "cluster": self.cluster,
            "group": self.group,
            "metadata": self.metadata,
            "timeout_ms": self.timeout_ms,
            "is_v2": self.is_v2,
            "batch_bytes_max": self.batch_bytes_max,
            "partitions": self.partitions,
            "slots": {str(slot): list(given) for slot, given in self.slots.items()},
            **({} if self.value is None else {"value": self.value}),
            **({} if self.location is None else {"location": self.location}),
        }

    @classmethod
    def from_json(cls, given: Json) -> Handout:
        if not isinstance(given, Mapping):
            raise InvariantBroken("a Kafka task got no handout from its driver")
        known = cast("Mapping[str, Any]", given)
        return cls(
            cluster=known["cluster"],
            group=known["group"],
            metadata=known["metadata"],
            timeout_ms=known["timeout_ms"],
            is_v2=known["is_v2"],
            batch_bytes_max=known["batch_bytes_max"],
            partitions=known["partitions"],
            slots={int(slot): (pid, epoch) for slot, (pid, epoch) in known["slots"].items()},
            value=known.get("value"),
            location=known.get("location"),
        )
