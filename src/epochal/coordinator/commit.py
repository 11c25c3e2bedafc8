"""
`Commit`: one decision on its way to its sinks, retried until it is carried out everywhere.

All sinks are committed at the same time, each by attempts of its own under one deadline: none waits
for another that fails or hangs. A lost answer is settled by proof (I9). A sink that is done while
another is late or has failed is written to the log at once, as its own proof may expire meanwhile:

    0 s      x, y and z are asked
    0.1 s    x is done                          tracker: x; one record for all would do
    5 s      y and z have not answered          PROGRESS: x
    7 s      y is done, after two attempts      PROGRESS: y
    330 s    z hangs                            Unsettled, the driver asks nothing more of anyone

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

import itertools
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial

from epochal.contract import Sink
from epochal.coordinator.environment import Environment
from epochal.coordinator.rehearsal import Rehearsal
from epochal.coordinator.rejected_rows import require_same
from epochal.coordinator.retry import Result, backoff
from epochal.coordinator.targets import STOPPING, Call, Targets
from epochal.errors import (
    EpochalError,
    Fenced,
    OutcomeUnknown,
    PreparedLost,
    Refused,
    Unsettled,
    WentBack,
    outcome_of,
)
from epochal.protocol.invariants import require_own_receipts
from epochal.protocol.recovery import give_up_command, plan_rewrite
from epochal.protocol.state import State, rewritten
from epochal.terms import Decision, EpochNumber, Limits, Outcome, Proof, Receipts, SinkName

logger = logging.getLogger("epochal")

_NOTE_AFTER_S = 5.0
"""How long sinks that are done wait for the others before the log says that they are done."""

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
    require_newest: Callable[[], None] = lambda: None
    """Raises `Fenced` where the log has a newer driver."""
    timing: Callable[[SinkName], AbstractContextManager[None]] = lambda _sink: nullcontext()
    """Measures one sink's attempt."""
    on_committed: Callable[[SinkName], None] = lambda _sink: None
    """Called for each sink as it is done."""
    on_retry: Callable[[SinkName, BaseException, float], None] = lambda _sink, _error, _left_s: None
    """Called with an attempt's error before the next one, and the seconds until the last one."""
    lost: dict[SinkName, tuple[str, ...]] = field(default_factory=dict)
    _done: set[SinkName] = field(default_factory=set)
    _noted: set[SinkName] = field(default_factory=set)
    _errors: dict[SinkName, BaseException] = field(default_factory=dict)
    _is_delayed: bool = False
    """A sink failed, lost rows or has not answered for a while: the others are noted in the log."""

    def carry_out(self, pending: Receipts) -> Lost:
        """Commit all of `pending`; returns what must be written again, or raises `Unsettled`."""
        groups = self.targets.groups(pending)
        deadline_s = self.environment.clock.monotonic() + self.limits.commit_retry_max_s
        self.targets.in_parallel(
            [
                Call(sinks=tuple(group), run=partial(self._commit_in_time, group, deadline_s))
                for group in groups
            ],
            # Also an attempt that begins at the last moment may take its time.
            give_up_s=self.limits.commit_retry_max_s + self.limits.commit_timeout_s,
            on_end=lambda at, result: self._ended(groups[at], result, pending),
            late_s=min(_NOTE_AFTER_S, self.limits.commit_timeout_s),
            on_late=lambda: self._delayed(pending),
        )
        for error in self._errors.values():
            if isinstance(error, Fenced):
                raise error
        # A broken invariant first, which the error of another target must not hide.
        for sink, error in sorted(
            self._errors.items(), key=lambda pair: not isinstance(pair[1], STOPPING)
        ):
            if isinstance(error, WentBack):
                self.require_newest()
                raise error
            if isinstance(error, Refused):
                # A later driver of this log and one of a copy look the same to the target.
                self.require_newest()
                raise Refused(
                    f"epoch {self.epoch} is decided and not carried out on sink {sink!r}: "
                    f"{error.message}",
                    error.hint,
                ) from error
            raise self._unsettled(sink, error) from error
        return {sink: self.lost[sink] for sink in pending if sink in self.lost}

    def _commit_in_time(self, group: Receipts, deadline_s: float) -> None:
        """
        Attempts at the sinks of one transaction, on a thread of its own: none waits for another
        group, which may hang. Once one has failed for good, the others are not retried.
        """
        clock = self.environment.clock
        waits = backoff(self.limits.retry_backoff_ms, self.environment.random)
        retries_max = self.limits.commit_retries_max
        for retries in itertools.count():
            try:
                self._commit(group)
            except Exception as error:
                wait_s = next(waits)
                is_last = clock.monotonic() + wait_s > deadline_s or retries == retries_max
                is_last = is_last or bool(self._errors)
                if is_last or outcome_of(error) is Outcome.FATAL:
                    raise
                logger.warning("sink %s: committed again in a moment: %s", ", ".join(group), error)
                for sink in group:
                    self.on_retry(sink, error, deadline_s - clock.monotonic())
                clock.sleep(wait_s)
            else:
                return

    def _commit(self, group: Receipts) -> None:
        """One attempt at the sinks of one transaction."""
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

    def _ended(self, group: Receipts, result: Result, pending: Receipts) -> None:
        """Take what became of one group, while others are still at it. On the driver's thread."""
        if result is None:
            self._done |= group.keys()
            for sink in group:
                self.on_committed(sink)
                self.environment.on_step(f"committed {sink}", self.epoch)
        elif isinstance(result, PreparedLost):
            self.lost |= _lost_by_sink(group, result)
        else:
            self._errors |= dict.fromkeys(group, result)
        if result is not None or self._is_delayed:
            self._delayed(pending)

    def _delayed(self, pending: Receipts) -> None:
        """Not all is done, or not soon: write to the log what is, as its proof may expire."""
        self._is_delayed = True
        news = frozenset(self._done - self._noted)
        if news and self._done != pending.keys():
            self._noted |= news
            self.note_done(news)

    def _unsettled(self, sink: SinkName, error: BaseException) -> Unsettled:
        return Unsettled(
            f"epoch {self.epoch} is decided, and sink {sink!r} could not be committed: "
            f"{error.message if isinstance(error, EpochalError) else error}",
            f"{_sentence(error)}its rows stay prepared: once the target takes them, start again, "
            "and the epoch is carried out first; if it never will, keep the rows elsewhere and "
            f"record it: {give_up_command(sink, self.epoch)}",
        )


