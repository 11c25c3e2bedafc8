"""The states of a transaction, as a table.

    Empty ──► Ongoing ──► PrepareCommit ──► CompleteCommit ─┐
      ▲          │  ▲                                       │
      │          │  └───────────────────────────────────────┤ the next transaction
      │          └──────► PrepareAbort ───► CompleteAbort ──┘
      └─────────────────────────────────────────────────────── InitProducerId
    Dead: an id that was not used for long is forgotten.

What is true in each:
    Empty           no transaction; nothing of this producer is open anywhere
    Ongoing         it may write to the partitions it named; readers of committed rows wait there
    PrepareCommit   the outcome is commit, durably: after any crash every partition gets a marker
    PrepareAbort    the same with abort; the producer may already be fenced
    CompleteCommit  every partition has its marker; repeating the request is answered with success
    CompleteAbort   the same

With the newer protocol a transaction may be aborted that never began (nothing was written, and the
producer does not know it): PrepareAbort then follows Empty or a completed state, and only raises
the epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

from epochal.errors import IllegalMove
from epochal.kafka.codes import Code


class State(IntEnum):
    """Numbered as in Kafka's transaction log."""

    EMPTY = 0
    ONGOING = 1
    PREPARE_COMMIT = 2
    PREPARE_ABORT = 3
    COMPLETE_COMMIT = 4
    COMPLETE_ABORT = 5
    DEAD = 6


NAMES: Mapping[State, str] = {
    state: "".join(part.capitalize() for part in state.name.split("_")) for state in State
}
BY_NAME: Mapping[str, State] = {name: state for state, name in NAMES.items()}

_AT_REST = frozenset((State.EMPTY, State.COMPLETE_COMMIT, State.COMPLETE_ABORT))

MAY_FOLLOW: Mapping[State, frozenset[State]] = {
    State.EMPTY: _AT_REST,
    State.ONGOING: _AT_REST | {State.ONGOING},
    State.PREPARE_COMMIT: frozenset((State.ONGOING,)),
    State.PREPARE_ABORT: _AT_REST | {State.ONGOING},
    State.COMPLETE_COMMIT: frozenset((State.PREPARE_COMMIT,)),
    State.COMPLETE_ABORT: frozenset((State.PREPARE_ABORT,)),
    State.DEAD: _AT_REST,
}
"""State → the states it may be entered from."""

IS_PREPARED = frozenset((State.PREPARE_COMMIT, State.PREPARE_ABORT))
IS_AT_REST = _AT_REST
COMPLETED: Mapping[State, State] = {
    State.PREPARE_COMMIT: State.COMPLETE_COMMIT,
    State.PREPARE_ABORT: State.COMPLETE_ABORT,
}

END_OLDER: Mapping[tuple[State, bool], State | Code] = {
    (State.ONGOING, True): State.PREPARE_COMMIT,
    (State.ONGOING, False): State.PREPARE_ABORT,
    (State.PREPARE_COMMIT, True): Code.CONCURRENT_TRANSACTIONS,
    (State.PREPARE_ABORT, False): Code.CONCURRENT_TRANSACTIONS,
    (State.COMPLETE_COMMIT, True): Code.NONE,
    (State.COMPLETE_ABORT, False): Code.NONE,
}
"""
EndTxn up to version 4: (state, is commit) → the next state or the answer.

Anything else is INVALID_TXN_STATE.
"""

END_NEWER: Mapping[tuple[State, bool, bool], State | Code] = {
    (State.ONGOING, True, False): State.PREPARE_COMMIT,
    (State.ONGOING, False, False): State.PREPARE_ABORT,
    (State.PREPARE_COMMIT, True, True): Code.CONCURRENT_TRANSACTIONS,
    (State.PREPARE_ABORT, False, True): Code.CONCURRENT_TRANSACTIONS,
    (State.COMPLETE_COMMIT, True, True): Code.NONE,
    (State.COMPLETE_ABORT, False, True): Code.NONE,
    (State.COMPLETE_COMMIT, False, False): State.PREPARE_ABORT,
    (State.COMPLETE_ABORT, False, False): State.PREPARE_ABORT,
    (State.EMPTY, False, False): State.PREPARE_ABORT,
}
"""
The same from version 5 on: (state, is commit, is repeated).

A repetition is recognised by its epoch, one below the current: every end raises it.
"""


def move(at: State, to: State) -> State:
    """The next state, if the table has the step."""
    if at not in MAY_FOLLOW[to]:
        raise IllegalMove(f"a transaction can't go from {NAMES[at]} to {NAMES[to]}")
    return to
