"""What a transaction can be, and what the receiver says where it can't do what was asked."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class State(Enum):
    """A transaction's state, as it is told in every answer."""

    OPEN = "open"
    """Parts have arrived, and it is not sealed."""
    PREPARED = "prepared"
    COMMITTED = "committed"
    ABORTED = "aborted"
    """For good: a late part does not bring it back."""
    UNKNOWN = "unknown"
    """Nothing of this name ever arrived."""
    FORGOTTEN = "forgotten"
    """Its epoch was settled and pruned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transaction:
    txn: str
    state: State
    rows: int = 0
    age_s: float = 0.0

    def told(self) -> dict[str, str | int | float]:
        return {
            "txn": self.txn,
            "state": self.state.value,
            "rows": self.rows,
            "age_s": round(self.age_s, 3),
        }


class Refusal(Exception):
    """An answer that is not 200: the caller reads status and state, a person the rest."""

    def __init__(self, status: int, message: str, state: State | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.state = state


def out_of_state(txn: str, state: State, asked: str) -> Refusal:
    """404 and 410 where there is no such transaction (any more), 409 where it is something else."""
    status = {State.UNKNOWN: 404, State.FORGOTTEN: 410}.get(state, 409)
    return Refusal(status, f"{txn} is {state.value}: it can't be {asked}", state)
