"""Transactions of a receiver: their rows, their states, and refusals of requests about them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum

NDJSON = "application/x-ndjson"
ARROW = "application/vnd.apache.arrow.stream"
FORMATS = (NDJSON, ARROW)


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
    TAKEN = "taken"
    """Its epoch was committed by a client with a copy of the epoch log: never this one's."""


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


# Bodies of requests: rows are checked when they arrive, before the decision (I3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """JSON objects, one per line, without the last newline; and their number."""

    lines: bytes
    count: int


def read_rows(content_type: str, body: bytes) -> Rows:
    kind = content_type.partition(";")[0].strip().lower()
    if kind == ARROW:
        body = _from_arrow(body)
    elif kind != NDJSON:
        raise Refusal(415, f"rows come as {' or '.join(FORMATS)}, not as {kind or 'nothing'}")
    lines = body.strip(b"\r\n").split(b"\n") if body.strip() else []
    for number, line in enumerate(lines):
        _require_object(line, number)
    return Rows(lines=b"\n".join(lines), count=len(lines))


def _require_object(line: bytes, number: int) -> None:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise Refusal(422, f"row {number} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise Refusal(422, f"row {number} is not a JSON object")


def _from_arrow(body: bytes) -> bytes:
    import pyarrow as pa  # noqa: PLC0415  slow to load, and JSON does not need it

    from epochal.kit import json_lines  # noqa: PLC0415

    try:
        batches = pa.ipc.open_stream(body).read_all().to_batches()
        return b"".join(json_lines.lines(batch).to_pybytes() for batch in batches)
    except (pa.ArrowException, OSError, TypeError) as error:
        raise Refusal(422, f"the Arrow stream can't be read: {error}") from None
