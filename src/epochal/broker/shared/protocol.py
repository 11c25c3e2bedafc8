"""What a member does next: a pure function of its state and of what the store has answered.

`step(member, event)` returns the member's next state and actions. An action is a call to the store,
whose answer comes back as an event, or something that its owner does at once. One call is under way
at a time: two puts in flight would break the fence, as a late one could land above a claim.

The rules, each of which the simulation (`proof/shared_journal.py`) shows to be needed:

  1. Slot n + 1 is filled by a member that has slot n, with put-if-absent. An unknown outcome:
     the same bytes into the same slot again. Refused: the slot is read; these very bytes are ours.
  2. An answer leaves only once its tick is in its slots. A tick that only answers looks first: slot
     n is as the active wrote it, and n + 1 is empty. So no answer is older than a newer claim.
  3. A claim (generation + 1) in the next slot makes its writer the active, once a listing shows
     nothing above it: a slot that was deleted meanwhile is empty too. A claim voids the part of a
     tick before it whose last slot is missing. A member that reads a claim of its own life before
     is no active.
  4. The active that meets another's slot is fenced: it answers nobody, forgets what is not in
     slots, and is a standby again.
  5. A standby takes in slots and does nothing else: what a restart completes or expires belongs to
     the active, after its claim, and is written to slots.
  6. A snapshot is the state at a claim or at the last slot of a tick. Slots below the last but one
     snapshot are deleted, claims never: the slot that an old active fills next is a claim, or its
     own. So an empty slot n + 1 is the end of the journal only if no snapshot is above n.
  7. A large batch is kept outside of its slot, in an object that is written first and carries the
     number of the slot and the nonce of its writer. Objects go with the slots of their numbers, and
     never before: one that no slot names yet may be named by the put that is under way.
  8. Every slot has the checksum of the one before: a journal that lost its end, a slot that was
     replaced or a claim in a hole stop a member that knows better. It serves nobody then.

    active A    put 7 ✓   put 8 ✓                    put 9 → refused, another's: fenced
    standby B             take in 7, 8   claim 9 ✓   list: nothing above 9 → active   put 10 ✓
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeAlias

from epochal.broker.shared import slots
from epochal.broker.shared.slots import Kind, Slot
from epochal.errors import CorruptRecord, IllegalMove

CLOCK_OFF_MAX_MS = 10_000
"""An active whose clock differs by more from that of the store expires and deletes nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The last slot that was taken in, and what is known by it."""

    number: int = 0
    crc: int = 0
    generation: int = 0
    nonce: bytes = b""
    """Of the active: every tick of its generation has it."""
    holder: bytes = b""
    """The payload of its claim."""
    claims: tuple[int, ...] = ()
    """The slots of all claims so far: those are never deleted."""


class Waits(Enum):
    """The call that is under way."""

    NOTHING = "nothing"
    NEXT = "the next slot is read"
    FETCH = "batches of a tick that are kept outside of its slots are read"
    NEWEST = "the newest snapshot is asked for"
    LAST = "the last slot is read again, before the end is believed"
    SNAPSHOT = "a snapshot is loaded"
    CLAIM = "a claim is put"
    CLAIM_READ = "the slot of a refused claim is read"
    LIST = "the slots are listed after a claim"
    ABOVE = "the slot behind a claim is read"
    TICK = "a slot of a tick is put"
    TICK_READ = "the slot of a refused put is read"
    LOOK_LAST = "the active reads its last slot before it answers"
    LOOK_NEXT = "and the one behind it, which must be empty"
    STOPPED = "nothing, for good"


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeOver:
    """The active does not answer: claim. With what the claim says."""

    nonce: bytes
    payload: bytes
    time_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    payload_bytes_max: int
    """A larger tick takes several slots."""
    settled: Position = Position()
    """The state of the broker is as of here: a claim, or the last slot of a tick."""
    at: Position = Position()
    """The last slot taken in or filled: ahead of `settled` within a tick of several slots."""
    partial: tuple[bytes, ...] = ()
    """The payloads in between."""
    waits: Waits = Waits.NOTHING
    is_active: bool = False
    wish: TakeOver | None = None
    is_thorough: bool = False
    """Whether the end, once reached, is to be proven."""
    doubt: str = ""
    """Why a newer snapshot must be there: otherwise the member stops for this reason."""
    rest: tuple[bytes, ...] = ()
    """What is still to be put of the tick under way, a payload for each slot."""
    time_ms: int = 0
    """Of the tick under way."""
    data: bytes = b""
    """The slot that is being put."""


# Events


@dataclass(frozen=True, slots=True)
class Wake:
    """A standby looks for news. Thorough: and proves that it has reached the end."""

    is_thorough: bool


@dataclass(frozen=True, slots=True)
class Tick:
    """The active has decided a tick. Without a payload it only answers."""

    payload: bytes
    time_ms: int


@dataclass(frozen=True, slots=True)
class Found:
    """The answer to `Read`."""

    data: bytes | None


@dataclass(frozen=True, slots=True)
class Fetched:
    """The answer to `Fetch`; None: a batch was deleted meanwhile, as there is a newer snapshot."""

    payload: bytes | None


@dataclass(frozen=True, slots=True)
class Stored:
    """The answer to `Put`: this call filled the slot, another did, or None: unknown."""

    is_won: bool | None


@dataclass(frozen=True, slots=True)
class Listed:
    """The answer to `List`."""

    highest: int
    """The highest number of all slots from the claim on."""
    stored_ms: int
    """When the claim was stored, by the clock of the store."""
    now_ms: int
    """By the clock of the member."""


@dataclass(frozen=True, slots=True)
class Newest:
    """The answer to `AskNewest`: the number of the newest snapshot, 0 without any."""

    number: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """The answer to `Load`; None: it was deleted meanwhile, as there is a newer one."""

    position: Position | None


Event: TypeAlias = Wake | TakeOver | Tick | Found | Fetched | Stored | Listed | Newest | Loaded


# Actions


@dataclass(frozen=True, slots=True)
class Read:
    number: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """The payload of a tick with every batch in it, wherever that is kept."""

    payload: bytes


@dataclass(frozen=True, slots=True)
class Put:
    number: int
    data: bytes


@dataclass(frozen=True, slots=True)
class List:
    """The highest number of all slots from this one on, and the time of this one."""

    number: int


@dataclass(frozen=True, slots=True)
class AskNewest:
    pass


@dataclass(frozen=True, slots=True)
class Load:
    """Replace the whole state by this snapshot."""

    number: int


@dataclass(frozen=True, slots=True)
class Apply:
    """Take a tick in, or a claim (no payload), and keep both with the position, all or nothing."""

    payload: bytes
    position: Position


@dataclass(frozen=True, slots=True)
class EndSeen:
    """The state was that of the whole journal at some moment since the `Wake`."""


@dataclass(frozen=True, slots=True)
class Serve:
    """This member is the active. What a restart completes is its first tick."""

    position: Position
    is_clock_right: bool


@dataclass(frozen=True, slots=True)
class Durable:
    """The tick is in the journal, or was allowed to answer: keep it locally, then answer."""

    position: Position


@dataclass(frozen=True, slots=True)
class Fenced:
    """Answer nobody, drop all that is not settled, and be a standby at this position."""

    position: Position


@dataclass(frozen=True, slots=True)
class Stop:
    """Serve nobody any more: a person must look."""

    reason: str


Action: TypeAlias = (
    Read | Fetch | Put | List | AskNewest | Load | Apply | EndSeen | Serve | Durable | Fenced | Stop
)
Result: TypeAlias = tuple[Member, Sequence[Action]]


def step(member: Member, event: Event) -> Result:
    handler = _STEPS.get((member.waits, type(event)))
    if handler is None:
        raise IllegalMove(f"{type(event).__name__} while {member.waits.value}")
    return handler(member, event)


# A standby


def _wake(member: Member, event: Wake) -> Result:
    _require_standby(member)
    return _read_next(replace(member, is_thorough=event.is_thorough))


def _take_over(member: Member, event: TakeOver) -> Result:
    _require_standby(member)
    return _read_next(replace(member, wish=event, is_thorough=True))


def _require_standby(member: Member) -> None:
    if member.is_active:
        raise IllegalMove("the active has nothing to take in")


def _read_next(member: Member, *before: Action) -> Result:
    return replace(member, waits=Waits.NEXT), (*before, Read(member.at.number + 1))


def _next_found(member: Member, event: Found) -> Result:
    if event.data is not None:
        return _take_in(member, event.data)
    if not member.is_thorough:
        return replace(member, waits=Waits.NOTHING), ()
    return _ask_newest(member)


def _take_in(member: Member, data: bytes) -> Result:
    number = member.at.number + 1
    try:
        slot = slots.decode(number, data)
    except CorruptRecord as error:
        return _stop(member, error.message)
    breach = _breach(member.at, slot)
    if breach:
        return _ask_newest(replace(member, doubt=f"slot {number} {breach}"))
    at = _after(member.at, slot, slots.crc_of(data))
    if slot.kind is Kind.CLAIM:
        # Somebody else is the active: whether that one answers is asked first.
        taken = replace(member, at=at, settled=at, partial=_voided(member.partial), wish=None)
        return _read_next(taken, Apply(b"", at))
    payloads = (*member.partial, slot.payload)
    if not slot.is_last:
        return _read_next(replace(member, at=at, partial=payloads))
    whole = b"".join(payloads)
    return replace(member, at=at, partial=(whole,), waits=Waits.FETCH), (Fetch(whole),)


def _fetched(member: Member, event: Fetched) -> Result:
    at = member.at
    if event.payload is None:
        return _ask_newest(replace(member, doubt=f"a batch of slot {at.number} is gone"))
    return _read_next(replace(member, settled=at, partial=()), Apply(event.payload, at))


def _voided(_: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """What a claim leaves of a tick whose last slot is missing: it was never answered (rule 3)."""
    return ()


def _breach(at: Position, slot: Slot) -> str:
    """What is wrong with the slot behind this position, if anything."""
    if slot.crc_before != at.crc:
        return f"does not follow slot {at.number} as this member knows it"
    if slot.kind is Kind.CLAIM:
        is_next = slot.generation == at.generation + 1
        return "" if is_next else f"claims generation {slot.generation} after {at.generation}"
    is_of_the_active = slot.generation == at.generation and slot.nonce == at.nonce
    return "" if is_of_the_active else "is of nobody who was the active"


def _after(at: Position, slot: Slot, crc: int) -> Position:
    if slot.kind is Kind.TICK:
        return replace(at, number=slot.number, crc=crc)
    return Position(
        number=slot.number,
        crc=crc,
        generation=slot.generation,
        nonce=slot.nonce,
        holder=slot.payload,
        claims=(*at.claims, slot.number),
    )


def _ask_newest(member: Member) -> Result:
    return replace(member, waits=Waits.NEWEST), (AskNewest(),)


def _newest(member: Member, event: Newest) -> Result:
    if event.number > member.settled.number:
        return replace(member, waits=Waits.SNAPSHOT, wish=None), (Load(event.number),)
    if member.doubt:
        return _stop(member, member.doubt)
    if not member.at.number:
        return _at_end(member)
    return replace(member, waits=Waits.LAST), (Read(member.at.number),)


def _loaded(member: Member, event: Loaded) -> Result:
    if event.position is None:
        return _ask_newest(member)
    at = event.position
    return _read_next(replace(member, at=at, settled=at, partial=(), doubt="", is_thorough=True))


def _last_found(member: Member, event: Found) -> Result:
    if event.data is not None and slots.crc_of(event.data) == member.at.crc:
        return _at_end(member)
    state = "is gone" if event.data is None else "has been replaced"
    return _ask_newest(replace(member, doubt=_lost_end(member.at.number, state)))


def _lost_end(number: int, state: str) -> str:
    return f"slot {number} was there and {state}, and slot {number + 1} is empty"


def _at_end(member: Member) -> Result:
    wish = member.wish
    if wish is None:
        return replace(member, waits=Waits.NOTHING), (EndSeen(),)
    slot = Slot(
        kind=Kind.CLAIM,
        number=member.at.number + 1,
        generation=member.at.generation + 1,
        nonce=wish.nonce,
        time_ms=wish.time_ms,
        crc_before=member.at.crc,
        payload=wish.payload,
    )
    data = slot.encode()
    return replace(member, waits=Waits.CLAIM, data=data), (EndSeen(), Put(slot.number, data))


# A claim


def _claim_stored(member: Member, event: Stored) -> Result:
    number = member.at.number + 1
    if event.is_won is None:
        return member, (Put(number, member.data),)
    if event.is_won:
        return _claimed(member)
    return replace(member, waits=Waits.CLAIM_READ), (Read(number),)


def _claim_read(member: Member, event: Found) -> Result:
    if event.data == member.data:
        return _claimed(member)
    return _read_next(replace(member, wish=None))


def _claimed(member: Member) -> Result:
    return replace(member, waits=Waits.LIST), (List(member.at.number + 1),)


def _listed(member: Member, event: Listed) -> Result:
    number = member.at.number + 1
    if event.highest > number:
        reason = f"slot {number} was empty, and slot {event.highest} is not: there is a gap"
        above = replace(member, waits=Waits.ABOVE, doubt=reason)
        return above, (Read(number + 1),)
    wish = member.wish
    if wish is None:
        raise IllegalMove("a claim that nobody wished for")
    at = _claim_position(member)
    active = replace(
        member,
        at=at,
        settled=at,
        partial=_voided(member.partial),
        is_active=True,
        wish=None,
        waits=Waits.NOTHING,
        data=b"",
    )
    is_right = is_clock_right(wish.time_ms, event.stored_ms, event.now_ms)
    return active, (Apply(b"", at), Serve(at, is_right))


def _claim_position(member: Member) -> Position:
    slot = slots.decode(member.at.number + 1, member.data)
    return _after(member.at, slot, slots.crc_of(member.data))


def _above_found(member: Member, event: Found) -> Result:
    """A slot behind the claim: another claimed after it, or the claim is in a hole."""
    at = _claim_position(member)
    try:
        is_follower = (
            event.data is not None and slots.decode(at.number + 1, event.data).crc_before == at.crc
        )
    except CorruptRecord as error:
        return _stop(member, error.message)
    if not is_follower:
        return _ask_newest(replace(member, wish=None))
    taken = replace(member, at=at, settled=at, partial=_voided(member.partial), wish=None, doubt="")
    return _read_next(taken, Apply(b"", at))


def is_clock_right(before_ms: int, stored_ms: int, after_ms: int) -> bool:
    """
    Whether the store's clock, when it stored the claim, shows what this member's did. A member
    that slept in between can't know: the sleep may be as long as its clock is off.
    """
    is_awake = after_ms - before_ms <= CLOCK_OFF_MAX_MS
    return is_awake and abs(before_ms - stored_ms) <= CLOCK_OFF_MAX_MS


# The active


def _tick(member: Member, event: Tick) -> Result:
    if not member.is_active:
        raise IllegalMove("a tick of a member that is not the active")
    if not event.payload:
        return _look(member)
    size = member.payload_bytes_max
    rest = tuple(event.payload[at : at + size] for at in range(0, len(event.payload), size))
    return _put_next(replace(member, rest=rest, time_ms=event.time_ms))


def _put_next(member: Member) -> Result:
    at = member.at
    slot = Slot(
        kind=Kind.TICK,
        number=at.number + 1,
        generation=at.generation,
        nonce=at.nonce,
        time_ms=member.time_ms,
        crc_before=at.crc,
        payload=member.rest[0],
        is_last=len(member.rest) == 1,
    )
    data = slot.encode()
    return replace(member, waits=Waits.TICK, data=data), (Put(slot.number, data),)


def _tick_stored(member: Member, event: Stored) -> Result:
    number = member.at.number + 1
    if event.is_won is None:
        return member, (Put(number, member.data),)
    if event.is_won:
        return _advanced(member)
    return replace(member, waits=Waits.TICK_READ), (Read(number),)


def _tick_read(member: Member, event: Found) -> Result:
    return _advanced(member) if event.data == member.data else _fenced(member)


def _advanced(member: Member) -> Result:
    number = member.at.number + 1
    at = replace(member.at, number=number, crc=slots.crc_of(member.data))
    moved = replace(member, at=at, rest=member.rest[1:])
    if moved.rest:
        return _put_next(moved)
    return replace(moved, settled=at, waits=Waits.NOTHING, data=b""), (Durable(at),)


def _look(member: Member) -> Result:
    return replace(member, waits=Waits.LOOK_LAST, doubt=""), (Read(member.at.number),)


def _look_last(member: Member, event: Found) -> Result:
    number = member.at.number
    if event.data is None:
        # Deleted under a later snapshot, or lost: the next slot decides.
        member = replace(member, doubt=_lost_end(number, "is gone"))
    elif slots.crc_of(event.data) != member.at.crc:
        return _stop(member, f"slot {number} was there and has been replaced")
    return replace(member, waits=Waits.LOOK_NEXT), (Read(number + 1),)


def _look_next(member: Member, event: Found) -> Result:
    if event.data is not None:
        return _fenced(replace(member, doubt=""))
    if member.doubt:
        return _stop(member, member.doubt)
    return replace(member, waits=Waits.NOTHING), (Durable(member.settled),)


def _fenced(member: Member) -> Result:
    at = member.settled
    standby = Member(payload_bytes_max=member.payload_bytes_max, settled=at, at=at)
    return standby, (Fenced(at),)


def _stop(member: Member, reason: str) -> Result:
    return replace(member, waits=Waits.STOPPED, is_active=False), (Stop(reason),)


_STEPS: dict[tuple[Waits, type[Event]], Callable[..., Result]] = {
    (Waits.NOTHING, Wake): _wake,
    (Waits.NOTHING, TakeOver): _take_over,
    (Waits.NOTHING, Tick): _tick,
    (Waits.NEXT, Found): _next_found,
    (Waits.FETCH, Fetched): _fetched,
    (Waits.NEWEST, Newest): _newest,
    (Waits.SNAPSHOT, Loaded): _loaded,
    (Waits.LAST, Found): _last_found,
    (Waits.CLAIM, Stored): _claim_stored,
    (Waits.CLAIM_READ, Found): _claim_read,
    (Waits.LIST, Listed): _listed,
    (Waits.ABOVE, Found): _above_found,
    (Waits.TICK, Stored): _tick_stored,
    (Waits.TICK_READ, Found): _tick_read,
    (Waits.LOOK_LAST, Found): _look_last,
    (Waits.LOOK_NEXT, Found): _look_next,
}


# Deletion


def deletable(numbers: Iterable[int], kept: Sequence[Position]) -> list[int]:
    """
    Which slots may go, by the two newest snapshots, the older one first (rule 6).

    Both know all claims up to their own slot, and so all claims below the older.
    """
    if len(kept) < 2:
        return []
    claims = set(kept[-1].claims)
    return [number for number in numbers if number < kept[-2].number and number not in claims]