def _sentence(error: BaseException) -> str:
    """The hint of the target's own error, to be followed by another."""
    hint = error.hint if isinstance(error, EpochalError) else ""
    return f"{hint}; " if hint else ""


def _lost_by_sink(group: Receipts, error: PreparedLost) -> dict[SinkName, tuple[str, ...]]:
    """What is to be written again: see `PreparedLost.shows_none`."""
    all_of = {sink: tuple(str(one.handle) for one in some) for sink, some in group.items()}
    gone = frozenset(error.handles)
    named = {sink: tuple(one for one in some if one in gone) for sink, some in all_of.items()}
    lost = {sink: some for sink, some in named.items() if some}
    if not lost or len(group) == 1:
        lost = dict.fromkeys(group, error.handles)
    return {sink: all_of[sink] for sink in lost} if error.shows_none else lost


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
        claim=state.claims[0],
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
            "bring them to the target by hand, from the source; then record where they are: "
            f"{give_up_command(next(iter(gone)), epoch)}",
        )


def raise_if_lost(epoch: EpochNumber, lost: Lost) -> None:
    if lost:
        raise Unsettled(
            f"epoch {epoch} is decided, and {', '.join(lost)} threw its prepared "
            "rows away: they must be written again",
            "start again: the epoch is replayed, and its rows are written again where they are "
            "those decided; if it can't be replayed, keep the rows elsewhere and record it: "
            f"{give_up_command(next(iter(lost)), epoch)}",
        )
