"""
Carrying a decision out: every sink committed, at the same time, again and again until it is done.

An answer that was lost is settled by proof, not by hope (I9). A sink that is done while another
must be retried is noted in the log, as its own proof may expire meanwhile. What can't be carried
out in the time given stays decided (I4): the query stops, and the next start goes on from here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from epochal.contract import Committer, Limits
from epochal.coordinator.surroundings import Surroundings
from epochal.coordinator.waiting import Result, backoff
from epochal.errors import Fenced, OutcomeUnknown, PreparedLost, Unsettled, outcome_of
from epochal.terms import EpochNumber, Outcome, Proof, Receipt, Receipts, SinkName

Lost = Mapping[SinkName, tuple[str, ...]]
"""Handles, by sink, whose prepared rows a target proves to have thrown away."""


@dataclass(slots=True, kw_only=True)
class Carrier:
    """One decision on its way to its sinks."""

    epoch: EpochNumber
    committers: Mapping[SinkName, Committer]
    limits: Limits
    around: Surroundings
    note_done: Callable[[frozenset[SinkName]], None]
    """Writes to the log that these sinks are done."""
    timing: Callable[[SinkName], AbstractContextManager[None]] = lambda _sink: nullcontext()
    """Measures one sink's attempt."""
    lost: dict[SinkName, tuple[str, ...]] = field(default_factory=dict)

    def carry_out(self, pending: Receipts) -> Lost:
        """Commit all of `pending`; returns what must be written again, or raises `Unsettled`."""
        remaining = dict(pending)
        deadline = self.around.clock.monotonic() + self.limits.commit_retry_max_s
        waits = backoff(self.limits.retry_backoff_ms, self.around.chance)
        while remaining:
            failed = self._round(remaining, deadline)
            done = frozenset(remaining) - failed.keys() - self.lost.keys()
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
        results = self.around.together(
            [self._job(sink, receipts) for sink, receipts in remaining.items()],
            slow_s=self.limits.commit_timeout_s,
            give_up_s=max(deadline - self.around.clock.monotonic(), self.limits.commit_timeout_s),
        )
        failed: dict[SinkName, BaseException] = {}
        for sink, result in zip(remaining, results, strict=True):
            self._sort(sink, result, failed)
        return failed

    def _job(self, sink: SinkName, receipts: Sequence[Receipt]) -> Callable[[], None]:
        def job() -> None:
            with self.timing(sink):
                self._commit(self.committers[sink], receipts)

        return job

    def _sort(self, sink: SinkName, result: Result, failed: dict[SinkName, BaseException]) -> None:
        if isinstance(result, PreparedLost):
            self.lost[sink] = result.handles
        elif result is not None:
            failed[sink] = result
        else:
            self.around.watch(f"committed {sink}", self.epoch)

    def _commit(self, committer: Committer, receipts: Sequence[Receipt]) -> None:
        try:
            committer.commit(self.epoch, receipts)
        except OutcomeUnknown:
            proofs = {receipt: committer.outcome(self.epoch, receipt) for receipt in receipts}
            gone = tuple(str(r.handle) for r, proof in proofs.items() if proof is Proof.ABORTED)
            if gone:
                raise PreparedLost(
                    f"epoch {self.epoch}: {len(gone)} of {len(receipts)} prepared parts were "
                    "thrown away by the target after the decision",
                    handles=gone,
                ) from None
            if not proofs or Proof.UNKNOWN in proofs.values():
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
