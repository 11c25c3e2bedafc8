"""
Gates: functions of the user that may refuse a prepared epoch before it is decided.

A gate sees what every sink has prepared and, where the engine can show them, the rows. It lets an
epoch pass by returning None or True. False, a reason as text, or any exception refuses it, also
that of `sys.exit()`: the epoch is aborted, the query stops with the gate's message, and nothing
became visible.

Where a sink prepares last, because its prepared rows block others, gates are asked before it does.
A gate that asks about such a sink is broken off there, and asked again when the answer is known.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from epochal.contract import Rows
from epochal.errors import EpochalError, GateRefused
from epochal.terms import EpochNumber, Receipt, Receipts, SinkName


class AskedTooEarly(BaseException):
    """A gate asked about a sink that is not prepared yet. Its own `except` must not catch this."""


class Early(Mapping[SinkName, Sequence[Receipt]]):
    """What is prepared while other sinks are still to come: can't be iterated or counted."""

    def __init__(self, prepared: Receipts, awaited: frozenset[SinkName]) -> None:
        self._prepared = prepared
        self._awaited = awaited

    def __getitem__(self, sink: SinkName) -> Sequence[Receipt]:
        if sink in self._awaited:
            raise AskedTooEarly(sink)
        return self._prepared[sink]

    def __iter__(self) -> Iterator[SinkName]:
        raise AskedTooEarly

    def __len__(self) -> int:
        raise AskedTooEarly


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedEpoch:
    """The prepared epoch that a gate is given."""

    number: EpochNumber
    prepared: Receipts
    frame: Rows = None
    """The batch itself, as a DataFrame; None where there is no engine."""

    def receipts(self, sink: str) -> Sequence[Receipt]:
        try:
            return self.prepared[SinkName(sink)]
        except KeyError:
            known = ", ".join(repr(name) for name in self.prepared)
            raise GateRefused(
                f"a gate asked for sink {sink!r}, which this pipeline does not have",
                f"its sinks are {known}; name= on a sink chooses the name",
            ) from None

    def rows(self, sink: str) -> int:
        """How many rows a sink has prepared."""
        return sum(receipt.rows for receipt in self.receipts(sink))

    def bytes(self, sink: str) -> int:
        return sum(receipt.bytes for receipt in self.receipts(sink))


Gate: TypeAlias = Callable[[PreparedEpoch], "bool | str | None"]


def run_gates(gates: Iterable[Gate], epoch: PreparedEpoch) -> Sequence[Gate]:
    """Ask every gate, in order; the first refusal is raised. Returns those that asked too early."""
    early = []
    for gate in gates:
        try:
            answer = _ask(gate, epoch)
        except AskedTooEarly:
            early.append(gate)
            continue
        if answer is None or answer is True:
            continue
        reason = answer if isinstance(answer, str) else "it returned False"
        raise GateRefused(
            f"epoch {epoch.number}: gate {_name(gate)} refused: {reason}",
            "nothing became visible; the epoch is tried again at the next start",
        )
    return early


def _ask(gate: Gate, epoch: PreparedEpoch) -> bool | str | None:
    try:
        return gate(epoch)
    except (EpochalError, AskedTooEarly):
        raise
    except BaseException as error:
        if is_interrupt(error):
            raise
        raise GateRefused(
            f"epoch {epoch.number}: gate {_name(gate)} failed: {type(error).__name__}: {error}",
            "nothing became visible; repair the gate, then start again",
        ) from error


def is_interrupt(error: BaseException) -> bool:
    """Ctrl-C, which Python raises in the main thread only: elsewhere, code that was called did."""
    is_here = threading.current_thread() is threading.main_thread()
    return is_here and isinstance(error, KeyboardInterrupt)


def _name(gate: Gate) -> str:
    return str(getattr(gate, "__name__", gate))
