"""
`Journal`: the epoch log as one driver uses it, a numbered sequence appended by put-if-absent.

Claims and decisions share one sequence, so a superseded driver can't slip a decision in behind the
claim that fenced it. Every record carries the whole state; the record with the highest number is
the truth. Four rules keep it so.

**The nonce: whose record is in the slot?** A put whose answer was lost is repeated at the same
number. "Taken" then has two meanings, and only the nonce tells them apart:

    driver A                                        slot 7
    put 7, nonce a1      stored, the reply is lost  a1
    put 7, nonce a1      "taken"                    a1
    read 7               nonce a1: A's own record, the decision stands

    driver A                     driver B           slot 7
    put 7, nonce a1  (delayed)                      empty
                                 claim: put 7, b1   b1
    put 7, nonce a1  "taken"                        b1
    read 7           nonce b1: A is fenced, and its delayed put can't win any more

**Until a put is answered, nothing may be aborted.** In the second case, before B's put, A can't
know whether its delayed put will win slot 7. If A aborted its rows and the put then arrived, the
log would hold a decision that names rows which are gone. So a put that stays unanswered halts the
journal for good: no append, no abort. The next start fills slot 7 with its claim, or finds the
decision there.

**After a put, list.** Old records are deleted, so a put at an old number succeeds:

    driver A, asleep since record 6      driver B                         filled slots
                                         claims 7, decides 8 … 60         6 … 60
                                         deletes what is below 28         28 … 60
    put 7: True, the slot is empty                                        7, 28 … 60
    list: 60 is above 7: A is fenced

A's stray record does no harm, as only the highest number is ever read.

**A gap is not the end.** After that, the filled slots are 7, 28 … 60. A reader that counted up from
7 until a number is missing would take A's stray decision for the truth. So the newest record is the
highest number of a listing, and a claim goes above it.

A driver's own newest record is deleted by nobody but a driver above it. Where it is missing and
nothing is above it, the log was moved or removed, and puts that succeed at the old place don't show
who writes at the new one: the driver stops.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from epochal.coordinator.environment import Environment
from epochal.coordinator.retry import backoff
from epochal.errors import (
    EpochalError,
    Fenced,
    InvariantBroken,
    Misconfigured,
    OutcomeUnknown,
    TryAgain,
    Unsettled,
)
from epochal.protocol.records import decode, encode
from epochal.protocol.state import Record, RecordKind, State
from epochal.terms import DEFAULT_LIMITS, EpochNumber, Limits

logger = logging.getLogger("epochal")

T = TypeVar("T")

_RACES_MAX = 100
_TRANSIENT = (TryAgain, OutcomeUnknown, OSError)


class EpochLog(Protocol):
    """
    Numbered slots, each filled at most once by exactly one writer, durable on return.

    The rules of the sequence (nonces, list after put, no gap is an end) are the journal's; a log
    only stores. Listing must show every put that returned before it began.
    """

    @property
    def place(self) -> str:
        """Where this log is, for messages. Never a secret."""

    def put_if_absent(self, number: int, record: bytes) -> bool:
        """
        Fill a slot: True if this call filled it, False if it was taken already.

        Raises `TryAgain` where nothing was written, `OutcomeUnknown` where that can't be known.
        """

    def numbers(self) -> Sequence[int]:
        """All filled slots, in rising order."""

    def read(self, number: int) -> bytes | None:
        """The record in a slot, or None where the slot is empty."""

    def delete(self, numbers: Sequence[int]) -> None:
        """Empty slots. Those that are empty already are no error."""

    def close(self) -> None: ...


class Journal:
    """
    Guards appends to the epoch log: after an unanswered write, or once a target hangs, this process
    must not append or abort again.
    """

    def __init__(
        self,
        log: EpochLog,
        *,
        limits: Limits = DEFAULT_LIMITS,
        environment: Environment | None = None,
    ) -> None:
        self._log = log
        self._limits = limits
        self._environment = environment or Environment()
        self._number = 0
        """The newest record that this driver has read or written."""
        self._state: State | None = None
        self._fenced_by: Fenced | None = None
        self.is_halted = False
        """Nothing may be appended or aborted any more. Only a new start, which claims, goes on."""
        self.has_unwritten_state = False
        """`state` is newer than the newest record."""
        self.was_stopped_cleanly = False
        """The driver before this one had left nothing in doubt when this one claimed."""

    @property
    def place(self) -> str:
        return self._log.place

    @property
    def has_claimed(self) -> bool:
        return self._state is not None

    @property
    def state(self) -> State:
        """What the log holds, and what this driver has settled since."""
        if self._state is None:
            raise Misconfigured("the coordinator has not been started", "call start() first")
        return self._state

    def peek(self) -> State | None:
        """The newest state in the log, without claiming anything."""
        return self._insist(self._newest)[1]

    def claim(
        self,
        follow: Callable[[State | None], State],
        kind: RecordKind = RecordKind.CLAIM,
        *,
        note: str = "",
    ) -> State:
        """Append what `follow` makes of the newest state. From here on older drivers are fenced."""
        for _ in range(_RACES_MAX):
            number, before = self._insist(self._newest)
            self._number = number
            state = follow(before)
            if self._fill(number + 1, kind, state, note):
                self._require_still_newest(number + 1)
                self._number = number + 1
                self._state = state
                self.was_stopped_cleanly = before is None or before.is_stopped
                return state
        raise TryAgain(
            f"{self.place}: {_RACES_MAX} other drivers claimed this log at the same moment",
            "find out what starts this pipeline again and again, then start it once",
        )

    def remember(self, state: State) -> None:
        """Go on from this state; it is written with the next record."""
        self._state = state
        self.has_unwritten_state = True

    def append(self, kind: RecordKind, state: State, *, note: str = "") -> None:
        """Make `state` the truth, durably, or raise `Fenced` where another driver's is newer."""
        # Halted until the log has answered, as an unanswered put may yet win its slot. An answer
        # does not undo a halt that a hanging target caused.
        was_halted, self.is_halted = self.is_halted, True
        number = self._number + 1
        try:
            if not self._fill(number, kind, state, note):
                raise self._fenced(f"record {number} was written by another driver")
            self._require_still_newest(number)
        except Fenced as error:
            self._fenced_by = error
            raise
        # In this order: after an interrupt in between, an old state must not be appended.
        self._number = number
        self._state = state
        self.has_unwritten_state = False
        self.is_halted = was_halted

    def halt(self, error: EpochalError | None = None) -> None:
        self.is_halted = True
        if isinstance(error, Fenced):
            self._fenced_by = error

    def require_not_halted(self, epoch: EpochNumber) -> None:
        """Refuse a caller that caught the error which halted the journal, and goes on."""
        if self._fenced_by is not None:
            raise self._fenced_by
        if self.is_halted:
            raise Unsettled(
                f"epoch {epoch} can't begin: the epoch log or a target did not answer this driver, "
                "and the request may still take effect",
                "start again: a new start finds out what became of it",
            )

    def require_newest(self) -> None:
        """Raise `Fenced` where another driver has claimed since (I7)."""
        self._require_still_newest(self._number)

    def delete_old_records(self) -> None:
        """Delete records that nobody needs; a failure costs nothing but space."""
        kept_from = self._number - self._limits.log_records_kept
        try:
            stale = [number for number in self._log.numbers() if number < kept_from]
            if len(stale) >= self._limits.log_records_kept:
                self._log.delete(stale)
        except (EpochalError, OSError) as error:
            logger.warning("%s: old records could not be deleted: %s", self.place, error)

    def close(self) -> None:
        self._log.close()

    def _newest(self) -> tuple[int, State | None]:
        found = newest_record(self._log)
        return (0, None) if found is None else (found.number, found.record.state)

    def _fill(self, number: int, kind: RecordKind, state: State, note: str) -> bool:
        """True if the slot holds this record, no matter how many answers were lost on the way."""
        nonce = self._environment.nonce()
        record = Record(
            kind=kind,
            nonce=nonce,
            written_at=self._environment.clock.now(),
            state=state,
            note=note,
        )
        data = encode(record)
        return self._insist(
            lambda: self._log.put_if_absent(number, data) or self._holds(number, nonce)
        )

    def _holds(self, number: int, nonce: str) -> bool:
        data = self._log.read(number)
        return data is not None and decode(data, _name(self._log, number)).nonce == nonce

    def _require_still_newest(self, number: int) -> None:
        numbers = self._insist(self._log.numbers)
        newest = max(numbers, default=0)
        if newest > number:
            raise self._fenced(f"record {newest} is above this driver's {number}")
        if self._number and self._number not in numbers:
            raise InvariantBroken(
                f"{self.place}: record {self._number}, which this driver goes on from, is gone: "
                "the log was moved or removed while the driver was at work",
                "leave this driver stopped; start where the log is now, or put it back",
            )

    def _fenced(self, fact: str) -> Fenced:
        return Fenced(
            f"{self.place}: {fact}: another driver has taken this pipeline over",
            "leave this driver stopped; the newer one finishes what is decided",
        )

    def _insist(self, ask: Callable[[], T]) -> T:
        """Repeat a request that may be repeated until it is answered or the time is up."""
        clock = self._environment.clock
        deadline = clock.monotonic() + self._limits.decide_retry_max_s
        waits = backoff(self._limits.retry_backoff_ms, self._environment.random)
        while True:
            try:
                return ask()
            except _TRANSIENT as error:
                wait_s = next(waits)
                if clock.monotonic() + wait_s > deadline:
                    raise OutcomeUnknown(
                        f"{self.place}: no answer from the epoch log for "
                        f"{self._limits.decide_retry_max_s:.0f} s: {error}",
                        "nothing was aborted; the next start reads what was written and goes on",
                    ) from error
                clock.sleep(wait_s)


# Reading a log without claiming it: for audits, reports and tools


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbered:
    """A record and its place in the sequence."""

    number: int
    record: Record


def read_state(log: EpochLog) -> State | None:
    """What the log holds now; None where nothing was written to it yet."""
    return Journal(log).peek()


def newest_record(log: EpochLog) -> Numbered | None:
    """The newest record. Asks once: a log that does not answer raises at once."""
    for _ in range(_RACES_MAX):
        numbers = log.numbers()
        if not numbers:
            return None
        data = log.read(numbers[-1])
        # Deleted between the listing and the read: then there is a newer one to list.
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
