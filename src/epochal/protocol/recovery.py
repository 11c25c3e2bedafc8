"""
What becomes of what a start or a sweep finds (I4, I5), and of rows that a target lost.

Three verdicts: commit what the unsettled decision names, abort what no decision names and no
decision can name any more, leave for a person what can't be read. A driver aborts only up to its
own generation: of a later one there is only one thing to learn, namely that it is itself the
zombie.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum

from epochal.errors import Unsettled
from epochal.protocol.invariants import require_newest
from epochal.protocol.state import State
from epochal.terms import Fingerprint, InDoubt, Receipt, SinkName, quantity, total


class Verdict(Enum):
    COMMIT = "commit"
    ABORT = "abort"
    LEAVE = "leave for a person"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    found: InDoubt
    verdict: Verdict
    because: str


def judge(found: InDoubt, state: State) -> Judgement:
    """What to do with something that a target lists. Raises Fenced on a later generation."""
    handle = found.handle
    if handle is None:
        return Judgement(
            found=found, verdict=Verdict.LEAVE, because="its name is not one this release writes"
        )
    if handle.uid != state.uid:
        return Judgement(
            found=found, verdict=Verdict.LEAVE, because=f"it belongs to pipeline uid {handle.uid}"
        )
    require_newest(state.generation, handle.generation, found.name)
    if handle in state.named:
        return Judgement(
            found=found,
            verdict=Verdict.COMMIT,
            because=f"epoch {handle.epoch} is decided and names it",
        )
    return Judgement(
        found=found, verdict=Verdict.ABORT, because="no decision names it, and none can any more"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrite:
    """Which receipts stand for a sink once lost rows were written again, and which are surplus."""

    receipts: tuple[Receipt, ...]
    surplus: tuple[Receipt, ...]


def plan_rewrite(
    sink: SinkName, decided: Sequence[Receipt], lost: Collection[str], again: Sequence[Receipt]
) -> Rewrite:
    """
    Replace lost receipts by those of a replay, where sums prove that the rows are the same.

    All lost: the sums over the sink must agree, as a replay may be cut into other partitions. Some
    lost: each partition's must agree too, or the visible part and the new part would overlap.
    """
    _require_equal(sink, "all rows", _sum(decided), _sum(again))
    if all(str(receipt.handle) in lost for receipt in decided):
        return Rewrite(receipts=tuple(again), surplus=())
    renewed = {receipt.handle.partition: receipt for receipt in again}
    for receipt in decided:
        partition = receipt.handle.partition
        now = renewed.get(partition)
        found = Fingerprint(0, 0) if now is None else now.fingerprint
        _require_equal(sink, f"partition {partition}", receipt.fingerprint, found)
    gone = {receipt.handle.partition for receipt in decided if str(receipt.handle) in lost}
    kept = tuple(receipt for receipt in decided if receipt.handle.partition not in gone)
    taken = tuple(receipt for receipt in again if receipt.handle.partition in gone)
    surplus = tuple(receipt for receipt in again if receipt.handle.partition not in gone)
    return Rewrite(receipts=kept + taken, surplus=surplus)


def _sum(receipts: Sequence[Receipt]) -> Fingerprint:
    return total(receipt.fingerprint for receipt in receipts)


def _require_equal(sink: SinkName, what: str, decided: Fingerprint, again: Fingerprint) -> None:
    if decided == again and decided.hash_sum is not None:
        return
    raise Unsettled(
        f"sink {sink!r} lost prepared rows of a decided epoch, and they can't be written again: "
        f"{what} was {_told(decided)} when it was decided and is {_told(again)} now",
        "the source or the query gives other rows on a replay (or fingerprints are off): bring the "
        "rows back by hand, then `epochal resolve give-up` says where they are",
    )


def _told(fingerprint: Fingerprint) -> str:
    hashed = "not hashed" if fingerprint.hash_sum is None else f"sum {fingerprint.hash_sum:016x}"
    return f"{quantity(fingerprint.rows, 'row')}, {hashed}"
