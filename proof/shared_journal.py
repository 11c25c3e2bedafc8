"""
A seeded simulation of a broker's shared journal: `python -m proof.shared_journal --seeds 20000`.

Three members run the protocol as it is shipped (`epochal.broker.shared.protocol`); the store, the
machines and the clients are simulated. The seed chooses which call is carried out, whether its
answer is lost, whether a put lands much later, which values are kept outside of their slots, who is
killed, loses the end of its disk, sleeps, claims although the active is well, writes snapshots and
deletes slots, and whose clock is wrong.
In some runs the store itself loses its last slots, as an asynchronous replica does that takes over.

Clients write values and read all of them. The judge objects where
- an answer lacks anything that an earlier answer had, acknowledged writes included;
- a value is there twice, or a part of a tick without the rest;
- a standby believes to be at the end and lacks what was answered before it looked;
- a value is expired that is not old, or appears although its client was told that it was not taken;
- a member stops although the store has lost nothing;
- members differ at rest, from each other or from a new one that has only the store.
A store that has lost its end must be noticed: the members that go on agree with each other.

`--control NAME` breaks one rule on purpose: the judge must object.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from epochal.broker.shared import protocol
from epochal.broker.shared.protocol import (
    Action,
    Apply,
    AskNewest,
    Durable,
    EndSeen,
    Event,
    Fenced,
    Fetch,
    Fetched,
    Found,
    List,
    Listed,
    Load,
    Loaded,
    Member,
    Newest,
    Position,
    Put,
    Read,
    Serve,
    Stop,
    Stored,
    TakeOver,
    Tick,
    Waits,
    Wake,
)


class Breach(Exception):
    """A promise that is broken."""


_STEPS = 500
_CALM_STEPS = 4_000
_ENTRY_BYTES = 16
_STEP_MS = 1_000
_RETENTION_MS = 60_000
_WRITE, _MARKER, _EXPIRE = "w", "m", "x"
_OUTSIDE = "o"
"""In a slot, for a value that is in an object outside of it."""

Values = tuple[str, ...]


def _entry(kind: str, number: int, piece: int = 0, of: int = 1) -> str:
    return f"{kind}{number:011d}{piece:02d}{of:02d}"


def _decoded(payload: bytes) -> Values:
    text = payload.decode()
    return tuple(text[at : at + _ENTRY_BYTES] for at in range(0, len(text), _ENTRY_BYTES))


@dataclass(eq=False)
class Op:
    """A request of a client: it writes values, or only reads."""

    values: Values
    floor: int
    """How much of what was answered before must be in the answer."""


@dataclass(frozen=True, slots=True)
class PutOutside:
    """The active writes an object before the slots that name it."""

    number: int
    """Of the request whose values are in it."""
    slot: int
    tick: Tick


@dataclass(eq=False)
class Call:
    action: Action | PutOutside
    event: Event | None = None
    """The answer, once it is carried out."""
    values: Values = ()
    """Of a snapshot that is loaded."""


@dataclass
class Log:
    """The store."""

    slots: dict[int, bytes] = field(default_factory=dict)
    times: dict[int, int] = field(default_factory=dict)
    snapshots: dict[int, tuple[Position, Values]] = field(default_factory=dict)
    objects: dict[int, int] = field(default_factory=dict)
    """Requests whose values are outside of the slots → the first slot of their tick."""

    def put(self, number: int, data: bytes, now_ms: int) -> bool:
        if number in self.slots:
            return False
        self.slots[number] = data
        self.times[number] = now_ms
        return True


@dataclass(eq=False)
class Peer:
    name: str
    clock_off_ms: int
    member: Member = Member(payload_bytes_max=_ENTRY_BYTES)
    values: Values = ()
    disk: list[tuple[Position, Values]] = field(default_factory=lambda: [(Position(), ())])
    call: Call | None = None
    op: Op | None = None
    jobs: list[Iterator[None]] = field(default_factory=list)
    is_alive: bool = True
    asleep_until: int = 0
    floor: int = 0
    """What was answered when it began to look for the end."""
    is_clock_right: bool = True
    stopped: str = ""
    owes_marker: bool = False

    @property
    def is_serving(self) -> bool:
        return self.member.is_active and not self.owes_marker


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """Rules of members' owners that a control switches off; those of `protocol` are patched."""

    answers_first: bool = False
    unknown_is_refused: bool = False
    writes_by_itself: bool = False
    trusts_old_claim: bool = False
    snapshot_in_tick: bool = False
    no_list: bool = False
    expires_with_any_clock: bool = False
    sweeps_orphans: bool = False


