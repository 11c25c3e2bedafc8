"""Asking the targets what they hold of a pipeline, without changing anything."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from epochal.assembly import Reached
from epochal.contract import Committer, Limits, Sink
from epochal.coordinator.starting import by_name, identity_of
from epochal.errors import EpochalError, Fenced
from epochal.protocol.recovery import Verdict, judge
from epochal.protocol.state import State
from epochal.reports.model import FoundReport, ReceiptReport, SinkSurvey
from epochal.terms import Generation, InDoubt, SinkName

_LATER = "of a later driver"
AFTER_COMMIT = "judged after the commit"
"""Some targets list names that don't tell attempts apart; only a commit sorts them out."""


@contextmanager
def committer_of(sink: Sink, state: State, limits: Limits) -> Iterator[Committer]:
    """One sink's committer, speaking for the pipeline, and closed afterwards."""
    committer = sink.committer(identity_of(state, sink.name), limits)
    try:
        yield committer
    finally:
        committer.close()


def survey(reached: Reached, state: State) -> list[SinkSurvey]:
    """Every sink that the pipeline declares or the decision names; one that fails says so."""
    declared = by_name(reached.require_sinks())
    surveys = [_survey_one(sink, state, reached.limits) for sink in declared.values()]
    undeclared = [name for name in state.pending if name not in declared]
    return [*surveys, *(_undeclared(name, state) for name in undeclared)]


def _survey_one(sink: Sink, state: State, limits: Limits) -> SinkSurvey:
    pending = sink.name in state.pending
    try:
        with committer_of(sink, state, limits) as committer:
            receipts = _receipts(sink.name, state, committer)
            found = list_found(sink.name, committer.in_doubt(), state)
    except (EpochalError, OSError) as error:
        return SinkSurvey(
            sink=sink.name,
            is_reached=False,
            error=told(error),
            is_pending=pending,
            receipts=_receipts(sink.name, state, None),
            found=[],
        )
    return SinkSurvey(
        sink=sink.name,
        is_reached=True,
        error="",
        is_pending=pending,
        receipts=receipts,
        found=found,
    )


def _undeclared(name: SinkName, state: State) -> SinkSurvey:
    return SinkSurvey(
        sink=name,
        is_reached=False,
        error="the pipeline no longer declares this sink, and the decided epoch waits for it",
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
            proof="not asked"
            if committer is None
            else committer.outcome(decision.epoch, receipt).value,
        )
        for receipt in state.pending.get(name, ())
    ]


def list_found(name: SinkName, listed: Sequence[InDoubt], state: State) -> list[FoundReport]:
    """What a target lists, with what the next driver would do about it."""
    # As the driver that comes next would judge it: nothing of the present one can be decided then.
    successor = replace(state, generation=Generation(state.generation + 1))
    return [_found(name, one, successor) for one in listed]


def _found(name: SinkName, one: InDoubt, successor: State) -> FoundReport:
    try:
        judgement = judge(one, successor)
        verdict, because = judgement.verdict.value, judgement.because
        if judgement.verdict is Verdict.ABORT and name in successor.pending:
            verdict, because = AFTER_COMMIT, "the decided epoch is carried out here first"
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


def proofs_told(surveyed: SinkSurvey) -> Mapping[str, int]:
    """How many receipts of the decided epoch the target proves to be what."""
    counts: dict[str, int] = {}
    for receipt in surveyed.receipts:
        counts[receipt.proof] = counts.get(receipt.proof, 0) + 1
    return counts


def told(error: Exception) -> str:
    return error.message if isinstance(error, EpochalError) else str(error)
