"""
A driver's word in the epoch log: the state that it has put there, and whether it may still speak.

It falls silent where it can't know what its last word came to: a put without an answer may yet win
its slot, and a target that hangs may yet do what it was asked. A silent driver appends nothing and
aborts nothing; whoever goes on starts anew, and so claims.
"""

from __future__ import annotations

from collections.abc import Callable

from epochal.coordinator.journal import Journal
from epochal.errors import EpochalError, Fenced, Misconfigured, Unsettled
from epochal.protocol.state import RecordKind, State
from epochal.terms import EpochNumber


class Voice:
    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.is_silent = False
        self.has_news = False
        """It knows more than it has put on record."""
        self.found_good_order = False
        """The driver before this one had left nothing in doubt when this one claimed."""
        self._state: State | None = None
        self._fenced: Fenced | None = None

    @property
    def has_claimed(self) -> bool:
        return self._state is not None

    @property
    def state(self) -> State:
        """What the log holds, and what this driver has settled since."""
        if self._state is None:
            raise Misconfigured("the coordinator has not been started", "call start() first")
        return self._state

    def claim(self, follow: Callable[[State | None], State]) -> None:
        """From here on older drivers are fenced."""

        def following(before: State | None) -> State:
            self.found_good_order = before is None or before.is_stopped
            return follow(before)

        self._state = self.journal.claim(following)

    def keep(self, state: State) -> None:
        """Know this from here on; it rides in the next record."""
        self._state = state
        self.has_news = True

    def append(self, kind: RecordKind, state: State) -> None:
        """Put it on record, durably."""
        # Silent until the log has answered: an unanswered put may yet win its slot. An answer does
        # not give a voice back that was lost to a target that hangs.
        was_silent, self.is_silent = self.is_silent, True
        try:
            self.journal.append(kind, state)
        except Fenced as error:
            self._fenced = error
            raise
        # In this order: an interrupt between the two must not let an old state speak.
        self._state = state
        self.has_news = False
        self.is_silent = was_silent

    def fall_silent(self, error: EpochalError | None = None) -> None:
        self.is_silent = True
        if isinstance(error, Fenced):
            self._fenced = error

    def require_voice(self, epoch: EpochNumber) -> None:
        """Whoever catches what silenced a driver, and goes on with it, is refused."""
        if self._fenced is not None:
            raise self._fenced
        if self.is_silent:
            raise Unsettled(
                f"epoch {epoch} can't begin: the epoch log or a target has not answered this "
                "driver before, and what it was asked may yet happen",
                "start again: a new start finds out what became of it",
            )