class Simulation:
    def __init__(self, seed: int, broken: Broken = Broken(), *, keeps_trace: bool = False) -> None:
        self._chance = random.Random(seed)
        self._broken = broken
        self.trace: list[str] | None = [] if keeps_trace else None
        chance = self._chance
        self.log = Log()
        self._lose_answer = chance.choice((0.0, 0.05, 0.2))
        self._ghost = chance.choice((0.0, 0.05, 0.2))
        self._kill = chance.choice((0.0, 0.01, 0.03))
        self._sleep = chance.choice((0.0, 0.01, 0.04))
        self._claim = chance.choice((0.0, 0.01, 0.05))
        self._snapshot = chance.choice((0.0, 0.05, 0.2))
        self._power_cut = chance.choice((0.0, 0.5))
        self._slept: tuple[int, ...] = (5, 40, 200)
        if chance.random() < 0.4:
            # Sleepers wake up in a journal whose older slots are deleted.
            self._snapshot, self._sleep, self._slept = 0.5, 0.03, (20, 200)
            self._claim = max(self._claim, 0.03)
        self._loses_end_at = chance.randrange(_STEPS) if chance.random() < 0.1 else -1
        offs = (0, 0, 0, 5_000, -5_000, 200_000, -200_000)
        self.peers = [Peer(name, chance.choice(offs)) for name in "ABC"]
        self.now = 0
        self._ghosts: list[Put] = []
        self._answered: Values = ()
        """The longest answer so far: all others are its beginnings."""
        self._written_ms: dict[int, int] = {}
        self._refused: set[int] = set()
        self._expired_early: set[int] = set()
        self._numbers = iter(range(1, 1 << 30))
        self._nonces = iter(range(1, 1 << 30))
        self._is_calm = False
        self.has_lost_end = False

    # The run

    def run(self) -> None:
        for self.now in range(_STEPS):
            if self.now == self._loses_end_at:
                self._lose_end()
            self._step()
        self._come_to_rest()
        self._judge_rest()

    def _note(self, text: str) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.now}: {text}")

    def _happens(self, chance: float) -> bool:
        return not self._is_calm and self._chance.random() < chance

    def _step(self) -> None:
        if self._ghosts and self._chance.random() < 0.1:
            ghost = self._ghosts.pop(self._chance.randrange(len(self._ghosts)))
            landed = self.log.put(ghost.number, ghost.data, self._now_ms)
            self._note(f"late put of {ghost.number}: {landed}")
        peer = self._chance.choice(self.peers)
        if not peer.is_alive:
            if self._chance.random() < 0.2:
                self._start(peer)
            return
        if peer.stopped:
            return
        if peer.asleep_until > self.now:
            return
        if self._happens(self._kill):
            self._kill_one(peer)
        elif self._happens(self._sleep):
            peer.asleep_until = self.now + self._chance.choice(self._slept)
            self._note(f"{peer.name} sleeps")
        else:
            self._go_on(peer)

    @property
    def _now_ms(self) -> int:
        return self.now * _STEP_MS

    def _go_on(self, peer: Peer) -> None:
        if peer.jobs and self._chance.random() < 0.5:
            try:
                next(peer.jobs[0])
            except StopIteration:
                del peer.jobs[0]
            return
        if peer.call is not None:
            self._carry_on(peer, peer.call)
            return
        if self._happens(self._snapshot) and not peer.jobs:
            self._begin_snapshot(peer)
        elif peer.member.is_active:
            self._serve(peer)
        else:
            self._stand_by(peer)

    def _stand_by(self, peer: Peer) -> None:
        is_headless = not any(
            one.is_alive and one.member.is_active and not one.stopped for one in self.peers
        )
        peer.floor = len(self._answered)
        if self._happens(self._claim) or (is_headless and self._chance.random() < 0.3):
            self._claim_with(peer)
        else:
            is_thorough = self._chance.random() < 0.5
            self._feed(peer, Wake(is_thorough))

    def _claim_with(self, peer: Peer) -> None:
        nonce = next(self._nonces).to_bytes(16, "big")
        time_ms = self._now_ms + peer.clock_off_ms
        self._feed(peer, TakeOver(nonce=nonce, payload=peer.name.encode(), time_ms=time_ms))

    def _serve(self, peer: Peer) -> None:
        floor = len(self._answered)
        number = next(self._numbers)
        values: Values = ()
        if peer.owes_marker:
            values = (_entry(_MARKER, number),)
        elif self._happens(0.1):
            values = tuple(self._expired(peer))
        elif self._chance.random() < 0.6:
            of = self._chance.choice((1, 1, 2, 3))
            values = tuple(_entry(_WRITE, number, piece, of) for piece in range(of))
            self._written_ms[number] = self._now_ms
        peer.op = Op(values, floor)
        peer.values += values
        if self._broken.answers_first:
            self._answer(peer, peer.op)
        time_ms = self._now_ms + peer.clock_off_ms
        if values and values[0][0] == _WRITE and self._chance.random() < 0.3:
            shown = "".join(_OUTSIDE + value[1:] for value in values)
            tick = Tick(shown.encode(), time_ms)
            peer.call = Call(PutOutside(number, peer.member.at.number + 1, tick))
        else:
            self._feed(peer, Tick("".join(values).encode(), time_ms))

    def _expired(self, peer: Peer) -> Iterator[str]:
        """One value that is old by the clock of the active."""
        if not peer.is_clock_right and not self._broken.expires_with_any_clock:
            return
        by_clock_ms = self._now_ms + peer.clock_off_ms
        gone = {value[1:12] for value in peer.values if value[0] == _EXPIRE}
        for value in peer.values:
            number = int(value[1:12])
            is_old = self._written_ms.get(number, by_clock_ms) < by_clock_ms - _RETENTION_MS
            if value[0] == _WRITE and is_old and value[1:12] not in gone:
                age_ms = self._now_ms - self._written_ms[number]
                if age_ms < _RETENTION_MS - protocol.CLOCK_OFF_MAX_MS:
                    self._expired_early.add(number)
                yield _entry(_EXPIRE, number)
                return

    # The protocol

    def _feed(self, peer: Peer, event: Event) -> None:
        peer.member, actions = protocol.step(peer.member, event)
        for action in actions:
            self._act(peer, action)

    def _act(self, peer: Peer, action: Action) -> None:
        self._note(f"{peer.name} {action}")
        match action:
            case Apply():
                peer.values += _decoded(action.payload)
                peer.disk.append((action.position, peer.values))
            case EndSeen():
                self._require_answered(peer, peer.floor, "a standby at the end")
            case Serve():
                peer.owes_marker = True
                peer.is_clock_right = action.is_clock_right
            case Durable():
                self._durable(peer, action)
            case Fenced():
                peer.op = None
                peer.values = peer.disk[-1][1]
            case Stop():
                peer.stopped = action.reason
            case _:
                peer.call = Call(action)

    def _durable(self, peer: Peer, action: Durable) -> None:
        op, peer.op = peer.op, None
        peer.disk.append((action.position, peer.values))
        if peer.owes_marker:
            peer.owes_marker = False
        elif op is not None:
            self._answer(peer, op)

    def _answer(self, peer: Peer, op: Op) -> None:
        self._require_answered(peer, op.floor, "an answer")
        if len(peer.values) > len(self._answered):
            self._answered = peer.values

    def _require_answered(self, peer: Peer, floor: int, what: str) -> None:
        if self.has_lost_end:
            return
        if peer.values[:floor] != self._answered[:floor]:
            raise Breach(f"{what} of {peer.name} lacks what was answered before")
        shared = min(len(peer.values), len(self._answered))
        if what == "an answer" and peer.values[:shared] != self._answered[:shared]:
            raise Breach(f"{what} of {peer.name} differs from another")

    # Calls

    def _carry_on(self, peer: Peer, call: Call) -> None:
        if call.event is None:
            if peer.member.waits is Waits.CLAIM and self._happens(10 * self._sleep):
                peer.asleep_until = self.now + self._chance.choice(self._slept)
                return  # the slot that it found empty may be filled, and deleted, meanwhile
            if self._happens(0.1):
                return  # an error that says that nothing was done: the same call again
            if isinstance(call.action, Put) and self._happens(self._ghost):
                self._ghosts.append(call.action)
                call.event = Stored(None)
            elif isinstance(call.action, PutOutside):
                self.log.objects[call.action.number] = call.action.slot
                call.event = call.action.tick
            else:
                call.event = self._carried_out(call)
                if isinstance(call.action, Put) and self._happens(self._lose_answer):
                    call.event = Stored(None)
            if not self._is_calm and self._chance.random() < 0.5:
                return  # the answer is on its way
        peer.call = None
        self._note(f"{peer.name} ← {call.event}")
        if isinstance(call.event, Loaded) and call.event.position is not None:
            peer.values = call.values
            peer.disk.append((call.event.position, peer.values))
        if isinstance(call.event, Listed):
            call.event = replace(call.event, now_ms=self._now_ms + peer.clock_off_ms)
        if self._broken.unknown_is_refused and call.event == Stored(None):
            self._give_up(peer, call)
        else:
            self._feed(peer, call.event)

    def _give_up(self, peer: Peer, call: Call) -> None:
        """The control: the tick is taken back, and its client told that it was not taken."""
        if not peer.member.is_active or peer.op is None or peer.owes_marker:
            peer.call = Call(call.action)
            return
        self._refused |= {int(value[1:12]) for value in peer.op.values if value[0] == _WRITE}
        peer.op = None
        peer.values = peer.disk[-1][1]
        settled = peer.member.settled
        peer.member = replace(peer.member, waits=Waits.NOTHING, rest=(), at=settled)

    def _carried_out(self, call: Call) -> Event:
        log, action = self.log, call.action
        match action:
            case Fetch():
                return Fetched(self._fetched(action.payload))
            case Read():
                return Found(log.slots.get(action.number))
            case Put():
                return Stored(log.put(action.number, action.data, self._now_ms))
            case List():
                highest = action.number if self._broken.no_list else max(log.slots, default=0)
                return Listed(highest, log.times.get(action.number, 0), 0)
            case AskNewest():
                return Newest(max(log.snapshots, default=0))
            case Load():
                found = log.snapshots.get(action.number)
                call.values = () if found is None else found[1]
                return Loaded(None if found is None else found[0])
            case _:
                raise Breach(f"{action} is no call")

    def _fetched(self, payload: bytes) -> bytes | None:
        values = _decoded(payload)
        if any(one[0] == _OUTSIDE and int(one[1:12]) not in self.log.objects for one in values):
            return None
        return "".join(_WRITE + one[1:] if one[0] == _OUTSIDE else one for one in values).encode()

    # Snapshots

    def _begin_snapshot(self, peer: Peer) -> None:
        if peer.op is not None or not peer.member.settled.number:
            return
        if self._broken.snapshot_in_tick:
            values = peer.values + _decoded(b"".join(peer.member.partial))
            peer.jobs.append(self._write_snapshot(peer.member.at, values))
        else:
            peer.jobs.append(self._write_snapshot(peer.member.settled, peer.values))

    def _write_snapshot(self, position: Position, values: Values) -> Iterator[None]:
        yield
        self.log.snapshots.setdefault(position.number, (position, values))
        self._note(f"snapshot {position.number}")
        yield
        newest = sorted(self.log.snapshots)[-2:]
        kept = [self.log.snapshots[number][0] for number in newest]
        listed = sorted(self.log.slots)
        for number in sorted(self.log.snapshots)[:-2]:
            yield
            self.log.snapshots.pop(number, None)
        gone = protocol.deletable(listed, kept)
        self._chance.shuffle(gone)
        while gone:
            yield
            for number in gone[:5]:
                self.log.slots.pop(number, None)
            self._note(f"deleted {gone[:5]}")
            del gone[:5]
        if len(kept) == 2:
            yield
            self._delete_objects(lambda slot: slot < kept[0].number)
        if self._broken.sweeps_orphans:
            self._delete_objects(lambda slot: slot not in self.log.slots)

    def _delete_objects(self, is_gone: Callable[[int], bool]) -> None:
        objects = self.log.objects
        self.log.objects = {one: slot for one, slot in objects.items() if not is_gone(slot)}

    # Trouble

    def _kill_one(self, peer: Peer) -> None:
        self._note(f"{peer.name} is killed")
        call = peer.call
        is_sent = call is not None and call.event is None and self._chance.random() < 0.5
        if is_sent and call is not None and isinstance(call.action, Put):
            self._ghosts.append(call.action)
        peer.is_alive = False
        peer.call = peer.op = None
        peer.jobs.clear()
        if self._happens(self._power_cut):
            del peer.disk[max(1, len(peer.disk) - self._chance.randrange(6)) :]
        peer.disk = peer.disk[-6:]

    def _start(self, peer: Peer) -> None:
        at, peer.values = peer.disk[-1]
        is_old_active = self._broken.trusts_old_claim and at.holder == peer.name.encode()
        if self._broken.writes_by_itself and at.number:
            peer.values += (_entry(_MARKER, next(self._numbers)),)
            peer.disk.append((at, peer.values))
        peer.member = Member(
            payload_bytes_max=_ENTRY_BYTES, settled=at, at=at, is_active=is_old_active
        )
        peer.is_alive = True
        peer.owes_marker = False
        peer.asleep_until = 0
        self._note(f"{peer.name} starts at {at.number}")

    def _lose_end(self) -> None:
        floor = max(self.log.snapshots, default=0)
        lost = [number for number in sorted(self.log.slots) if number > floor][-2:]
        lost = lost[-self._chance.choice((1, 2)) :]
        for number in lost:
            del self.log.slots[number]
        if lost:
            self.has_lost_end = True
            self._ghosts.clear()
            self._note(f"the store loses {lost}")

    # At rest

    def _come_to_rest(self) -> None:
        self._is_calm = True
        while self._ghosts:
            ghost = self._ghosts.pop()
            self.log.put(ghost.number, ghost.data, self._now_ms)
        for peer in self.peers:
            if not peer.is_alive:
                self._start(peer)
            peer.asleep_until = 0
        for peer in self.peers:
            self._settle(peer)
        for peer in self.peers:
            # Everyone takes over once: what a member has missed shows at the latest then.
            self._settle(peer)
            self._make_active(peer)
            if peer.member.is_active:
                self._serve(peer)
                self._settle(peer)
        for peer in self.peers:
            if peer.member.is_active:
                peer.op = Op((), len(self._answered))
                self._feed(peer, Tick(b"", self._now_ms))
            self._settle(peer)
        for peer in self.peers:
            if not peer.member.is_active and not peer.stopped:
                peer.floor = len(self._answered)
                self._feed(peer, Wake(is_thorough=True))
                self._settle(peer)

    def _make_active(self, peer: Peer) -> None:
        """A claim of another that it meets on its way ends its wish: then once more."""
        while not peer.stopped and not peer.member.is_active:
            peer.floor = len(self._answered)
            self._claim_with(peer)
            self._settle(peer)

    def _settle(self, peer: Peer) -> None:
        for _ in range(_CALM_STEPS):
            self.now += 1
            if peer.stopped:
                return
            if peer.jobs:
                for _ in peer.jobs.pop(0):
                    pass
            elif peer.call is not None:
                self._carry_on(peer, peer.call)
            else:
                return
        raise Breach(f"{peer.name} does not come to rest")

    def _judge_rest(self) -> None:
        new = Peer("N", 0)
        self.peers.append(new)
        new.floor = len(self._answered)
        self._feed(new, Wake(is_thorough=True))
        self._settle(new)
        if not self.has_lost_end:
            for peer in self.peers:
                if peer.stopped:
                    raise Breach(f"{peer.name} stopped: {peer.stopped}")
        running = [peer for peer in self.peers if not peer.stopped]
        if self.has_lost_end:
            # Some may stand before a gap: their claims show it.
            for peer in running:
                self._make_active(peer)
            for peer in running:
                while not peer.stopped:
                    is_active = peer.member.is_active
                    self._feed(peer, Tick(b"", self._now_ms) if is_active else Wake(True))
                    self._settle(peer)
                    if is_active == peer.member.is_active:
                        break
            running = [peer for peer in running if not peer.stopped]
        for peer in running:
            if peer.values != running[0].values:
                raise Breach(f"{peer.name} and {running[0].name} differ at rest")
        if running:
            self._judge_values(running[0].values)

    def _judge_values(self, values: Values) -> None:
        if not self.has_lost_end and values[: len(self._answered)] != self._answered:
            raise Breach("an answered value is lost")
        if len(set(values)) != len(values):
            raise Breach("a value is there twice")
        at = 0
        while at < len(values):
            kind, piece, of = values[at][0], int(values[at][12:14]), int(values[at][14:16])
            whole = values[at : at + of]
            if piece or [int(one[12:14]) for one in whole] != list(range(of)):
                raise Breach(f"a part of a tick: {whole}")
            if kind == _WRITE and int(values[at][1:12]) in self._refused:
                raise Breach("a value appears although its client was told that it was not taken")
            at += of
        self._judge_expiry(values)

    def _judge_expiry(self, values: Values) -> None:
        for value in values:
            if value[0] == _EXPIRE and int(value[1:12]) in self._expired_early:
                raise Breach("a value is expired that is not old")


