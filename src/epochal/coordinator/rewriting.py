"""
Writing again what a target threw away after the decision (I4).

The epoch stays decided and unsettled until the engine replays it. The replay's receipts then take
the place of the lost ones, where sums prove that they stand for the same rows.
"""

from __future__ import annotations

from collections.abc import Mapping

from epochal.contract import Sink
from epochal.coordinator.acting import due
from epochal.coordinator.carrying import Lost
from epochal.coordinator.rejecting import require_same
from epochal.coordinator.targets import Targets
from epochal.errors import Unsettled
from epochal.protocol.invariants import require_own_receipts
from epochal.protocol.recovery import plan_rewrite
from epochal.protocol.state import State, rewritten
from epochal.terms import Decision, EpochNumber, Receipts, SinkName


def replaced(
    state: State,
    decision: Decision,
    again: Receipts,
    *,
    lost: Lost,
    sinks: Mapping[SinkName, Sink],
    targets: Targets,
) -> tuple[State, Receipts]:
    """The state with the replay's receipts in it, and those of them that nobody needs."""
    require_own_receipts(
        again,
        uid=state.uid,
        generation=state.generation,
        epoch=decision.epoch,
        sinks=lost.keys(),
    )
    surplus = {}
    for sink, some in again.items():
        plan = plan_rewrite(sink, decision.receipts[sink], lost[sink], some)
        state = rewritten(state, sink, plan.receipts)
        surplus[sink] = plan.surplus
    for act, receipts in due(targets.acts, state.pending):
        if receipts.keys() & again.keys():
            act.rehearse(decision.epoch, receipts)
    for sink in again:
        require_same(sinks[sink], targets.committers[sink], decision)
    return state, surplus


def require_rewritable(epoch: EpochNumber, lost: Lost, takers: frozenset[SinkName]) -> None:
    """Rows that a sink refused come from no source: they can't be written again."""
    gone = takers & lost.keys()
    if gone:
        raise Unsettled(
            f"epoch {epoch} is decided, and {', '.join(gone)} threw away the refused rows that "
            "were prepared there: no replay brings them back",
            "bring them to the target by hand, from the source; then `epochal resolve give-up` "
            "says where they are",
        )


def raise_if_lost(epoch: EpochNumber, lost: Lost) -> None:
    if lost:
        raise Unsettled(
            f"epoch {epoch} is decided, and {', '.join(lost)} threw its prepared "
            "rows away: they must be written again",
            "start again: the epoch is replayed and its rows are compared with those decided",
        )
