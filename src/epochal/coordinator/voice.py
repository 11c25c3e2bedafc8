"""
A driver's word in the epoch log: the state that it has put there, and whether it may still speak.

It falls silent where it can't know what its last word came to: a put without an answer may yet win
its slot, and a target that hangs may yet do what it was asked. A silent driver appends nothing and
aborts nothing; whoever goes on starts anew, and so claims.
"""

from __future__ import annotations

from collections.abc import Callable

from epochal.coordinator.journal import Journal
from epochal.errors import Fenced, Misconfigured
from epochal.protocol.state import RecordKind, State


class Voice:
    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.is_silent = False
        self._state: State | None = None

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
        self._state = self.journal.claim(follow)

    def resume(self, driver: str, record: int | None) -> None:
        """Go on under a claim of the same driver; fenced where the newest record is not its own."""
        number, state = self.journal.resume()
        if state is None or state.driver != driver or record not in (None, number):
            raise Fenced(
                f"{self.journal.place}: record {number} is not what this driver left there"
                f"{'' if state is None else f'; it is of {state.driver}'}",
                "another driver has taken this pipeline over: leave this one stopped",
            )
        self._state = state

    def keep(self, state: State) -> None:
        """Know this from here on; it rides in the next record."""
        self._state = state

    def append(self, kind: RecordKind, state: State) -> None:
        """Put it on record, durably."""
        # Silent until the log has answered: an unanswered put may yet win its slot.
        self.is_silent = True
        self.journal.append(kind, state)
        # In this order: an interrupt between the two must not let an old state speak.
        self._state = state
        self.is_silent = False

    def fall_silent(self) -> None:
        self.is_silent = True
