"""
The epoch log as one driver uses it: one numbered sequence, appended by put-if-absent.

Claims and decisions share the sequence, so a superseded driver can't slip a decision in behind the
claim that fenced it. The highest number is the truth, and three rules keep it so:

- After a put at k, list. Anything above k means `Fenced`: a driver that slept may have filled a
  slot whose record was deleted long ago, and its put succeeds all the same. A gap is never the end.
- A put without an answer is closed by filling the same slot again and reading who won; "taken" with
  one's own nonce is one's own. Until it is closed, nothing may be aborted.
- Records below one's own may be deleted, as each carries the whole state. Nobody deletes one's own:
  where it is gone, the log was moved or removed behind this driver, and puts that succeed where it
  was tell nothing about who speaks where it now is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from epochal.contract import Clock, EpochLog, Limits
from epochal.coordinator.waiting import backoff
from epochal.errors import EpochalError, Fenced, InvariantBroken, OutcomeUnknown, TryAgain
from epochal.protocol.records import decode, encode
from epochal.protocol.state import Record, RecordKind, State

logger = logging.getLogger("epochal")

T = TypeVar("T")

_RACES_MAX = 100
_TRANSIENT = (TryAgain, OutcomeUnknown, OSError)


class Journal:
    def __init__(
        self,
        log: EpochLog,
        *,
        clock: Clock,
        limits: Limits,
        chance: Callable[[], float],
        nonce: Callable[[], str],
    ) -> None:
        self._log = log
        self._clock = clock
        self._limits = limits
        self._chance = chance
        self._nonce = nonce
        self._number = 0

    @property
    def place(self) -> str:
        return self._log.place

    def peek(self) -> State | None:
        """The truth as it stands, without claiming anything."""
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
                return state
        raise TryAgain(
            f"{self.place}: {_RACES_MAX} other drivers claimed this log at the same moment",
            "find out what starts this pipeline again and again, then start it once",
        )

    def append(self, kind: RecordKind, state: State, *, note: str = "") -> None:
        """Make `state` the truth, durably, or raise `Fenced` where somebody else's is newer."""
        number = self._number + 1
        if not self._fill(number, kind, state, note):
            raise self._fenced(f"record {number} was written by another driver")
        self._require_still_newest(number)
        self._number = number

    def require_newest(self) -> None:
        """Raise `Fenced` where another driver has claimed since (I7)."""
        self._require_still_newest(self._number)

    def tidy(self) -> None:
        """Delete records that nobody needs; a failure costs nothing but room."""
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
        for _ in range(_RACES_MAX):
            numbers = self._log.numbers()
            if not numbers:
                return 0, None
            data = self._log.read(numbers[-1])
            # Gone between the listing and the reading: then there is a newer one to list.
            if data is not None:
                return numbers[-1], decode(data, f"{self.place}, record {numbers[-1]}").state
        raise InvariantBroken(f"{self.place}: records are listed that can't be read")

    def _fill(self, number: int, kind: RecordKind, state: State, note: str) -> bool:
        """True if the slot holds this record, whatever answers were lost on the way."""
        nonce = self._nonce()
        record = Record(
            kind=kind, nonce=nonce, written_at=self._clock.now(), state=state, note=note
        )
        data = encode(record)
        return self._insist(
            lambda: self._log.put_if_absent(number, data) or self._holds(number, nonce)
        )

    def _holds(self, number: int, nonce: str) -> bool:
        data = self._log.read(number)
        return data is not None and decode(data, f"{self.place}, record {number}").nonce == nonce

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
        """Repeat what may be repeated until it is answered or the time is up."""
        deadline = self._clock.monotonic() + self._limits.decide_retry_max_s
        waits = backoff(self._limits.retry_backoff_ms, self._chance)
        while True:
            try:
                return ask()
            except _TRANSIENT as error:
                wait_s = next(waits)
                if self._clock.monotonic() + wait_s > deadline:
                    raise OutcomeUnknown(
                        f"{self.place}: no answer from the epoch log for "
                        f"{self._limits.decide_retry_max_s:.0f} s: {error}",
                        "nothing was aborted; the next start reads what was written and goes on",
                    ) from error
                self._clock.sleep(wait_s)
