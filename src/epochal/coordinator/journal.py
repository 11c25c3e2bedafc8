"""
`Journal`: the epoch log as one driver uses it, a numbered sequence appended by put-if-absent.

Claims and decisions share one sequence, so a superseded driver can't slip a decision in behind the
claim that fenced it. Every record carries the whole state; the record with the highest number is
the truth. Five rules keep it so.

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

**A pause does not fence.** It is the one record that a person puts above a driver's own without
taking over, and changes nothing but `pause`. The driver goes on above it:

    driver A                     a person           filled slots
    decides 6: record 8                             … 8
    prepares 7                   pause: put 9       … 8, 9
    decides 7: put 9 "taken"
    read 9: a pause
    put 10, with the pause                          … 8, 9, 10
    commits 7, writes STOP                          … 8, 9, 10, 11

A reads every record above its own. A claim among them, or a gap where one was deleted, means that A
is fenced.

**Lists first.** Receipts of a large decision lie in lists beside the log. They are put before the
record that names them, and deleted once a record that does not name them was the newest; why a late
put or delete does no harm is argued in `protocol.receipts`.

A driver's own newest record is deleted by nobody but a driver above it. Where it is missing and
nothing is above it, the log was moved or removed, and puts that succeed at the old place don't show
who writes at the new one: the driver stops.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

from epochal.coordinator.environment import Environment
from epochal.coordinator.retry import backoff
from epochal.errors import (
    CorruptRecord,
    EpochalError,
    Fenced,
    InvariantBroken,
    Misconfigured,
    OutcomeUnknown,
    Refused,
    TryAgain,
    Unsettled,
)
from epochal.protocol.invariants import broken
from epochal.protocol.receipts import lay_beside, lists_of
from epochal.protocol.records import decode, encode
from epochal.protocol.state import Pause, Record, RecordKind, State
from epochal.terms import DEFAULT_LIMITS, EpochNumber, Limits, Uid

logger = logging.getLogger("epochal")

T = TypeVar("T")

_RACES_MAX = 100
_ATTEMPTS_SILENT = 3
"""Failures of one request after which the log says what is being waited for."""
_PAUSES = frozenset({RecordKind.PAUSE, RecordKind.RESUME})
_TRANSIENT = (TryAgain, OutcomeUnknown, OSError)
_UNKNOWN = (
    "nothing was aborted; start again once the storage of the log answers: the start reads what "
    "was written and goes on from there"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartToken:
    """
    Names the newest record of a process that has claimed, for the one that goes on in its place.

    The second may be a worker that was started long ago and slept. By the token it claims only
    while nobody else has claimed since, so that it pushes no healthy driver aside:

        client 1             worker 1              client 2, worker 2       newest record
        claims, token 4                                                     4
                             starts, is stopped
                                                   claims, token 5          5
                                                   claims above 5, works    6
                             wakes, its first batch: 4 is not the newest, Fenced
    """

    uid: Uid
    number: int
    nonce: str


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

    def put_list(self, name: str, content: bytes) -> None:
        """Write a list, durable on return; its name is a digest of its content."""

    def read_list(self, name: str) -> bytes | None:
        """The content of a list, or None where there is none of this name."""

    def list_names(self) -> Sequence[str]:
        """The names of all lists."""

    def delete_lists(self, names: Sequence[str]) -> None:
        """Remove lists. Those that are not there are no error."""

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
        self._lists: frozenset[str] = frozenset()
        """Lists that the newest record names."""
        self._stale_lists: frozenset[str] = frozenset()
        """Lists that an earlier record names, and the newest does not."""
        self.records = 0
        """How many records there were when they were last listed."""
        self._is_untidy = False
        """What is old could not be deleted."""
        self._state: State | None = None
        self._fenced_by: Fenced | None = None
        self.is_halted = False
        """Nothing may be appended or aborted any more. Only a new start, which claims, goes on."""
        self.has_unwritten_state = False
        """`state` is newer than the newest record."""
        self.was_clear = False
        """The driver before this one had left nothing prepared, and no tasks, at its end."""
        self._written: tuple[int, str] | None = None
        """Number and nonce of the newest record that this driver has written."""

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
        return self._insist(self._newest, "the newest record can't be read")[1]

    def claim(
        self,
        follow: Callable[[State | None], State],
        kind: RecordKind = RecordKind.CLAIM,
        *,
        note: str = "",
        above: StartToken | None = None,
    ) -> State:
        """
        Append what `follow` makes of the newest state. From here on older drivers are fenced.

        `above`: only where that record is the newest; `Fenced` where another driver's is. Pauses
        don't count.
        """

        def followed(before: State | None) -> State:
            if above is not None:
                self.require_newest_is(above)
            return follow(before)

        for _ in range(_RACES_MAX):
            number, before, state = self._followed(followed)
            self._number = number
            if self._fill(number + 1, kind, state, note):
                self._number, self._state = self._above_pauses(number + 1, state, has_put=True)
                self._note_lists(state)
                self.was_clear = before is None or before.is_clear
                return state
        raise self._many_races()

    def foresee(self, follow: Callable[[State | None], State]) -> tuple[State | None, State]:
        """The newest state in the log, and what `claim` would make of it now."""
        _, before, state = self._followed(follow)
        return before, state

    def _followed(self, follow: Callable[[State | None], State]) -> tuple[int, State | None, State]:
        """
        Number and state of the newest record, and what `follow` makes of it, which compares it with
        what it reads elsewhere. Where another driver is at work, the two may be of different
        moments; so a refusal counts only where the log is as it was:

            this start                   the driver that works    log     checkpoint
            reads the log: 6 is next                              6       6
                                         decides and ends 6, 7    8       8
            reads the checkpoint: 8 is
            next, and refuses
            reads the log: 8 is next     again
        """
        for _ in range(_RACES_MAX):
            number, before = self._insist(self._newest, "the newest record can't be read")
            try:
                return number, before, follow(before)
            except Refused:
                if max(self._numbers(), default=0) == number:
                    raise
        raise self._many_races()

    @property
    def token(self) -> StartToken:
        """Names the newest record of this driver, for the process that goes on in its place."""
        if self._written is None:
            raise Misconfigured("this driver has claimed nothing", "call start() first")
        number, nonce = self._written
        return StartToken(uid=self.state.uid, number=number, nonce=nonce)

    def require_newest_is(self, token: StartToken) -> None:
        """Raise `Fenced` where another driver has claimed since the token was made."""
        if not self._numbers():
            raise Misconfigured(
                f"{self.place} holds no epoch log here, and record {token.number} was written to "
                "it where the query was started: the two processes see different places",
                "keep the log where both reach it: log='postgresql://…#name', 's3://…' or a shared "
                "folder",
            )
        found = self._insist(
            partial(_read, self._log, token.number), f"record {token.number} can't be read"
        )
        if found is None or found.record.nonce != token.nonce:
            raise self._fenced(f"record {token.number} is not the one of this start")
        for number in self._numbers():
            if number > token.number:
                self._pause_in(number, found.record.state)

    def _many_races(self) -> TryAgain:
        return TryAgain(
            f"{self.place}: {_RACES_MAX} other drivers wrote to this log at the same moment",
            "find out what starts this pipeline again and again, then start it once",
        )

    def set_pause(self, pause: Pause | None, *, note: str) -> State:
        """Pause or resume the pipeline without fencing its driver, which goes on above this."""
        kind = RecordKind.RESUME if pause is None else RecordKind.PAUSE
        for _ in range(_RACES_MAX):
            number, before = self._insist(self._newest, "the newest record can't be read")
            if before is None:
                raise Misconfigured(f"{self.place} holds no epoch log", "start the pipeline first")
            if before.pause == pause:
                return before
            # Then read again: a slot whose record was deleted is free, and not the newest.
            self._fill(number + 1, kind, replace(before, pause=pause), note)
        raise self._many_races()

    def remember(self, state: State) -> None:
        """Go on from this state; it is written with the next record."""
        self._state = state
        self.has_unwritten_state = True

    def append(self, kind: RecordKind, state: State, *, note: str = "") -> None:
        """
        Make `state` the truth, durably, or raise `Fenced` where another driver's is newer.

        `TryAgain` and `Misconfigured` mean that nothing was written, and none of it can appear any
        more: the caller may abort. After any other error the journal is halted.
        """
        if self.is_halted:
            raise broken("I9", f"{kind.value} was to be appended after an unanswered request")
        state, lists = self._with_lists(state)
        # Before the halt: an error here decides nothing.
        self._put_lists(lists)
        # Until the log has answered, as an unanswered put may yet win its slot.
        self.is_halted = True
        number = self._number
        try:
            while not self._fill(number + 1, kind, state, note):
                taken = number + 1
                number, state = self._above_pauses(number, state)
                if number < taken:
                    raise self._fenced(f"record {taken} was written by another driver, and is gone")
            number, state = self._above_pauses(number + 1, state, has_put=True)
        except Fenced as error:
            self._fenced_by = error
            raise
        except (TryAgain, Misconfigured):
            self.is_halted = False
            raise
        # In this order: after an interrupt in between, an old state must not be appended.
        self._number = number
        self._state = state
        self._note_lists(state)
        self.has_unwritten_state = False
        self.is_halted = False

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
        """Raise `Fenced` where another driver has claimed since (I7); learn of a pause."""
        self._number, self._state = self._above_pauses(self._number, self.state)

    @property
    def records_max(self) -> int:
        """So many records are there at most, where old ones can be deleted."""
        return 2 * max(self._limits.log_records_kept, 1)

    def tidy_if_many(self) -> None:
        """
        Delete what has become too much since the last sweep: an epoch may end 50 times a second,
        or name lists of many megabytes. Where that fails, the next sweep tries again.
        """
        if not self._is_untidy and (self._stale_lists or self.records > self.records_max):
            self.tidy()

    def tidy(self, *, with_strays: bool = False) -> None:
        """
        Delete records and lists that nobody needs; a failure costs nothing but space.

        `with_strays` also finds lists that a killed driver or a late put left behind.
        """
        # An unanswered put may yet become the newest record, and names lists.
        if self.is_halted:
            return
        self._is_untidy = True
        kept_from = self._number - self._limits.log_records_kept
        try:
            stale = [number for number in self._log.numbers() if number < kept_from]
            if len(stale) >= self._limits.log_records_kept:
                self._log.delete(stale)
                self.records = self._limits.log_records_kept
            lists = self._stale_lists | (self._stray_lists() if with_strays else frozenset())
            if lists:
                self._log.delete_lists(sorted(lists))
                self._stale_lists = frozenset()
            self._is_untidy = False
        except (Fenced, InvariantBroken):
            raise
        except (EpochalError, OSError) as error:
            logger.warning("%s: old records could not be deleted: %s", self.place, error)

    def _stray_lists(self) -> frozenset[str]:
        # In this order (see `protocol.receipts`): a newer driver's lists must not be among them.
        found = frozenset(self._log.list_names())
        if found - self._lists:
            self.require_newest()
        return found - self._lists

    def close(self) -> None:
        self._log.close()

    def _newest(self) -> tuple[int, State | None]:
        found = newest_record(self._log, self._read_list)
        return (0, None) if found is None else (found.number, found.record.state)

    def _with_lists(self, state: State) -> tuple[State, Mapping[str, bytes]]:
        """The state with receipts that are too many for a record in lists, and lists to put."""
        if state.unsettled is None:
            return state, {}
        decision, contents = lay_beside(
            state.unsettled,
            inline_bytes_max=self._limits.receipts_inline_bytes,
            nonce=self._environment.nonce,
        )
        return replace(state, unsettled=decision), contents

    def _put_lists(self, lists: Mapping[str, bytes]) -> None:
        for name, content in lists.items():
            self._insist(
                partial(self._log.put_list, name, content), f"the list {name} can't be written"
            )

    def _note_lists(self, state: State) -> None:
        named = lists_of(state.unsettled)
        self._stale_lists = (self._stale_lists | self._lists) - named
        self._lists = named

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
        is_own = self._insist(
            lambda: self._log.put_if_absent(number, data) or self._holds(number, nonce),
            f"record {number} can't be written",
            has_effect=True,
        )
        if is_own:
            self._written = number, nonce
        return is_own

    def _read_list(self, number: int, name: str) -> bytes:
        content = self._insist(partial(self._log.read_list, name), f"the list {name} can't be read")
        if content is not None:
            return content
        if max(self._numbers(), default=0) > number:
            raise self._fenced(f"record {number} is not the newest, and its list {name} is gone")
        raise _gone(self._log, number, name)

    def _holds(self, number: int, nonce: str) -> bool:
        try:
            data = self._log.read(number)
        except (TryAgain, Misconfigured, OSError) as error:
            # The slot is taken, perhaps by an earlier attempt of this very put.
            raise OutcomeUnknown(_fact(error)) from error
        return data is not None and decode(data, _name(self._log, number)).nonce == nonce

    def _numbers(self) -> Sequence[int]:
        return self._insist(self._log.numbers, "the records can't be listed")

    def _above_pauses(
        self, number: int, state: State, *, has_put: bool = False
    ) -> tuple[int, State]:
        """
        The number of the newest record, and `state` with its pause, where all records above
        `number` pause or resume this driver; else `Fenced`. Ends with a listing that shows no
        record above.
        """
        try:
            while (newest := max(numbers := self._numbers(), default=0)) > number:
                for above in range(number + 1, newest + 1):
                    state = replace(state, pause=self._pause_in(above, state))
                number = newest
        except (TryAgain, Misconfigured) as error:
            if not has_put:
                raise
            raise OutcomeUnknown(error.message, _UNKNOWN) from error
        self.records = len(numbers)
        if self._number and self._number not in numbers:
            raise InvariantBroken(
                f"{self.place}: record {self._number}, which this driver goes on from, is gone: "
                "the log was moved or removed while the driver was at work",
                "leave this driver stopped; start where the log is now, or put it back",
            )
        return number, state

    def _pause_in(self, number: int, mine: State) -> Pause | None:
        """
        What a record above this driver's own says of the pause; `Fenced` where it says more, or
        pauses another driver: its claim was in a slot that was emptied since, which this driver may
        then have filled.
        """
        found = self._insist(partial(_read, self._log, number), f"record {number} can't be read")
        if found is None or found.record.kind not in _PAUSES:
            raise self._fenced(f"record {number} was written by another driver")
        if found.record.state.claims != mine.claims:
            raise self._fenced(f"record {number} is about another driver")
        return found.record.state.pause

    def _fenced(self, fact: str) -> Fenced:
        return Fenced(
            f"{self.place}: {fact}: another driver has taken this pipeline over",
            "leave this driver stopped; the newer one finishes what is decided",
        )

    def _insist(self, ask: Callable[[], T], failure: str, *, has_effect: bool = False) -> T:
        """
        Repeat a request that may be repeated until it is answered or the time is up.

        An attempt that raises `TryAgain` had no effect, and none will come. Where that is true of
        all attempts, what is raised says so:

            put 7: no space left   put 7: no space left    TryAgain: no record 7, abort and stop
            put 7: reply lost      put 7: no space left    OutcomeUnknown: the first may be there
        """
        clock = self._environment.clock
        deadline = clock.monotonic() + self._limits.decide_retry_max_s
        waits = backoff(self._limits.retry_backoff_ms, self._environment.random)
        is_unknown, attempts = False, 0
        while True:
            try:
                return ask()
            except (*_TRANSIENT, Misconfigured) as error:
                attempts += 1
                if attempts == _ATTEMPTS_SILENT:
                    left = f"trying for {deadline - clock.monotonic():.0f} s more"
                    logger.warning("%s: %s; %s: %s", self.place, failure, left, _fact(error))
                is_unknown |= has_effect and not isinstance(error, TryAgain | Misconfigured)
                wait_s = next(waits)
                is_last = clock.monotonic() + wait_s > deadline
                if isinstance(error, Misconfigured) and not is_unknown:
                    raise
                if is_last or isinstance(error, Misconfigured):
                    raise self._gave_up(failure, error, is_unknown=is_unknown) from error
                clock.sleep(wait_s)

    def _gave_up(self, failure: str, error: Exception, *, is_unknown: bool) -> EpochalError:
        limit_s = self._limits.decide_retry_max_s
        if is_unknown:
            fact = f"no answer from the epoch log for {limit_s:.0f} s"
            return OutcomeUnknown(f"{self.place}: {fact}: {_fact(error)}", _UNKNOWN)
        hint = (
            getattr(error, "hint", "")
            or "check the address of the epoch log, and bring its storage back"
        )
        return TryAgain(
            f"{self.place}: {failure}, tried for {limit_s:.0f} s: {_fact(error)}",
            f"{hint}; then start again",
        )


# Reading a log without claiming it: for audits, reports and tools


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbered:
    """A record and its place in the sequence."""

    number: int
    record: Record


def read_state(log: EpochLog) -> State | None:
    """What the log holds now; None where nothing was written to it yet."""
    return Journal(log).peek()


def newest_record(
    log: EpochLog, read_list: Callable[[int, str], bytes] | None = None
) -> Numbered | None:
    """The newest record. Asks once: a log that does not answer raises at once."""
    for _ in range(_RACES_MAX):
        numbers = log.numbers()
        if not numbers:
            return None
        # Deleted between the listing and the read: then there is a newer one to list.
        found = _read(log, numbers[-1], read_list)
        if found is not None:
            return found
    raise InvariantBroken(f"{log.place}: records are listed that can't be read")


def kept_records(log: EpochLog, count: int | None = None) -> list[Numbered]:
    """
    The newest records that are kept for people, oldest first.

    Lists that only the older ones name are deleted: of those their sums are known, and to ask for
    the receipts raises `TryAgain`.
    """
    numbers = log.numbers()
    if count is not None:
        numbers = numbers[-count:]
    found = (_read(log, number) for number in numbers)
    return [one for one in found if one is not None]


def _read(
    log: EpochLog, number: int, read_list: Callable[[int, str], bytes] | None = None
) -> Numbered | None:
    data = log.read(number)
    if data is None:
        return None
    read = partial(read_list or partial(_read_list, log), number)
    return Numbered(number=number, record=decode(data, _name(log, number), read))


def _read_list(log: EpochLog, number: int, name: str) -> bytes:
    content = log.read_list(name)
    if content is not None:
        return content
    if max(log.numbers(), default=0) > number:
        raise TryAgain(
            f"{_name(log, number)}: the epoch is settled, and the list {name} of its receipts is "
            "deleted"
        )
    raise _gone(log, number, name)


def _gone(log: EpochLog, number: int, name: str) -> CorruptRecord:
    return CorruptRecord(
        f"{_name(log, number)} names the list {name} of receipts, which is gone",
        "restore the list from a backup of the log; without it the decided epoch can't be "
        "carried out",
    )


def _fact(error: Exception) -> str:
    return error.message if isinstance(error, EpochalError) else str(error)


def _name(log: EpochLog, number: int) -> str:
    return f"{log.place}, record {number}"