def simulate(seed: int, broken: Broken = Broken()) -> str:
    """Simulate this seed; returns what was broken."""
    run = Simulation(seed, broken)
    try:
        run.run()
    except Breach as breach:
        return str(breach)
    return ""


# Controls: every rule, broken on purpose


@contextmanager
def _patched(name: str, other: Callable[..., Any]) -> Iterator[None]:
    kept = getattr(protocol, name)
    steps = dict(protocol._STEPS)
    setattr(protocol, name, other)
    for key, handler in steps.items():
        if handler is kept:
            protocol._STEPS[key] = other
    try:
        yield
    finally:
        setattr(protocol, name, kept)
        protocol._STEPS.update(steps)


def _no_look(member: Member) -> protocol.Result:
    return member, (Durable(member.settled),)


def _only_next(member: Member) -> protocol.Result:
    """The control: the look at the last slot is left out."""
    return replace(member, waits=Waits.LOOK_NEXT, doubt=""), (Read(member.at.number + 1),)


def _all_below(numbers: Any, kept: Any) -> list[int]:
    return [] if len(kept) < 2 else [n for n in numbers if n < kept[-2].number]


def _believes_end(member: Member) -> protocol.Result:
    """The control: an empty slot is taken for the end without asking for a snapshot."""
    return protocol._at_end(member) if not member.doubt else protocol._stop(member, member.doubt)


