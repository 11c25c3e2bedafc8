"""
Clearing up: what no decision names is aborted, old proofs and records are forgotten.

What can't be cleared now is listed by its target and cleared later (I5). Only a driver that is
fenced, or finds a rule broken, raises.
"""

from __future__ import annotations

import logging
from functools import partial

from epochal.contract import Clock, Limits
from epochal.coordinator.sweeping import Note, sweep
from epochal.coordinator.targets import Targets
from epochal.coordinator.voice import Voice
from epochal.errors import EpochalError, Fenced, InvariantBroken
from epochal.protocol.recovery import Judgement
from epochal.terms import EpochNumber, Receipts

logger = logging.getLogger("epochal")


class Clearing:
    def __init__(
        self, voice: Voice, targets: Targets, *, limits: Limits, clock: Clock, note: Note
    ) -> None:
        self._voice = voice
        self._targets = targets
        self._limits = limits
        self._clock = clock
        self._note = note
        self._swept_s = 0.0
        self.is_clear = False
        """Nothing of this driver or of those before it is in doubt at any target."""
        self.left: tuple[Judgement, ...] = ()
        """What the last sweep found and must not touch."""

    def expect_prepared(self) -> None:
        """Tasks are at work from here on: whatever the last sweep saw, there is more to come."""
        self.is_clear = False

    def clear(self, epoch: EpochNumber, receipts: Receipts) -> None:
        """Abort receipts that no decision names, and what else is listed."""
        for step in (partial(self._abort, epoch, receipts), self.sweep):
            # A decision whose put went unanswered may yet stand: what it names is not ours to
            # abort. And a target that hangs is not called again.
            if self._voice.is_silent:
                return
            try:
                step()
            except (Fenced, InvariantBroken) as error:
                self._voice.fall_silent(error)
                raise
            except Exception as error:  # noqa: BLE001  or it would hide why the epoch is given up
                logger.warning("epoch %s: not all could be cleared yet: %s", epoch, _told(error))

    def _abort(self, epoch: EpochNumber, receipts: Receipts) -> None:
        self._voice.journal.require_newest()
        self._targets.at_once(
            [
                partial(self._targets.committers[sink].abort, epoch, some)
                for sink, some in receipts.items()
            ],
            give_up_s=self._limits.abort_timeout_s,
        )

    def sweep_if_due(self) -> None:
        if self._clock.monotonic() - self._swept_s < self._limits.sweep_every_s:
            return
        try:
            self.sweep()
        except (Fenced, InvariantBroken):
            raise
        except (EpochalError, OSError) as error:
            place = self._voice.journal.place
            logger.warning("%s: not all could be cleared yet: %s", place, error)

    def sweep(self) -> None:
        """Abort what no decision names, as the targets list it (I5), and forget old proofs."""
        self._swept_s = self._clock.monotonic()
        self._voice.journal.require_newest()
        state = self._voice.state
        committers = self._targets.committers
        self.left = sweep(committers, state, alarm_s=self._limits.in_doubt_alarm_s, note=self._note)
        self.is_clear = True
        if state.last is not None:
            for committer in committers.values():
                committer.prune(state.last.epoch)
        self._voice.journal.tidy()


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, EpochalError) else f"{type(error).__name__}: {error}"
