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
from epochal.protocol.admission import Position, Unfinished, after_unfinished
from epochal.protocol.state import (
    GivenUp,
    RecordKind,
    State,
    adopted,
    forked,
    gave_up,
    renamed,
)
from epochal.terms import EpochNumber


def adopt(
    log: EpochLog,
    *,
    location: str,
    query_id: str | None,
    position: Position,
    unfinished: Unfinished = Unfinished.ASK,
    around: Surroundings | None = None,
) -> State:
    """
    This checkpoint moved here, or other code ran it meanwhile: the log follows it, forward only.

    A log without a query (a session's, a once-only load's) has no engine to follow.
    """

    def follow(state: State) -> State:
        expected = (
            None if state.query_id is None else _gone_on_at(state, position, unfinished, location)
        )
        return adopted(
            state, location=location, query_id=query_id or state.query_id, expected=expected
        )

    return _change(log, follow, around)


def _gone_on_at(
    state: State, position: Position, unfinished: Unfinished, location: str
) -> EpochNumber | None:
    """Where other code left the checkpoint; None where it is where the log left it."""
    upcoming = position.upcoming
    if upcoming in (state.expected, state.expected - 1):
        return None
    if upcoming < state.expected:
        raise Refused(
            f"{location} goes on at epoch {upcoming}, the epoch log has decided up to "
            f"{state.expected - 1}: a log never goes back",
            "bring Spark's part of the checkpoint (offsets, commits, state) here as well",
        )
    return after_unfinished(unfinished, position, location) if position.has_unfinished else upcoming


def fork(
    log: EpochLog,
    *,
    location: str,
    is_original_alive: bool = False,
    around: Surroundings | None = None,
) -> State:
    """
    This checkpoint is a copy: it becomes a pipeline of its own, under a new uid.

    What is decided and not carried out stays the original's, so there must be one (I4).
    """
    around = around or Surroundings()
    uid = around.mint()

    def follow(state: State) -> State:
        if state.location == location:
            raise Refused(
                f"{location} is where this log belongs: it is the original, not a copy",
                "copy the checkpoint, then fork the copy",
            )
        if state.unsettled is not None and not is_original_alive:
            raise Refused(
                f"epoch {state.unsettled.epoch} is decided and not carried out on "
                f"{', '.join(state.pending)}; a fork leaves that to the original",
                "if the original is there and will be started: `--original-lives`; if this is the "
                f"only copy: `epochal adopt {location}`",
            )
        return forked(state, uid=uid, location=location)

    return _change(log, follow, around)


def give_up(log: EpochLog, word: GivenUp, *, around: Surroundings | None = None) -> State:
    """A person's word that one sink of the unsettled epoch will not be carried out (I4)."""

    def follow(state: State) -> State:
        if state.unsettled is None or word.sink not in state.pending:
            raise Refused(
                f"nothing of sink {word.sink!r} is decided and waiting to be carried out",
                f"waiting are: {', '.join(state.pending) or 'none'}",
            )
        return gave_up(state, word)

    return _change(log, follow, around, RecordKind.GAVE_UP, note=f"{word.by}: {word.because}")


def rename(log: EpochLog, *, pipeline: str, around: Surroundings | None = None) -> State:
    """The pipeline goes by another name from here on."""
    return _change(log, lambda state: renamed(state, pipeline), around)


def _change(
    log: EpochLog,
    follow: Callable[[State], State],
    around: Surroundings | None,
    kind: RecordKind = RecordKind.IDENTITY,
    *,
    note: str = "",
) -> State:
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
        return journal.claim(known, kind, note=note)
    finally:
        journal.close()