def _unknown_is_won(member: Member, event: Stored) -> protocol.Result:
    if event.is_won is None:
        return protocol._advanced(member)
    return _tick_stored(member, event)


_tick_stored = protocol._tick_stored

PATCHES: Mapping[str, tuple[str, Callable[..., Any]]] = {
    "claims are deleted with the rest": ("deletable", _all_below),
    "no look before answers": ("_look", _no_look),
    "a claim does not void an unfinished tick": ("_voided", lambda partial: partial),
    "an unknown put is taken for written": ("_tick_stored", _unknown_is_won),
    "slots are not chained": ("_breach", lambda _at, _slot: ""),
    "an empty slot is the end": ("_ask_newest", _believes_end),
    "any clock may expire": ("is_clock_right", lambda *_: True),
}
FLAGS: Mapping[str, Broken] = {
    "no list after a claim": Broken(no_list=True),
    "answers first": Broken(answers_first=True),
    "an unknown put is taken for refused": Broken(unknown_is_refused=True),
    "a member writes by itself at a restart": Broken(writes_by_itself=True),
    "a member trusts its old claim": Broken(trusts_old_claim=True),
    "a snapshot inside a tick": Broken(snapshot_in_tick=True),
    "an orphan is swept under a put": Broken(sweeps_orphans=True),
}
CONTROLS = (*PATCHES, *FLAGS)


