"""
`Cleanup`: abort what no decision names, delete old proofs and old records (I5).

Twice: right after an epoch is aborted, from its receipts; and in a sweep, from what the targets
themselves list, as a killed task hands back no receipt. What can't be cleared now is still listed
by its target and cleared by a later sweep. Only a driver that is fenced, or finds an invariant
broken or a target that went back in time, raises.

**Before it aborts anything, a sweep asks whether the target went back in time.** After a restore,
or after a replica that lagged took over, a target lists handles of settled epochs as prepared
again, and no decision names them any more:

    the log             orders: 7 committed, 8 is next
    the replica         ledger: up to 6; prepared: g1-e7-p0, g1-e7-p1
    a sweep alone       no decision names g1-e7-p0: aborted, and the rows of 7 are lost for good
    the question first  6 is less than 7: `WentBack`, nothing is touched
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain

from epochal.clock import Clock
from epochal.contract import Committer, MeasuresRoom, Room
from epochal.coordinator.journal import Journal
from epochal.coordinator.targets import STOPPING, Targets
from epochal.errors import EpochalError, Fenced, WentBack
from epochal.protocol.admission import require_not_back
from epochal.protocol.invariants import require_unnamed
from epochal.protocol.recovery import Judgement, Verdict, judge, left_to_a_copy
from epochal.protocol.state import State
from epochal.terms import NO_ROWS, EpochNumber, InDoubt, Limits, Receipt, Receipts, SinkName

logger = logging.getLogger("epochal")

Note = Callable[[SinkName, Sequence[Judgement], int], None]
"""Called per sink with what is in doubt there, and how much of it is left for a person."""
NoteRoom = Callable[[SinkName, Room], None]


class Cleanup:
    def __init__(
        self,
        journal: Journal,
        targets: Targets,
        *,
        limits: Limits,
        clock: Clock,
        note: Note,
        note_room: NoteRoom,
    ) -> None:
        self._journal = journal
        self._targets = targets
        self._limits = limits
        self._clock = clock
        self._note = note
        self._note_room = note_room
        self._swept_s = 0.0
        self._is_swept = False
        """The last sweep reached every target, and no task has begun to prepare since."""
        self.has_late_tasks = False
        """Tasks may prepare although their job has ended: see `Coordinator.note_late_tasks`."""
        self.left: tuple[Judgement, ...] = ()
        """What the last sweep found and must not touch."""

    @property
    def is_clear(self) -> bool:
        """Nothing of this driver or of those before it is in doubt at a target, or can be again."""
        return self._is_swept and not self.has_late_tasks

    def was_clear(self, is_clear: bool) -> None:
        """How the driver before this one left the targets."""
        self._is_swept = is_clear

    def expect_prepared(self) -> None:
        """Tasks prepare from here on, so the targets are no longer known to be clear."""
        self._is_swept = False

    def clear(self, epoch: EpochNumber, receipts: Receipts) -> None:
        """Abort receipts that no decision names, then whatever else the targets list."""
        for step in (partial(self._abort, epoch, receipts), self.sweep):
            # An unanswered decision may yet stand, and a hanging target must not be called.
            if self._journal.is_halted:
                return
            try:
                step()
            except STOPPING as error:
                self._journal.halt(error)
                raise
            except Exception as error:  # noqa: BLE001  or it would hide why the epoch is aborted
                logger.warning("epoch %s: not all could be cleared yet: %s", epoch, _text(error))

    def _abort(self, epoch: EpochNumber, receipts: Receipts) -> None:
        self._journal.require_newest()
        self._targets.ask_each(
            {
                sink: partial(self._targets.committers[sink].abort, epoch, some)
                for sink, some in receipts.items()
            },
            give_up_s=self._limits.abort_timeout_s,
        )

    def sweep_if_due(self, *, is_needed: bool = False) -> None:
        """`is_needed`: due at once, as what is left behind takes up room."""
        since_s = self._clock.monotonic() - self._swept_s
        if since_s < self._limits.sweep_every_s and not is_needed:
            self._journal.tidy_if_many()
            return
        self.sweep_as_far_as_possible()

    def sweep_as_far_as_possible(self) -> None:
        """What can't be cleared now, at a start as later, stops no epoch: see `sweep`."""
        try:
            self.sweep()
        except (*STOPPING, WentBack):
            raise
        except (EpochalError, OSError) as error:
            # A target hangs, perhaps beside the one whose error this is.
            if self._journal.is_halted:
                raise
            logger.warning("%s: not all could be cleared yet: %s", self._journal.place, error)

    def sweep(self) -> None:
        """Abort what no decision names, as the targets list it, and delete old proofs."""
        self._swept_s = self._clock.monotonic()
        self._journal.require_newest()
        state = self._journal.state
        self.left = self._sweep_all(state)
        # Once they are closed, no target was asked.
        self._is_swept |= bool(self._targets.committers)
        if state.last is not None:
            self._targets.ask_each(
                {
                    sink: partial(committer.prune, state.last.epoch)
                    for sink, committer in self._targets.committers.items()
                }
            )
        self._journal.tidy(with_strays=True)

    def _sweep_all(self, state: State) -> tuple[Judgement, ...]:
        """
        Abort what may be aborted; returns what is left for a person.

        All targets are asked at the same time, and an error is raised once all have answered:
        while one does not, rows that are prepared at another, and may block others there, are
        aborted all the same.
        """
        committers = dict(self._targets.committers)
        left: dict[SinkName, list[Judgement]] = {sink: [] for sink in committers}

        def sweep(sink: SinkName, committer: Committer) -> None:
            left[sink] = self._sweep_one(sink, committer, state)

        try:
            self._targets.ask_each(
                {sink: partial(sweep, sink, one) for sink, one in committers.items()}
            )
        finally:
            for one in chain.from_iterable(left.values()):
                logger.error("%s is left for a person: %s", one.found.name, one.because)
        return tuple(chain.from_iterable(left.values()))

    def _judged(self, found: InDoubt, state: State) -> Judgement:
        """A later generation that the log does not have is that of a copy of the log."""
        try:
            return judge(found, state)
        except Fenced:
            self._journal.require_newest()
            return left_to_a_copy(found)

    def _sweep_one(self, sink: SinkName, committer: Committer, state: State) -> list[Judgement]:
        listed = committer.in_doubt()
        # After the listing: what a target lists before it goes back is truly undecided.
        require_not_back(state, sink, committer.newest())
        judged = [self._judged(found, state) for found in listed]
        _warn_of_old(sink, judged, self._limits.in_doubt_alarm_s)
        left = [one for one in judged if one.verdict is Verdict.LEAVE]
        # Before and after: where an abort fails, all that was found is still in doubt.
        self._note(sink, judged, len(left))
        # Listed after this driver had given the target up: a later driver may be at work by now.
        if self._journal.is_halted:
            return left
        abort_judged(committer, judged, state)
        room = committer.room() if isinstance(committer, MeasuresRoom) else None
        if room is not None:
            self._note_room(sink, room)
        self._note(sink, [one for one in judged if one.verdict is not Verdict.ABORT], len(left))
        return left


