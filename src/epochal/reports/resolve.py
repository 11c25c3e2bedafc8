"""Settling by hand: one sink of a decided epoch, or one undecided handle."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from epochal.config.resolve_target import OpenedTarget
from epochal.contract import Sink
from epochal.coordinator import by_hand
from epochal.coordinator.targets import by_name
from epochal.errors import EpochalError, Refused
from epochal.protocol.admission import LostEpochs, is_back, lost_epochs, own_epoch
from epochal.protocol.receipts import sum_of
from epochal.protocol.state import Accepted, GivenUp, State
from epochal.reports.inspect import committer_of, error_text
from epochal.reports.liveness import driver_report, require_no_driver, under_lease
from epochal.reports.model import ResolutionReport
from epochal.reports.status import live_of, require_original, require_record
from epochal.terms import EpochNumber, Limits, Uid, quantity


@under_lease("finish a sink")
def finish(
    opened: OpenedTarget, *, sink: str, epoch: int, by: str, dry_run: bool, take_over: bool = False
) -> ResolutionReport:
    """Commit one sink of the decided epoch, independently of the others."""
    state = read_for_change(opened, dry_run=dry_run, take_over=take_over, doing="finish a sink")
    declared = declared_sink(opened, sink)
    if _is_committed(state, sink, epoch):
        step = f"epoch {epoch} is committed on {sink!r} already"
        return resolution_report(
            opened, action="finish", sink=sink, epoch=epoch, step=step, dry_run=dry_run
        )
    evidence = _evidence(opened, state, sink, epoch)
    if not dry_run:
        note = f"{by} finished sink {sink!r} of epoch {epoch}: {'; '.join(evidence)}"
        by_hand.finish(
            opened.require_log(),
            declared,
            epoch=EpochNumber(epoch),
            note=note,
            limits=opened.limits,
        )
    return resolution_report(
        opened,
        action="finish",
        sink=sink,
        epoch=epoch,
        evidence=evidence,
        step=_step(
            dry_run, f"commit epoch {epoch} on {sink!r}", f"epoch {epoch} is committed on {sink!r}"
        ),
        dry_run=dry_run,
    )


@under_lease("give a sink up")
def give_up(
    opened: OpenedTarget, given_up: GivenUp, *, dry_run: bool, take_over: bool = False
) -> ResolutionReport:
    """
    Give up one sink of the decided epoch, on record. Works without the target, which may be gone
    for good; if it can be queried, its proof is recorded too.
    """
    state = read_for_change(opened, dry_run=dry_run, take_over=take_over, doing="give a sink up")
    what = f"sink {given_up.sink!r} of epoch {given_up.epoch}"
    earlier = _given_up(state, given_up.sink, given_up.epoch)
    if earlier is not None:
        return resolution_report(
            opened,
            action="give-up",
            sink=given_up.sink,
            epoch=given_up.epoch,
            step=f"{what} was given up by {earlier.by} already; "
            f"its rows are kept at {earlier.kept_at}",
            dry_run=dry_run,
        )
    evidence = _evidence(opened, state, given_up.sink, given_up.epoch)
    if not dry_run:
        with_evidence = GivenUp(
            epoch=given_up.epoch,
            sink=given_up.sink,
            kept_at=given_up.kept_at,
            by=given_up.by,
            because=given_up.because,
            evidence="; ".join(evidence),
        )
        by_hand.give_up(opened.require_log(), with_evidence)
    return resolution_report(
        opened,
        action="give-up",
        sink=given_up.sink,
        epoch=given_up.epoch,
        evidence=evidence,
        step=_step(
            dry_run,
            f"give up {what}; its rows are kept at {given_up.kept_at}",
            f"{what} is given up; its rows are kept at {given_up.kept_at}",
        ),
        dry_run=dry_run,
    )


@under_lease("abort")
def abort(
    opened: OpenedTarget, *, sink: str, name: str, by: str, dry_run: bool, take_over: bool = False
) -> ResolutionReport:
    """Abort one handle that a target lists and no decision names."""
    state = read_for_change(opened, dry_run=dry_run, take_over=take_over, doing="abort")
    declared = declared_sink(opened, sink)
    # The state after the claim that precedes the abort.
    successor = by_hand.as_successor(state)
    with committer_of(declared, successor, opened.limits) as committer:
        judgement = by_hand.require_abortable(successor, sink, committer, name)
    age = "" if judgement.found.age_s is None else f", prepared {judgement.found.age_s:.0f} s ago"
    evidence = [f"{name} on {sink!r}{age}: {judgement.because}"]
    if not dry_run:
        note = f"{by} aborted {name} on sink {sink!r}: {judgement.because}"
        by_hand.abort_undecided(
            opened.require_log(), declared, name=name, note=note, limits=opened.limits
        )
    handle = judgement.found.handle
    return resolution_report(
        opened,
        action="abort",
        sink=sink,
        epoch=None if handle is None else handle.epoch,
        evidence=evidence,
        step=_step(dry_run, f"abort {name} on {sink!r}", f"{name} on {sink!r} is aborted"),
        dry_run=dry_run,
    )


@under_lease("accept")
def accept(
    opened: OpenedTarget,
    *,
    sink: str,
    by: str,
    because: str,
    dry_run: bool,
    take_over: bool = False,
) -> ResolutionReport:
    """Go on at a target that went back in time, on record."""
    state = read_for_change(opened, dry_run=dry_run, take_over=take_over, doing="accept")
    declared = declared_sink(opened, sink)
    lost = lost_at(declared, state, opened.limits)
    if lost is None:
        step = f"sink {sink!r} proves all that was committed there: there is nothing to accept"
        return resolution_report(
            opened, action="accept", sink=sink, epoch=None, step=step, dry_run=dry_run
        )
    if not dry_run:
        word = Accepted(
            sink=declared.name,
            after=lost.after,
            since=lost.since,
            through=lost.through,
            by=by,
            because=because,
        )
        by_hand.accept(opened.require_log(), word)
    return resolution_report(
        opened,
        action="accept",
        sink=sink,
        epoch=lost.through,
        evidence=[
            f"the target proves {lost.proven_text}; epoch {lost.through} was committed there",
            f"missing there: {lost.text}",
        ],
        step=_step(
            dry_run,
            f"accept that {sink!r} went back, and go on after {lost.proven_text}",
            f"it is accepted that {sink!r} went back; the next start goes on there",
        ),
        dry_run=dry_run,
    )


def lost_at(sink: Sink, state: State, limits: Limits) -> LostEpochs | None:
    """What the target of a sink has lost; None where it went back in no time."""
    with committer_of(sink, state, limits) as committer:
        marks = committer.newest()
    if marks is None or not is_back(state, sink.name, marks):
        return None

    def is_loaded(run: str) -> bool:
        return any(_is_proven(sink, state, limits, one.uid) for one in marks if one.run == run)

    return lost_epochs(state, sink.name, own_epoch(state, marks), is_loaded=is_loaded)


def _is_proven(sink: Sink, state: State, limits: Limits, uid: Uid) -> bool:
    """
    Whether the target proves what was loaded under a uid. Asked as that load would ask: of others a
    table that was rolled back may list what it has no longer.
    """
    with committer_of(sink, replace(state, uid=uid), limits) as committer:
        return any(mark.uid == uid for mark in committer.newest() or ())


def read_for_change(opened: OpenedTarget, *, dry_run: bool, take_over: bool, doing: str) -> State:
    """The newest state; unless it is a dry run, no driver may be at work."""
    log = opened.require_log()
    state = require_record(log).record.state
    if not dry_run:
        if not take_over:
            require_original(log, state, doing=doing, option="--take-over")
        driver = driver_report(state, live_of(log), now=time.time())
        require_no_driver(driver, take_over=take_over, doing=doing)
    return state


def declared_sink(opened: OpenedTarget, sink: str) -> Sink:
    """The sink of this name, as the pipeline declares it."""
    declared = by_name(opened.require_sinks())
    if sink not in declared:
        raise Refused(
            f"{opened.target} declares no sink {sink!r}", f"its sinks are: {', '.join(declared)}"
        )
    return declared[sink]


def _given_up(state: State, sink: str, epoch: int) -> GivenUp | None:
    return next((one for one in state.given_up if (one.sink, one.epoch) == (sink, epoch)), None)


def _is_committed(state: State, sink: str, epoch: int) -> bool:
    """Known for the newest epoch only: the log does not keep older ones."""
    last = state.last
    is_decided = last is not None and last.epoch == epoch and sink in last.rows
    return is_decided and sink not in state.pending and _given_up(state, sink, epoch) is None


def _evidence(opened: OpenedTarget, state: State, sink: str, epoch: int) -> list[str]:
    """Return what the target proves about the decided receipts, as sentences."""
    decision = state.unsettled
    if decision is None or decision.epoch != epoch or sink not in state.pending:
        raise Refused(
            f"epoch {epoch} is not waiting to be committed on sink {sink!r}",
            "no epoch is decided and unsettled"
            if decision is None
            else f"epoch {decision.epoch} is waiting, on: {', '.join(state.pending) or 'none'}",
        )
    receipts = state.pending[sink]
    head = f"decided by generation {decision.generation}: {quantity(len(receipts), 'receipt')}, "
    facts = [f"{head}{quantity(sum_of(receipts).fingerprint.rows, 'row')}"]
    if opened.sinks is None:
        return [*facts, "the target was not queried: only the log was named"]
    try:
        with committer_of(declared_sink(opened, sink), state, opened.limits) as committer:
            proofs = [committer.outcome(decision.epoch, receipt).value for receipt in receipts]
    except (EpochalError, OSError) as error:
        return [*facts, f"the target could not be queried: {error_text(error)}"]
    proven = [f"{proofs.count(proof)} {proof}" for proof in dict.fromkeys(proofs)]
    return [*facts, f"the target proves: {', '.join(proven) or 'nothing, there are no receipts'}"]


def _step(dry_run: bool, would: str, done: str) -> str:
    return f"would {would}" if dry_run else done


def resolution_report(
    opened: OpenedTarget,
    *,
    action: str,
    sink: str,
    epoch: int | None,
    step: str,
    dry_run: bool,
    evidence: Sequence[str] = (),
) -> ResolutionReport:
    state = require_record(opened.require_log()).record.state
    return ResolutionReport(
        location=state.location,
        pipeline=state.pipeline,
        is_dry_run=dry_run,
        action=action,
        epoch=epoch,
        sink=sink,
        evidence=evidence,
        step=step,
    )
