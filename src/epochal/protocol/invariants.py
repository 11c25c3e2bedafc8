"""
The invariants, numbered. Everything else cites them.

`RULES` is their text: the documentation prints it, the model checker and the simulation judge by
it, and the functions below are those that can be checked at run time, where a breach must stop the
driver before it does harm. They raise; they are not asserts, which `python -O` deletes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from epochal.errors import Fenced, InvariantBroken
from epochal.terms import (
    Claim,
    EpochNumber,
    Generation,
    Handle,
    Receipt,
    Receipts,
    SinkName,
    Uid,
    sink_tag,
)

RULES: Mapping[str, str] = MappingProxyType(
    {
        "I1": "A reader never sees a row of an epoch that has no COMMIT decision.",
        "I2": "COMMIT is the only decision; it is written once per epoch and never changed. Abort "
        "is the absence of a COMMIT that names the handle, once none can come any more.",
        "I3": "The decision is durable before any sink is told to commit, and every sink in it has "
        "already shown that it can: what can fail by content fails before the decision.",
        "I4": "A COMMIT decision is never dropped: an error while carrying it out is retried, "
        "proven done, or, where the target proves that it threw the rows away, they are written "
        "again. A person may give one sink of one epoch up, and that is a record of the log.",
        "I5": "What has no decision is aborted by the driver, from what the target lists, and "
        "again later. A handle is aborted only if its generation is not above mine and no decision "
        "up to my claim names it. Removal never leaves our own prefix.",
        "I6": "Every attempt of a task has its own handle, whose listed name says whose it is. The "
        "decision names the winners. Only receipts of a successful job count.",
        "I7": "Only the newest generation decides or aborts; an older one stops. Committing needs "
        "the decision, not the generation.",
        "I8": "Empty epochs are decided and settled like others.",
        "I9": '"I don\'t know" is neither "failed" nor "done": ask for proof, the handle first and '
        "the ledger after it.",
        "I10": "Same uid, same query, same offsets, the next number: else refuse with the facts.",
    }
)


def broken(rule: str, fact: str) -> InvariantBroken:
    return InvariantBroken(
        f"{rule}: {fact}", f"nothing was written after this was seen; the rule: {RULES[rule]}"
    )


def require_own_receipts(
    receipts: Receipts,
    *,
    uid: Uid,
    generation: Generation,
    claim: Claim,
    epoch: EpochNumber,
    sinks: Collection[SinkName],
) -> None:
    """I3, I6: one winner per partition, of this driver and epoch, and an entry for every sink."""
    if set(receipts) != set(sinks):
        missing, extra = set(sinks) - set(receipts), set(receipts) - set(sinks)
        raise broken(
            "I3", f"epoch {epoch}: no receipts of {missing or '{}'}, strangers {extra or '{}'}"
        )
    for sink, prepared in receipts.items():
        _require_one_winner(sink, prepared)
        for receipt in prepared:
            handle = receipt.handle
            whose = (handle.uid, handle.generation, handle.claim, handle.epoch, handle.sink)
            if whose != (uid, generation, claim, epoch, sink_tag(sink)):
                raise broken(
                    "I6", f"epoch {epoch}, sink {sink}: the receipt of {handle} is not ours"
                )


def _require_one_winner(sink: SinkName, receipts: Sequence[Receipt]) -> None:
    partitions = [receipt.handle.partition for receipt in receipts]
    if len(partitions) != len(set(partitions)):
        raise broken("I6", f"sink {sink}: two receipts for one partition in {sorted(partitions)}")


def require_newest(mine: Generation, seen: Generation, where: str) -> None:
    """I7: a trace of a later generation means that this driver was superseded."""
    if seen > mine:
        raise Fenced(
            f"generation {seen} is at work ({where}); this driver is generation {mine}",
            "another driver has taken this checkpoint over, or a copy of its log is at work: leave "
            "this one stopped",
        )


def require_unnamed(handle: Handle, mine: Generation, named: Collection[Handle]) -> None:
    """I5: what a decision names, or a later driver prepared, is not ours to abort."""
    if handle in named:
        raise broken("I5", f"{handle} is named by a decision and was about to be aborted")
    require_newest(mine, handle.generation, str(handle))
