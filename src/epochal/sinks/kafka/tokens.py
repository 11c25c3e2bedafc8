"""What a receipt of this sink carries, and what tasks are handed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from epochal.errors import InvariantBroken
from epochal.terms import Json, Receipt

WITNESSES_MAX = 3


@dataclass(frozen=True, slots=True)
class Witness:
    """A row of a transaction, by its place: the markers that follow it tell how that ended."""

    topic: str
    partition: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """A transaction that is left open: whoever holds this can end it."""

    transactional_id: str
    producer_id: int
    producer_epoch: int
    is_v2: bool
    """Whether the newer transaction protocol was spoken; an end must speak the same."""
    cluster: str = ""
    partitions: int = 0
    witnesses: Sequence[Witness] = ()
    timeout_ms: int = 0
    open_s: float = 0.0
    """How long it was open when its task was done: readers were held back since then."""
    spooled: int = 0
    """Rows that the spool keeps of it."""

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
            "open_s": round(self.open_s, 3),
            **({"spooled": self.spooled} if self.spooled else {}),
        }


def open_in(receipt: Receipt) -> Open | None:
    """The transaction of a receipt; None where its task had no rows and opened none."""
    token = cast("Mapping[str, Any]", receipt.token)
    if not token:
        return None
    try:
        return Open(
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
            open_s=float(token["open_s"]),
            spooled=int(token.get("spooled", 0)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InvariantBroken(
            f"the receipt {receipt.handle} does not name a Kafka transaction: {error}"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Handout:
    """What the driver found out or got ready, for every task of an epoch alike."""

    cluster: str
    group: str
    """The ledger that each transaction adds its epoch to."""
    word: str
    """What stands in the ledger beside the number."""
    timeout_ms: int
    is_v2: bool
    batch_bytes_max: int
    """Of the largest batch that the topic takes."""
    partitions: int
    """Of the topic: all tasks of an epoch must agree on where a key goes."""
    slots: Mapping[int, tuple[int, int]]
    """Producer id and epoch that the first attempt of a partition may use."""
    value: Json = None
    """What values are encoded with; None where the driver did not know the rows' columns."""
    location: str | None = None
    """The pipeline's own place, where a spool may be."""

    def to_json(self) -> Json:
        return {
            "cluster": self.cluster,
            "group": self.group,
            "word": self.word,
            "timeout_ms": self.timeout_ms,
            "is_v2": self.is_v2,
            "batch_bytes_max": self.batch_bytes_max,
            "partitions": self.partitions,
            "slots": {str(slot): list(given) for slot, given in self.slots.items()},
            **({} if self.value is None else {"value": self.value}),
            **({} if self.location is None else {"location": self.location}),
        }

    @classmethod
    def from_json(cls, told: Json) -> Handout:
        if not isinstance(told, Mapping):
            raise InvariantBroken("a Kafka task was handed nothing by its driver")
        known = cast("Mapping[str, Any]", told)
        return cls(
            cluster=known["cluster"],
            group=known["group"],
            word=known["word"],
            timeout_ms=known["timeout_ms"],
            is_v2=known["is_v2"],
            batch_bytes_max=known["batch_bytes_max"],
            partitions=known["partitions"],
            slots={int(slot): (pid, epoch) for slot, (pid, epoch) in known["slots"].items()},
            value=known.get("value"),
            location=known.get("location"),
        )