def simulate_control(name: str, seeds: range) -> int:
    """How many seeds the judge objects to where this rule is broken."""
    if name in FLAGS:
        return sum(bool(_objection(seed, FLAGS[name])) for seed in seeds)
    with _patched(*PATCHES[name]):
        return sum(bool(_objection(seed, Broken())) for seed in seeds)


def _objection(seed: int, broken: Broken) -> str:
    try:
        return simulate(seed, broken)
    except Exception as error:  # noqa: BLE001  a broken rule may also end in an error
        return repr(error)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20_000)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--control", choices=CONTROLS)
    asked = parser.parse_args(arguments)
    if asked.seed is not None:
        run = Simulation(asked.seed, keeps_trace=True)
        try:
            run.run()
        except Breach as breach:
            sys.stdout.write("\n".join(run.trace or ()) + f"\nseed {asked.seed}: {breach}\n")
            return 1
        sys.stdout.write(f"seed {asked.seed}: no breach\n")
        return 0
    if asked.control:
        bad = simulate_control(asked.control, range(asked.seeds))
        sys.stdout.write(f"{asked.control}: {bad} of {asked.seeds} seeds objected to\n")
        return 0 if bad else 1
    breaches = {seed: found for seed in range(asked.seeds) if (found := simulate(seed))}
    for seed, fact in list(breaches.items())[:10]:
        sys.stdout.write(f"seed {seed}: {fact}\n")
    sys.stdout.write(f"{len(breaches)} breaches in {asked.seeds} seeds\n")
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())
