"""
`Commit`: one decision on its way to its sinks, retried until it is carried out everywhere.

All sinks are committed at the same time. A lost answer is settled by proof (I9). A sink that is
done while another must be retried is written to the log, as its own proof may expire meanwhile.
What can't be carried out in the time given stays decided (I4): the query stops, and the next start
goes on from there. Sinks that share a transaction are done together: where one of them lost its
rows, the others wait until these are written again.

**Rows that a target threw away after the decision** are written again (I4). The order matters:

    decided: orders p0 p1 p2                          COMMIT record 41
    commit:  p1 is gone, p0 and p2 are visible        PreparedLost, the query stops
    start:   commit again, p1 is still gone           the epoch stays unsettled
    replay:  the engine gives the rows of the epoch   p0' p1' p2' are prepared, new handles
    compare: sums of p0' p1' p2' with p0 p1 p2        equal, or it stops with the evidence
    rehearse p0 p1' p2                                the target may still refuse p1'
    append:  orders p0 p1' p2                         REWRITE record 43: now p1' is named (I5)
    abort:   p0' and p2', which no decision names
    commit:  p0 p1' p2                                visible once

Before the REWRITE record p1' is undecided, and a crash leaves it to the next sweep; p1 is still
named. After it the decision names p1', and a crash leaves p1' to the next start, which commits it.
`protocol.recovery.plan_rewrite` computes which receipts stand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial

from epochal.contract import Sink
from epochal.coordinator.environment import Environment
from epochal.coordinator.rehearsal import Rehearsal
from epochal.coordinator.rejected_rows import require_same
from epochal.coordinator.retry import Result, backoff
from epochal.coordinator.targets import Targets
from epochal.errors import Fenced, OutcomeUnknown, PreparedLost, Unsettled, outcome_of
from epochal.protocol.invariants import require_own_receipts
from epochal.protocol.recovery import plan_rewrite
from epochal.protocol.state import State, rewritten
from epochal.terms import Decision, EpochNumber, Limits, Outcome, Proof, Receipts, SinkName

Lost = Mapping[SinkName, tuple[str, ...]]
"""Handles, by sink, whose prepared rows a target proves to have thrown away."""


@dataclass(slots=True, kw_only=True)
class Commit:
    """Commits the receipts of one decision."""

    epoch: EpochNumber
    targets: Targets
    limits: Limits
    environment: Environment
    note_done: Callable[[frozenset[SinkName]], None] = lambda _sinks: None
    """Writes to the log that these sinks are done."""
    timing: Callable[[SinkName], AbstractContextManager[None]] = lambda _sink: nullcontext()
    """Measures one sink's attempt."""
    lost: dict[SinkName, tuple[str, ...]] = field(default_factory=dict)
    _waiting: set[SinkName] = field(default_factory=set)
    """Sinks that share a transaction with one that lost its rows."""

    def carry_out(self, pending: Receipts) -> Lost:
        """Commit all of `pending`; returns what must be written again, or raises `Unsettled`."""
        clock = self.environment.clock
        remaining = dict(pending)
        deadline = clock.monotonic() + self.limits.commit_retry_max_s
        waits = backoff(self.limits.retry_backoff_ms, self.environment.random)
        while remaining:
            groups = self.targets.groups(remaining)
            results = self.targets.in_parallel(
                [partial(self._commit, group) for group in groups],
                slow_s=self.limits.commit_timeout_s,
                give_up_s=max(deadline - clock.monotonic(), self.limits.commit_timeout_s),
            )
            failed = self._failed(groups, results)
            done = frozenset(remaining) - failed.keys() - self.lost.keys() - self._waiting
            remaining = {sink: remaining[sink] for sink in failed}
            if done and (remaining or self.lost):
                self.note_done(done)
            self._stop_on_fatal(failed)
            wait_s = next(waits)
            if remaining and clock.monotonic() + wait_s > deadline:
                sink, error = next(iter(failed.items()))
                raise self._unsettled(sink, error) from error
            if remaining:
                clock.sleep(wait_s)
        return self.lost

    def _commit(self, group: Receipts) -> None:
        """One attempt at the sinks of one transaction, on a thread of its own."""
        with ExitStack() as timings:
            for sink in group:
                timings.enter_context(self.timing(sink))
            try:
                self.targets.commit(self.epoch, group)
            except OutcomeUnknown:
                if not self._is_proven(group):
                    raise

    def _is_proven(self, group: Receipts) -> bool:
        """Ask for proof of every receipt; raises `PreparedLost` where one is proven aborted."""
        proofs = {
            receipt: self.targets.committers[sink].outcome(self.epoch, receipt)
            for sink, receipts in group.items()
            for receipt in receipts
        }
        gone = tuple(str(r.handle) for r, proof in proofs.items() if proof is Proof.ABORTED)
        if gone:
            raise PreparedLost(
                f"epoch {self.epoch}: {len(gone)} of {len(proofs)} prepared parts were "
                "thrown away by the target after the decision",
                handles=gone,
            ) from None
        # A sink without receipts has none that could be proven: it is committed again.
        return all(group.values()) and Proof.UNKNOWN not in proofs.values()

    def _failed(
        self, groups: Sequence[Receipts], results: Sequence[Result]
    ) -> Mapping[SinkName, BaseException]:
        """The sinks that must be retried, with their errors; keeps those that lost rows."""
        failed: dict[SinkName, BaseException] = {}
        for group, result in zip(groups, results, strict=True):
            if isinstance(result, PreparedLost):
                self.lost |= _lost_by_sink(group, result.handles)
                self._waiting |= group.keys() - self.lost.keys()
            elif result is not None:
                failed |= dict.fromkeys(group, result)
            else:
                for sink in group:
                    self.environment.on_step(f"committed {sink}", self.epoch)
        return failed

    def _stop_on_fatal(self, failed: Mapping[SinkName, BaseException]) -> None:
        for sink, error in failed.items():
            if isinstance(error, Fenced):
                raise error
            if outcome_of(error) is Outcome.FATAL:
                raise self._unsettled(sink, error) from error

    def _unsettled(self, sink: SinkName, error: BaseException) -> Unsettled:
        return Unsettled(
            f"epoch {self.epoch} is decided, and sink {sink!r} could not be committed: {error}",
            "no row is lost: repair the target and start again, the epoch is carried out first",
        )


