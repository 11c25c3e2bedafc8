"""Looking into an epoch log without claiming it: for audits, reports and tools."""

from __future__ import annotations

from epochal.contract import DEFAULT_LIMITS, EpochLog
from epochal.coordinator.journal import Journal
from epochal.coordinator.surroundings import Surroundings
from epochal.protocol.state import State


def read_state(log: EpochLog) -> State | None:
    """What the log holds now; None where nobody has written to it yet."""
    around = Surroundings()
    journal = Journal(
        log,
        clock=around.clock,
        limits=DEFAULT_LIMITS,
        chance=around.chance,
        nonce=around.nonce,
    )
    return journal.peek()
