"""
What a person may change about a pipeline's identity, without Spark and without its targets.

Each is one record of the epoch log, so a driver that still runs is fenced by it, and nothing that
was decided is lost.
"""

from __future__ import annotations

from collections.abc import Callable

from epochal.contract import DEFAULT_LIMITS, EpochLog
from epochal.coordinator.journal import Journal
from epochal.coordinator.surroundings import Surroundings
from epochal.errors import Refused
from epochal.protocol.admission import Position
from epochal.protocol.state import RecordKind, State, adopted, forked, renamed


def adopt(
    log: EpochLog,
    *,
    location: str,
    query_id: str | None,
    position: Position,
    around: Surroundings | None = None,
) -> State:
    """This checkpoint moved here, or other code ran it meanwhile: the log follows it."""

    def follow(state: State) -> State:
        upcoming = position.upcoming
        is_in_line = upcoming in (state.expected, state.expected - 1)
        return adopted(
            state,
            location=location,
            query_id=query_id,
            expected=None if is_in_line else upcoming,
        )

    return _change(log, follow, around)


def fork(log: EpochLog, *, location: str, around: Surroundings | None = None) -> State:
    """This checkpoint is a copy: it becomes a pipeline of its own, under a new uid."""
    around = around or Surroundings()
    uid = around.mint()
    return _change(log, lambda state: forked(state, uid=uid, location=location), around)


def rename(log: EpochLog, *, pipeline: str, around: Surroundings | None = None) -> State:
    """The pipeline goes by another name from here on."""
    return _change(log, lambda state: renamed(state, pipeline), around)


def _change(log: EpochLog, follow: Callable[[State], State], around: Surroundings | None) -> State:
    around = around or Surroundings()
    journal = Journal(
        log, clock=around.clock, limits=DEFAULT_LIMITS, chance=around.chance, nonce=around.nonce
    )

    def known(state: State | None) -> State:
        if state is None:
            raise Refused(
                f"{log.place} holds no epoch log",
                "give the checkpoint of a pipeline that has been started with epochal before",
            )
        return follow(state)

    try:
        return journal.claim(known, RecordKind.IDENTITY)
    finally:
        journal.close()
