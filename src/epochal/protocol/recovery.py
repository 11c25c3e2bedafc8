"""
Verdicts on prepared work that a target lists (I4, I5), and replacements for rows that one lost.

A handle that a target lists gets one of three verdicts: commit what the unsettled decision names,
abort what no decision names and none can name any more, leave for a person what can't be read. A
driver judges only generations up to its own; a handle of a later one shows that this driver was
superseded, and it stops (I7):

    driver of generation 4, decided: epoch 7 = {g4-e7-p0-t1, g4-e7-p1-t2}
    g4-e7-p0-t1   COMMIT   the decision names it
    g4-e7-p0-t9   ABORT    a speculative copy that lost: the decision names t1
    g3-e7-p0-t1   ABORT    of a driver before this one, whose decision never came
    g4-e8-p0-t3   ABORT    the epoch is not decided
    g5-e8-p0-t1   Fenced   a later driver is at work
    other uid     LEAVE    another pipeline's

A generation is claimed once in one log. Where a machine or a volume is cloned there are two logs,
and both sides claim the same generation; the claim in each handle tells them apart. This driver's
log never had the claim of the copy's driver, whose decisions it can't know, so it touches nothing
of that one:

    log of A:  g3 claim k7…   g4 claim m2…          (this driver)
    log of B:  g3 claim k7…   g4 claim x9…          (copied after generation 3)
    g4-cx9-e8-p0-t1   LEAVE    of a copy of this log
    g5-cz3-e8-p0-t1   Fenced   and where the log has no generation 5: of a copy, too
    g3-ck7-e9-p0-t6   LEAVE    epoch 8 is not decided: the driver of generation 3 is alive, and its
                               log is not this one
    g3-ck7-e8-p0-t4   ABORT    of a driver before the copy, whose decision never came

Lost rows are replaced by those of a replay where the sums of row hashes prove them equal
(`plan_rewrite`). Sums don't depend on order and can be added, so equal rows in another split are
still equal:

    decided              p0: 3 rows, sum a    p1: 2 rows, sum b
    all lost, replayed   p0: 5 rows, sum a+b               equal: the new receipts stand
    p1 lost, replayed    p0': 3 rows, a       p1': 2, b    equal: p0 p1' stand, p0' is surplus
    p1 lost, replayed    p0': 5 rows, a+b                  refused: p0 is visible already, and no
                                                           part of the replay is just p1

Where a target shows an epoch at one instant, p0 is not visible without p1: both count as lost then
(`PreparedLost.shows_none`), and the new receipts stand.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from shlex import quote

from epochal.errors import Unsettled
from epochal.protocol.invariants import require_newest
from epochal.protocol.receipts import sum_of
from epochal.protocol.state import CLAIMS_KEPT, State
from epochal.terms import Fingerprint, InDoubt, Receipt, SinkName, claims_of, quantity


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
    """The verdict on something that a target lists. Raises Fenced on a later generation."""
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
    if handle.generation <= state.generation - CLAIMS_KEPT and handle.claim not in state.claims:
        return Judgement(
            found=found,
            verdict=Verdict.LEAVE,
            because=f"it is of generation {handle.generation}, and the log knows the drivers of "
            f"its last {CLAIMS_KEPT} starts: whether this was one of them, or one with a copy of "
            "the log, can't be told any more",
        )
    if handle.claim not in state.claims or handle.epoch > state.expected:
        return left_to_a_copy(found)
    return Judgement(
        found=found, verdict=Verdict.ABORT, because="no decision names it, and none can any more"
    )


def left_to_a_copy(found: InDoubt) -> Judgement:
    return Judgement(
        found=found,
        verdict=Verdict.LEAVE,
        because="no driver of this log prepared it: one with a copy of the log did, and may have "
        "decided on it",
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
    lost = frozenset(lost)
    before_sum, now_sum = sum_of(decided).fingerprint, sum_of(again).fingerprint
    if not _is_equal(before_sum, now_sum):
        because = "the source or the query gives other rows on a replay (or fingerprints are off):"
        raise _other_rows(sink, "all rows", before_sum, now_sum, because)
    before = tuple(sorted(claims_of(decided)))
    if all(str(receipt.handle) in lost for receipt in decided):
        return Rewrite(
            receipts=tuple(replace(receipt, replaces=before) for receipt in again), surplus=()
        )
    renewed = {receipt.handle.partition: receipt for receipt in again}
    for receipt in decided:
        partition = receipt.handle.partition
        now = renewed.get(partition)
        found = Fingerprint(0, 0) if now is None else now.fingerprint
        if not _is_equal(receipt.fingerprint, found):
            raise _other_rows(
                sink,
                f"partition {partition}",
                receipt.fingerprint,
                found,
                "the replay has the same rows in other partitions, and a part of the epoch is "
                "visible already: start again, where the source or coalesced tasks may give the "
                "decided partitions; else",
            )
    gone = {receipt.handle.partition for receipt in decided if str(receipt.handle) in lost}
    kept = tuple(receipt for receipt in decided if receipt.handle.partition not in gone)
    taken = tuple(
        replace(receipt, replaces=before) for receipt in again if receipt.handle.partition in gone
    )
    surplus = tuple(receipt for receipt in again if receipt.handle.partition not in gone)
    return Rewrite(receipts=kept + taken, surplus=surplus)


def _is_equal(decided: Fingerprint, again: Fingerprint) -> bool:
    return decided == again and decided.is_comparable_to(again)


def _other_rows(
    sink: SinkName, what: str, decided: Fingerprint, again: Fingerprint, because: str
) -> Unsettled:
    return Unsettled(
        f"sink {sink!r} lost prepared rows of a decided epoch, and they can't be written again: "
        f"{what} was {_text(decided)} when it was decided and is {_text(again)} now",
        f"{because} bring the rows back by hand, then record where they are: "
        f"{give_up_command(sink)}",
    )


def finish_command(sink: SinkName, epoch: int) -> str:
    """The way out where one sink of the decided epoch can be committed by itself (I4)."""
    return f"`epochal resolve finish PIPELINE --sink {quote(sink)} --epoch {epoch}`"


def give_up_command(sink: SinkName, epoch: int | str = "…") -> str:
    """The way out where a target will never carry the decided epoch out (I4)."""
    return (
        f"`epochal resolve give-up PIPELINE --sink {quote(sink)} --epoch {epoch} --kept-at … "
        "--because …`"
    )


def _text(fingerprint: Fingerprint) -> str:
    rows = quantity(fingerprint.rows, "row")
    if fingerprint.hash_sum is None:
        return f"{rows}, not hashed"
    return f"{rows}, sum {fingerprint.hash_sum:016x} of row hash {fingerprint.algorithm}"
