"""
The phases of one epoch, as a transition table.

Before the decision everything can be thrown away; after it everything can be repeated, and the only
way is forward. ABORTED needs no answer from a target: an epoch without a decision is aborted by
definition (I2), and what it left behind is cleared when the target can be reached (I5). FAILED is a
decided epoch that this driver could not carry out; the next start goes on with it.

    idle → active → preparing → prepared → DECIDED → committing → committed → active …
              └────────┴───────────┴→ aborting → aborted → active …
                                                       committing → failed → committing …

A phase changes only by a row of TABLE. The pictures in the documentation are drawn from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType

from epochal.errors import IllegalMove
from epochal.terms import EpochNumber


class Phase(Enum):
    IDLE = "idle"
    ACTIVE = "active"
    PREPARING = "preparing"
    PREPARED = "prepared"
    DECIDED = "decided"
    COMMITTING = "committing"
    COMMITTED = "committed"
    ABORTING = "aborting"
    ABORTED = "aborted"
    FAILED = "failed"


class Move(Enum):
    BEGIN = "begin"
    RESUME = "resume"
    PREPARE = "prepare"
    GATHER = "gather"
    DECIDE = "decide"
    COMMIT = "commit"
    SETTLE = "settle"
    FAIL = "fail"
    ABORT = "abort"
    CLEAR = "clear"


TABLE: Mapping[tuple[Phase, Move], Phase] = MappingProxyType(
    {
        (Phase.IDLE, Move.BEGIN): Phase.ACTIVE,
        (Phase.COMMITTED, Move.BEGIN): Phase.ACTIVE,
        (Phase.ABORTED, Move.BEGIN): Phase.ACTIVE,
        # A start that finds a decided epoch in the log goes on where the last driver stopped.
        (Phase.IDLE, Move.RESUME): Phase.DECIDED,
        (Phase.ACTIVE, Move.PREPARE): Phase.PREPARING,
        (Phase.PREPARING, Move.GATHER): Phase.PREPARED,
        (Phase.PREPARED, Move.DECIDE): Phase.DECIDED,
        (Phase.DECIDED, Move.COMMIT): Phase.COMMITTING,
        (Phase.COMMITTING, Move.SETTLE): Phase.COMMITTED,
        (Phase.COMMITTING, Move.FAIL): Phase.FAILED,
        (Phase.FAILED, Move.COMMIT): Phase.COMMITTING,
        (Phase.ACTIVE, Move.ABORT): Phase.ABORTING,
        (Phase.PREPARING, Move.ABORT): Phase.ABORTING,
        (Phase.PREPARED, Move.ABORT): Phase.ABORTING,
        (Phase.ABORTING, Move.CLEAR): Phase.ABORTED,
    }
)

DECIDED_PHASES = frozenset({Phase.DECIDED, Phase.COMMITTING, Phase.COMMITTED, Phase.FAILED})

_WAYS_OUT: Mapping[Move, str] = MappingProxyType(
    {
        Move.BEGIN: "commit or abort the epoch that is open before the next one begins",
        Move.COMMIT: "an epoch is begun, prepared and decided before it is committed",
        Move.DECIDE: "an epoch is decided once, when all its receipts are there",
        Move.ABORT: "only an epoch that is open and not yet decided can be aborted",
    }
)


def advance(phase: Phase, move: Move, epoch: EpochNumber | None = None) -> Phase:
    """The phase after `move`, or an error that names both states."""
    after = TABLE.get((phase, move))
    if after is not None:
        return after
    aims = sorted({aim.value for (_, by), aim in TABLE.items() if by is move})
    about = "" if epoch is None else f"epoch {epoch}: "
    raise IllegalMove(
        f"{about}{move.value} would lead to {' or '.join(aims)}, but the epoch is {phase.value}",
        _WAYS_OUT.get(move, "this is a defect of the caller; the transition table has no such row"),
    )