def abort_judged(committer: Committer, judged: Sequence[Judgement], state: State) -> None:
    """Abort those of the verdict ABORT, after one last look that no decision names them (I5)."""
    by_epoch: dict[EpochNumber, list[Receipt]] = defaultdict(list)
    for one in judged:
        handle = one.found.handle
        if one.verdict is not Verdict.ABORT or handle is None:
            continue
        require_unnamed(handle, state.generation, state.named)
        by_epoch[handle.epoch].append(_receipt(one.found))
    for epoch, receipts in by_epoch.items():
        logger.info("epoch %s: aborting %d attempts that no decision names", epoch, len(receipts))
        committer.abort(epoch, receipts)


def _receipt(found: InDoubt) -> Receipt:
    if found.receipt is not None:
        return found.receipt
    if found.handle is None:
        raise ValueError(f"{found.name} has no handle")
    return Receipt(handle=found.handle, fingerprint=NO_ROWS)


def _warn_of_old(sink: SinkName, judged: list[Judgement], alarm_s: float) -> None:
    for one in judged:
        age_s = one.found.age_s
        if age_s is not None and age_s > alarm_s and one.verdict is not Verdict.COMMIT:
            logger.warning(
                "sink %s: %s has been prepared without a decision for %.0f minutes",
                sink,
                one.found.name,
                age_s / 60,
            )


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, EpochalError) else f"{type(error).__name__}: {error}"
