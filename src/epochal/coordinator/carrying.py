"""
Carrying a decision out: every sink committed, at the same time, again and again until it is done.

An answer that was lost is settled by proof, not by hope (I9). A sink that is done while another
must be retried is noted in the log, as its own proof may expire meanwhile. What can't be carried
out in the time given stays decided (I4): the query stops, and the next start goes on from here.

Sinks that act together (`acting`) are done together: where one of them lost its rows, the others
wait until these are written again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field

from epochal.contract import Committer, Limits, SharedTransaction
from epochal.coordinator.acting import Acts, acts_alone, due
from epochal.coordinator.surroundings import Surroundings
from epochal.coordinator.waiting import Result, backoff
from epochal.errors import Fenced, OutcomeUnknown, PreparedLost, Unsettled, outcome_of
from epochal.terms import EpochNumber, Outcome, Proof, Receipts, SinkName

Lost = Mapping[SinkName, tuple[str, ...]]
"""Handles, by sink, whose prepared rows a target proves to have thrown away."""


@dataclass(slots=True, kw_only=True)
class Carrier:
    """One decision on its way to its sinks."""

    epoch: EpochNumber
    committers: Mapping[SinkName, Committer]
    acts: Acts = field(default_factory=dict)
    """How they commit; each alone where nothing is given."""
    limits: Limits
    around: Surroundings
    note_done: Callable[[frozenset[SinkName]], None]
    """Writes to the log that these sinks are done."""
    timing: Callable[[SinkName], AbstractContextManager[None]] = lambda _sink: nullcontext()
    """Measures one sink's attempt."""
    lost: dict[SinkName, tuple[str, ...]] = field(default_factory=dict)
    _waiting: set[SinkName] = field(default_factory=set)
    """Sinks that act together with one that lost its rows."""

    def __post_init__(self) -> None:
        self.acts = self.acts or acts_alone(self.committers)

    def carry_out(self, pending: Receipts) -> Lost:
        """Commit all of `pending`; returns what must be written again, or raises `Unsettled`."""
        remaining = dict(pending)
        deadline = self.around.clock.monotonic() + self.limits.commit_retry_max_s
        waits = backoff(self.limits.retry_backoff_ms, self.around.chance)
        while remaining:
            failed = self._round(remaining, deadline)
            done = frozenset(remaining) - failed.keys() - self.lost.keys() - self._waiting
            remaining = {sink: remaining[sink] for sink in failed}
            if done and (remaining or self.lost):
                self.note_done(done)
            self._stop_on_fatal(failed)
            wait_s = next(waits)
            if remaining and self.around.clock.monotonic() + wait_s > deadline:
                sink, error = next(iter(failed.items()))
                raise self._unsettled(sink, error) from error
            if remaining:
                self.around.clock.sleep(wait_s)
        return self.lost

    def _round(self, remaining: Receipts, deadline: float) -> Mapping[SinkName, BaseException]:
        """One attempt at each sink; those that failed, with their errors."""
        asked = due(self.acts, remaining)
        results = self.around.together(
            [self._job(act, receipts) for act, receipts in asked],
            slow_s=self.limits.commit_timeout_s,
            give_up_s=max(deadline - self.around.clock.monotonic(), self.limits.commit_timeout_s),
        )
        failed: dict[SinkName, BaseException] = {}
        for (_, receipts), result in zip(asked, results, strict=True):
            self._sort(receipts, result, failed)
        return failed

    def _job(self, act: SharedTransaction, receipts: Receipts) -> Callable[[], None]:
        def job() -> None:
            with ExitStack() as timings:
                for sink in receipts:
                    timings.enter_context(self.timing(sink))
                self._commit(act, receipts)

        return job

    def _sort(
        self, receipts: Receipts, result: Result, failed: dict[SinkName, BaseException]
    ) -> None:
        if isinstance(result, PreparedLost):
            self.lost |= _lost_by_sink(receipts, result.handles)
            self._waiting |= receipts.keys() - self.lost.keys()
        elif result is not None:
            failed |= dict.fromkeys(receipts, result)
        else:
            for sink in receipts:
                self.around.watch(f"committed {sink}", self.epoch)

    def _commit(self, act: SharedTransaction, receipts: Receipts) -> None:
        try:
            act.commit(self.epoch, receipts)
        except OutcomeUnknown:
            proofs = {
                receipt: self.committers[sink].outcome(self.epoch, receipt)
                for sink, some in receipts.items()
                for receipt in some
            }
            gone = tuple(str(r.handle) for r, proof in proofs.items() if proof is Proof.ABORTED)
            if gone:
                raise PreparedLost(
                    f"epoch {self.epoch}: {len(gone)} of {len(proofs)} prepared parts were "
                    "thrown away by the target after the decision",
                    handles=gone,
                ) from None
            # A sink without receipts has none that could be proven: it is asked again.
            if not all(receipts.values()) or Proof.UNKNOWN in proofs.values():
                raise

    def _stop_on_fatal(self, failed: Mapping[SinkName, BaseException]) -> None:
        for sink, error in failed.items():
            if isinstance(error, Fenced):
                raise error
            if outcome_of(error) is Outcome.FATAL:
                raise self._unsettled(sink, error) from error

    def _unsettled(self, sink: SinkName, error: BaseException) -> Unsettled:
        return Unsettled(
            f"epoch {self.epoch} is decided, and sink {sink!r} could not be committed: {error}",
            "no row is lost: mend the target and start again, the epoch is carried out first",
        )


def _lost_by_sink(receipts: Receipts, handles: Sequence[str]) -> dict[SinkName, tuple[str, ...]]:
    if len(receipts) == 1:
        return dict.fromkeys(receipts, tuple(handles))
    named = {
        sink: tuple(str(one.handle) for one in some if str(one.handle) in handles)
        for sink, some in receipts.items()
    }
    lost = {sink: gone for sink, gone in named.items() if gone}
    return lost or dict.fromkeys(receipts, tuple(handles))
