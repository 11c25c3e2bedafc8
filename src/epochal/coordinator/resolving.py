"""
What a person may settle by hand, one thing at a time, each with the evidence on record.

Finishing a sink of a decided epoch needs the decision and nothing else (I7); it is put on record
afterwards. Aborting an undecided handle needs a claim first: only then can no decision come any
more that names it (I5). Committing what is not decided is not among the things that can be done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from epochal.contract import DEFAULT_LIMITS, Committer, EpochLog, Limits, Sink
from epochal.coordinator.carrying import Carrier
from epochal.coordinator.journal import Journal
from epochal.coordinator.starting import identity_of
from epochal.coordinator.surroundings import Surroundings, this_driver
from epochal.coordinator.sweeping import abort_judged
from epochal.errors import Refused, Unsettled
from epochal.protocol.recovery import Judgement, Verdict, judge
from epochal.protocol.state import (
    RecordKind,
    State,
    claimed,
    settled,
    sinks_done,
)
from epochal.terms import EpochNumber, SinkName


def finish(
    log: EpochLog,
    sink: Sink,
    *,
    epoch: EpochNumber,
    note: str,
    limits: Limits = DEFAULT_LIMITS,
    around: Surroundings | None = None,
) -> State:
    """Carry the unsettled decision out on one sink, and put that on record."""
    around = around or Surroundings()
    journal = _journal(log, limits, around)
    try:
        state = _require_pending(journal.peek(), log, sink.name, epoch)
        committer = sink.committer(identity_of(state, sink.name), limits)
        try:
            _commit_one(sink.name, committer, state, limits, around)
        finally:
            committer.close()

        def follow(before: State | None) -> State:
            done = sinks_done(
                _require_pending(before, log, sink.name, epoch), frozenset({sink.name})
            )
            return done if done.pending else settled(done)

        return journal.claim(follow, RecordKind.PROGRESS, note=note)
    finally:
        journal.close()


def abort_undecided(
    log: EpochLog,
    sink: Sink,
    *,
    name: str,
    note: str,
    limits: Limits = DEFAULT_LIMITS,
    around: Surroundings | None = None,
) -> Judgement:
    """Claim, then throw away one thing that the target lists and no decision names."""
    around = around or Surroundings()
    journal = _journal(log, limits, around)
    try:
        state = journal.claim(lambda before: _claimed(before, log))
        committer = sink.committer(identity_of(state, sink.name), limits)
        try:
            judgement = require_abortable(state, sink.name, committer, name)
            abort_judged(committer, [judgement], state)
        finally:
            committer.close()
        journal.append(RecordKind.RESOLVED, state, note=note)
        return judgement
    finally:
        journal.close()


def take_over(log: EpochLog, limits: Limits, around: Surroundings | None = None) -> State:
    """Claim for a person: from here on no driver of before decides any more."""
    journal = _journal(log, limits, around or Surroundings())
    try:
        return journal.claim(lambda before: _claimed(before, log))
    finally:
        journal.close()


def require_abortable(state: State, sink: SinkName, committer: Committer, name: str) -> Judgement:
    """What the target lists under a name, if it may be thrown away."""
    if sink in state.pending:
        # Some targets list names that don't tell attempts apart; only a commit sorts them out.
        raise Refused(
            f"epoch {state.expected - 1} is decided and not carried out on sink {sink!r}: until it "
            "is, nothing there may be aborted (I5)",
            "`epochal resolve finish` commits it; `epochal resolve give-up` lets it go, on record",
        )
    listed = {one.name: one for one in committer.in_doubt()}
    if name not in listed:
        raise Refused(
            f"sink {sink!r} lists nothing named {name}",
            f"it lists: {', '.join(listed) or 'nothing'}; what is not listed is not in doubt",
        )
    judgement = judge(listed[name], state)
    if judgement.verdict is not Verdict.ABORT:
        raise Refused(
            f"{name} can't be judged: {judgement.because}",
            "find out whose it is; what belongs to no pipeline of yours is removed with the "
            "target's own tools",
        )
    return judgement


def _commit_one(
    name: SinkName, committer: Committer, state: State, limits: Limits, around: Surroundings
) -> None:
    decision = state.unsettled
    if decision is None:
        return
    carrier = Carrier(
        epoch=decision.epoch,
        committers={name: committer},
        limits=limits,
        around=around,
        note_done=lambda _sinks: None,
    )
    lost = carrier.carry_out({name: state.pending[name]})
    if lost:
        raise Unsettled(
            f"epoch {decision.epoch}: sink {name!r} threw prepared rows of the decided epoch away: "
            f"{', '.join(lost[name])}",
            "start the pipeline, which writes them again where sums prove them equal; or let them "
            "go, on record: `epochal resolve give-up`",
        )


def as_successor(state: State) -> State:
    """
    The state as a person's tool claims it. It prepares nothing and does not clear all targets, so
    whatever order the last driver left them in stands.
    """
    mine = claimed(
        state, driver=this_driver(), sinks=state.sinks, query_id=state.query_id, run=state.run
    )
    return replace(mine, is_stopped=state.is_stopped)


def _claimed(before: State | None, log: EpochLog) -> State:
    if before is None:
        raise Refused(f"{log.place} holds no epoch log")
    return as_successor(before)


def _require_pending(
    state: State | None, log: EpochLog, sink: SinkName, epoch: EpochNumber
) -> State:
    if state is None:
        raise Refused(f"{log.place} holds no epoch log")
    waiting: Sequence[SinkName] = list(state.pending)
    decided = None if state.unsettled is None else state.unsettled.epoch
    if decided != epoch or sink not in waiting:
        raise Refused(
            f"epoch {epoch} does not wait to be carried out on sink {sink!r}",
            "nothing is decided and unsettled: there is nothing to finish"
            if decided is None
            else f"epoch {decided} does, on: {', '.join(waiting) or 'none'}",
        )
    return state


def _journal(log: EpochLog, limits: Limits, around: Surroundings) -> Journal:
    return Journal(log, clock=around.clock, limits=limits, chance=around.chance, nonce=around.nonce)
