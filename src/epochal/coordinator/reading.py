"""Looking into an epoch log without claiming it: for audits, reports and tools."""

from __future__ import annotations

from dataclasses import dataclass

from epochal.contract import DEFAULT_LIMITS, EpochLog
from epochal.coordinator.journal import Journal
from epochal.coordinator.surroundings import Surroundings
from epochal.errors import InvariantBroken
from epochal.protocol.records import decode
from epochal.protocol.state import Record, State

_RACES_MAX = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbered:
    """A record and its place in the sequence."""

    number: int
    record: Record


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


def newest_record(log: EpochLog) -> Numbered | None:
    """The truth and when it was written. Asks once: a log that does not answer raises at once."""
    for _ in range(_RACES_MAX):
        numbers = log.numbers()
        if not numbers:
            return None
        data = log.read(numbers[-1])
        # Gone between the listing and the reading: then there is a newer one to list.
        if data is not None:
            return Numbered(number=numbers[-1], record=decode(data, _name(log, numbers[-1])))
    raise InvariantBroken(f"{log.place}: records are listed that can't be read")


def kept_records(log: EpochLog, count: int | None = None) -> list[Numbered]:
    """The newest records that are kept for people, oldest first."""
    numbers = log.numbers()
    if count is not None:
        numbers = numbers[-count:]
    found = ((number, log.read(number)) for number in numbers)
    return [
        Numbered(number=number, record=decode(data, _name(log, number)))
        for number, data in found
        if data is not None
    ]


def _name(log: EpochLog, number: int) -> str:
    return f"{log.place}, record {number}"
