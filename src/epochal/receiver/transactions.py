"""The states of a transaction, and `Refusal`: the answer to a request that can't be carried out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class State(Enum):
    """A transaction's state, as it is in every answer."""

    OPEN = "open"
    """Parts have arrived; it is not sealed."""
    PREPARED = "prepared"
    COMMITTED = "committed"
    ABORTED = "aborted"
    """Final: a late part does not change it."""
    UNKNOWN = "unknown"
    """Nothing with this name ever arrived."""
    FORGOTTEN = "forgotten"
    """Its epoch was settled and pruned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transaction:
    txn: str
    state: State
    rows: int = 0
    age_s: float = 0.0

    def as_json(self) -> dict[str, str | int | float]:
        return {
            "txn": self.txn,
            "state": self.state.value,
            "rows": self.rows,
            "age_s": round(self.age_s, 3),
        }


class Refusal(Exception):
    """An answer that is not 200. Clients read status and state; the message is for people."""

    def __init__(self, status: int, message: str, state: State | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.state = state


def out_of_state(txn: str, state: State, verb: str) -> Refusal:
    """404 or 410: there is no such transaction (any more); 409: it is in another state."""
    status = {State.UNKNOWN: 404, State.FORGOTTEN: 410}.get(state, 409)
    return Refusal(status, f"{txn} is {state.value}: it can't be {verb}", state)