def _lost_by_sink(group: Receipts, handles: Sequence[str]) -> dict[SinkName, tuple[str, ...]]:
    if len(group) == 1:
        return dict.fromkeys(group, tuple(handles))
    gone = frozenset(handles)
    named = {
        sink: tuple(str(one.handle) for one in some if str(one.handle) in gone)
        for sink, some in group.items()
    }
    lost = {sink: some for sink, some in named.items() if some}
    return lost or dict.fromkeys(group, tuple(handles))


# Writing again what a target threw away after the decision


def replace_lost(
    state: State,
    decision: Decision,
    again: Receipts,
    *,
    lost: Lost,
    sinks: Mapping[SinkName, Sink],
    targets: Targets,
    rehearsal: Rehearsal,
) -> tuple[State, Receipts]:
    """The state with the replay's receipts in it, and those of them that are surplus."""
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
    groups = targets.groups(state.pending)
    rehearsal.examine_again(decision.epoch, [one for one in groups if one.keys() & again.keys()])
    for sink in again:
        require_same(sinks[sink], targets.committers[sink], decision)
    return state, surplus


def require_rewritable(epoch: EpochNumber, lost: Lost, reject_sinks: frozenset[SinkName]) -> None:
    """Rejected rows come from no source: they can't be written again."""
    gone = reject_sinks & lost.keys()
    if gone:
        raise Unsettled(
            f"epoch {epoch} is decided, and {', '.join(gone)} threw away the rejected rows that "
            "were prepared there: no replay brings them back",
            "bring them to the target by hand, from the source; then `epochal resolve give-up` "
            "records where they are",
        )


def raise_if_lost(epoch: EpochNumber, lost: Lost) -> None:
    if lost:
        raise Unsettled(
            f"epoch {epoch} is decided, and {', '.join(lost)} threw its prepared "
            "rows away: they must be written again",
            "start again: the epoch is replayed and its rows are compared with those decided",
        )
