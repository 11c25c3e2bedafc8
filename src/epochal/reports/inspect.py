"""Queries of the targets: proof of receipts and handles in doubt. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from epochal.config.resolve_target import OpenedTarget
from epochal.contract import Committer, Sink
from epochal.coordinator.targets import by_name, identity_of
from epochal.errors import EpochalError, Fenced
from epochal.protocol.admission import own_epoch
from epochal.protocol.recovery import Verdict, judge
from epochal.protocol.state import State
from epochal.reports.model import NOT_QUERIED, FoundReport, ReceiptReport, SinkInspection
from epochal.terms import Generation, InDoubt, Limits, Proof, SinkName

_LATER = "of a later driver"
HELD = "held by the running driver"
AFTER_COMMIT = "judged after the commit"
"""Names in the lists of some targets don't distinguish attempts; committing removes the winners."""


@contextmanager
def committer_of(sink: Sink, state: State, limits: Limits) -> Iterator[Committer]:
    """Open the committer of a sink with the pipeline's identity, and close it afterwards."""
    committer = sink.committer(identity_of(state, sink.name), limits)
    try:
        yield committer
    finally:
        committer.close()


def inspect_sinks(opened: OpenedTarget, state: State) -> list[SinkInspection]:
    """Query every sink that is declared or named by the decision. Errors are in the result."""
    declared = by_name(opened.require_sinks())
    inspections = [_inspect_sink(sink, state, opened.limits) for sink in declared.values()]
    undeclared = [name for name in state.pending if name not in declared]
    return [*inspections, *(_undeclared(name, state) for name in undeclared)]


def _inspect_sink(sink: Sink, state: State, limits: Limits) -> SinkInspection:
    is_pending = sink.name in state.pending
    try:
        with committer_of(sink, state, limits) as committer:
            receipts = _receipts(sink.name, state, committer)
            is_pending = is_pending and not _is_proven(receipts, state, committer)
            found = list_found(sink.name, committer.in_doubt(), state, is_pending=is_pending)
    except (EpochalError, OSError) as error:
        return SinkInspection(
            sink=sink.name,
            is_reached=False,
            error=error_text(error),
            is_pending=is_pending,
            receipts=_receipts(sink.name, state, None),
            found=[],
        )
    return SinkInspection(
        sink=sink.name,
        is_reached=True,
        error="",
        is_pending=is_pending,
        receipts=receipts,
        found=found,
    )


def _undeclared(name: SinkName, state: State) -> SinkInspection:
    return SinkInspection(
        sink=name,
        is_reached=False,
        error="not declared by the pipeline any more, and the decided epoch is not committed on it",
        is_pending=True,
        receipts=_receipts(name, state, None),
        found=[],
    )


def _receipts(name: SinkName, state: State, committer: Committer | None) -> list[ReceiptReport]:
    decision = state.unsettled
    if decision is None:
        return []
    return [
        ReceiptReport(
            handle=str(receipt.handle),
            rows=receipt.rows,
            bytes=receipt.bytes,
            proof=NOT_QUERIED
            if committer is None
            else committer.outcome(decision.epoch, receipt).value,
        )
        for receipt in state.pending.get(name, ())
    ]


def is_pending_at(name: SinkName, state: State, committer: Committer) -> bool:
    """
    Whether the target has yet to prove the decided epoch. The log does not know that the newest
    epoch is committed before the next one is decided.
    """
    receipts = _receipts(name, state, committer)
    return name in state.pending and not _is_proven(receipts, state, committer)


def _is_proven(receipts: Sequence[ReceiptReport], state: State, committer: Committer) -> bool:
    """By each receipt of the decided epoch; where it has none, by the epoch itself."""
    if receipts or state.unsettled is None:
        return all(one.proof == Proof.COMMITTED.value for one in receipts)
    newest = own_epoch(state, committer.newest() or ())
    return newest is not None and newest >= state.unsettled.epoch


def list_found(
    name: SinkName,
    listed: Sequence[InDoubt],
    state: State,
    *,
    is_pending: bool,
    is_running: bool = False,
) -> list[FoundReport]:
    """
    Return what a target lists, with the verdict of the next driver on each handle. `is_running`:
    the newest driver is alive, so what it prepares is not left over.
    """
    # The next driver's claim fences the present one, which then can't decide any more.
    successor = replace(state, generation=Generation(state.generation + 1))
    held_by = state.generation if is_running else None
    return [_judged(name, one, successor, is_pending, held_by) for one in listed]


def _judged(
    name: SinkName, one: InDoubt, successor: State, is_pending: bool, held_by: Generation | None
) -> FoundReport:
    try:
        judgement = judge(one, successor)
        verdict, because = judgement.verdict.value, judgement.because
        if judgement.verdict is Verdict.ABORT:
            if one.handle is not None and one.handle.generation == held_by:
                verdict, because = HELD, "its epoch is not decided yet"
            elif is_pending:
                verdict, because = AFTER_COMMIT, "the decided epoch is committed here first"
    except Fenced as error:
        verdict, because = _LATER, error.message
    return FoundReport(
        sink=name,
        name=one.name,
        epoch=None if one.handle is None else one.handle.epoch,
        generation=None if one.handle is None else one.handle.generation,
        age_s=one.age_s,
        verdict=verdict,
        because=because,
        blocks=one.blocks,
    )


def count_proofs(inspected: SinkInspection) -> Mapping[str, int]:
    """Return the number of receipts of the decided epoch by proof."""
    counts: dict[str, int] = {}
    for receipt in inspected.receipts:
        counts[receipt.proof] = counts.get(receipt.proof, 0) + 1
    return counts


def error_text(error: Exception) -> str:
    return error.message if isinstance(error, EpochalError) else str(error)
