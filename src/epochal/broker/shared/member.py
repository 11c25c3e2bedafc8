"""`ClusterMember`: the life of one member: takes slots in, takes over, serves, is fenced.

It carries out what `protocol.step` asks for. Calls to the store run in a thread of their own, one
at a time; everything else happens in the event loop. A call that fails is repeated for as long as
it takes: requests wait meanwhile, and no answer holds anything that is not in the journal.

    standby    takes in the slots of the active and keeps them in its own folder; asks the active
               how it is, and claims the next slot once nobody answers
    active     decides; a tick is answered once it is in its slot (`TickLoop.durable`)
    fenced     all connections are cut, and a new broker begins from the folder, which has won slots
               only
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

from epochal import __version__
from epochal.broker.broker import Address, Broker, Node
from epochal.broker.core.entries import Appended, AppendedElsewhere, Entry
from epochal.broker.core.settings import Settings
from epochal.broker.loop_thread import LoopThread
from epochal.broker.shared import protocol
from epochal.broker.shared.journal import MemberRecord, SharedJournal, to_entry, to_position
from epochal.broker.shared.peers import SILENCE_S, Hearing, Peer, Status
from epochal.broker.shared.protocol import (
    Action,
    Apply,
    Durable,
    EndSeen,
    Event,
    Fenced,
    Fetch,
    Fetched,
    Found,
    Load,
    Loaded,
    Member,
    Position,
    Read,
    Serve,
    Stop,
    Stored,
    TakeOver,
    Tick,
    Waits,
    Wake,
)
from epochal.broker.shared.slots import HINT, Claim
from epochal.broker.shared.snapshot_writer import SnapshotLimits, SnapshotWriter
from epochal.broker.storage import codec
from epochal.broker.storage.disk import Disk
from epochal.broker.storage.store import Store
from epochal.broker.tick_loop import TickLoop
from epochal.clock import Clock
from epochal.errors import CorruptRecord, EpochalError, Misconfigured, OutcomeUnknown, TryAgain

_LOOK_S = 0.03
_LOOK_IDLE_S = 0.25
_IDLE_AFTER_S = 2.0
_LOOK_ACTIVE_S = 1.0
"""An active without clients looks so often whether it still is the active."""
_PROVE_END_S = 0.3
_END_SEEN_WITHIN_S = 1.0
"""A standby that has not proven for so long that it is at the end answers nobody."""
_HELD_S = 3.0
"""So long after it has seen the end, requests wait for a standby that proves the end again or
claims; then their connections are cut, and clients try another member."""
_PING_S = 0.2
_CUT_LOOK_S = 0.02
"""A standby notices so soon that the connection to the active has ended."""
_PONG_WITHIN_S = 0.4
_STUCK_S = 5.0
"""An active that waits for the store for longer is taken over by a standby that reaches it."""
_ROUND_MAX_S = _PING_S + _PONG_WITHIN_S + 0.5
"""A member whose own loop took longer was paused itself: its count of silence begins again."""
_LAG_MAX_S = 1.0
_LAG_WAIT = 0.02
_LAG_WAIT_MAX_S = 0.1
"""For every second that all standbys are further behind than the first, the active waits for the
second before each tick, and never for longer than the third."""
_WRITTEN_EVERY_S = 0.05
_WRITTEN_MAX = 10_000
_CALL_AGAIN_S = 0.05
_CALL_AGAIN_MAX_S = 1.0
_MEMBERS_S = 5.0
_STOP_WITHIN_S = 5.0

T = TypeVar("T")


@dataclass(slots=True)
class _TickUnderWay:
    entries: list[Entry]
    then: Callable[[], None]
    packed: bytes = b""
    """The entries as bytes, where the slots have them so."""


class ClusterMember:
    def __init__(
        self,
        disk: Disk,
        settings: Settings,
        journal: SharedJournal,
        *,
        name: str,
        clock: Clock,
        fail: Callable[[BaseException], None],
        limits: SnapshotLimits,
    ) -> None:
        self._disk = disk
        self._settings = settings
        self._journal = journal
        self._name = name
        self._clock = clock
        self._fail = fail
        self._loop = asyncio.get_running_loop()
        self._thread = LoopThread("epochal-broker-journal")
        self._record: MemberRecord | None = None
        self._secret = b""
        self._address = Address(host="", port=0)
        self._members: list[Node] = []
        self._tick: _TickUnderWay | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._wish: TakeOver | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._is_over = False
        self._failures = 0
        self._call_at: float | None = None
        """Since when a call to the store has been under way,"""
        self._failing_at: float | None = None
        """and since when none has succeeded."""
        self._snapshots = SnapshotWriter(limits)
        self._standbys: dict[str, tuple[int, float]] = {}
        """Their names → how far they are, and when they said so."""
        self._written: deque[tuple[int, float]] = deque(maxlen=_WRITTEN_MAX)
        """Slots that this active has filled lately, and when: one every `_WRITTEN_EVERY_S`."""
        self.throttled = 0
        self._wake_at = self._taken_at = self._loop.time()
        self._end_seen_at = -_END_SEEN_WITHIN_S
        self._durable_at = self._tick_at = 0.0
        self._begun: asyncio.Future[None] = self._loop.create_future()
        self.takeovers = 0
        self.fenced = 0
        self.since_ms = self._now_ms()
        self.ticks: TickLoop = self._begin()
        at = to_position(self.ticks.broker.store.position)
        self._member = Member(payload_bytes_max=journal.payload_bytes_max, settled=at, at=at)

    def _now_ms(self) -> int:
        return int(self._clock.now() * 1000)

    def _begin(self) -> TickLoop:
        """A broker as its folder has it: up to a slot that was won, and nothing else."""
        store = Store(
            self._disk,
            is_synced=False,
            segment_bytes_max=self._settings.segment_bytes,
            segment_ms_max=self._settings.segment_ms,
        )
        broker = Broker(self._settings, store, self._now_ms(), is_member=True)
        if store.missing_bytes:
            raise Misconfigured(
                f"{store.folder} has lost {store.missing_bytes} bytes that were synced to its disk",
                "empty the folder: the member takes all of it from the cluster again",
            )
        if broker.state.cluster_id and store.position is None:
            raise Misconfigured(
                f"{store.folder} holds the data of a broker that is no member of a cluster",
                "give a member a folder of its own: it takes in what the others have",
            )
        ticks = TickLoop(broker, advertised=self._address, has_fixed_host=True, fail=self._fail)
        ticks.durable = self._durable
        ticks.is_held = self._is_held
        for note in store.notes:
            ticks.log(note)
        self._show_leader(broker, to_position(store.position))
        broker.members = self._members
        return ticks

    # Its life

    async def caught_up(self, secret: bytes) -> None:
        """Begin to take slots in; returns once it has seen the end."""
        self._secret = secret
        self._keep_doing(self._watch())
        self._go_on()
        await self._begun

    async def join(self, record: MemberRecord) -> None:
        """Clients can connect from now on: take over where nobody else is the active."""
        self._record = record
        self._address = Address(host=record.host, port=record.port)
        self.ticks.advertise(self._address)
        self._keep_doing(self._know_members(self._journal.again(), record))
        self._keep_doing(self._snapshots.keep_writing(self, self._journal.again()))

    def _keep_doing(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        task.add_done_callback(self._ended)
        self._tasks.append(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Without one of its tasks a member would never take over again, and look well."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._stop(error)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._timer is not None:
            self._timer.cancel()
        self.ticks.close()
        until = self._loop.time() + _STOP_WITHIN_S
        while self.ticks.is_syncing and self._loop.time() < until:
            await asyncio.sleep(0.002)
        self._is_over = True
        store = self.ticks.broker.store
        if not self.ticks.is_syncing and not store.has_pending:
            store.roll(self.ticks.broker.state.known())
        store.close()
        self._thread.close()
        if self._record is not None:
            # Clients need not try a member that has stopped; the store may be away, too.
            with suppress(EpochalError, TimeoutError):
                retired = asyncio.to_thread(self._journal.retire, self._name)
                await asyncio.wait_for(retired, _STOP_WITHIN_S)
        self._journal.close()

    @property
    def is_active(self) -> bool:
        return self._member.is_active

    @property
    def slot(self) -> int:
        """The last one that is its own or taken in."""
        return self._member.settled.number

    @property
    def role(self) -> str:
        if self.is_active:
            return "active"
        is_claiming = self._member.waits in (Waits.CLAIM, Waits.CLAIM_READ, Waits.LIST)
        return "claiming" if is_claiming else "standby"

    def status(self, asker: Status) -> Status:
        """The answer to another member, which says how far it is itself, or to an operator."""
        if asker:
            self._standbys[asker["member"]] = asker["slot"], self._loop.time()
        return self._status()

    def _status(self) -> Status:
        at = self._member.settled
        return {
            "member": self._name,
            "role": self.role,
            "generation": at.generation,
            "slot": at.number,
            "since_ms": self.since_ms,
            "is_at_end": self._is_at_end(),
            "waits_s": self._waits_s(),
            "release": __version__,
        }

    def _waits_s(self) -> float:
        """How long it has been waiting for the store."""
        since = [at for at in (self._call_at, self._failing_at) if at is not None]
        return self._loop.time() - min(since) if since else 0.0

    def counts(self) -> dict[str, int]:
        """For metrics."""
        at = self._member.settled
        return {
            **self._lags(),
            "active": int(self.is_active),
            "since_seconds": self.since_ms // 1000,
            "generation": at.generation,
            "slot": at.number,
            "snapshot": self._snapshots.newest,
            "takeovers_total": self.takeovers,
            "fenced_total": self.fenced,
            "snapshots_total": self._snapshots.written,
            "throttled_total": self.throttled,
        }

    def _lags(self) -> dict[str, int]:
        """How many slots each standby has still to take in, as far as it has said so lately."""
        if not self.is_active:
            return {}
        number, now = self.slot, self._loop.time()
        return {
            f'standby_lag{{member="{name}"}}': max(number - slot, 0)
            for name, (slot, at) in self._standbys.items()
            if now - at < SILENCE_S
        }

    def _is_at_end(self) -> bool:
        is_fresh = self._loop.time() - self._end_seen_at <= _END_SEEN_WITHIN_S
        return self.is_active or is_fresh

    def _is_held(self) -> bool:
        """
        Whether requests wait here until it is known which member is the active. A client that gets
        the address of a dead one, or whose connection is cut, loses more time.
        """
        if self.is_active:
            return False
        is_wished = self._wish is not None or self._member.wish is not None
        # Where nobody has ever been the active, a member claims as soon as it has seen that.
        is_claiming = is_wished or not self._member.at.holder
        age_s = self._loop.time() - self._end_seen_at
        return age_s <= _HELD_S and (is_claiming or age_s > _END_SEEN_WITHIN_S)

    # The tick

    def _durable(self, *, has_answers: bool, then: Callable[[], None]) -> bool:
        if not self.is_active:
            if has_answers and not self._is_at_end():
                self.ticks.refuse_answers()
            return True
        store = self.ticks.broker.store
        is_due = self._loop.time() - self._durable_at > _LOOK_ACTIVE_S
        if not has_answers and not store.has_pending and not is_due:
            return True
        tick = self._tick = _TickUnderWay(store.take(), then)
        wait_s = max(self._tick_at + self._tick_every_s() - self._loop.time(), 0.0)
        self._tick_at = self._loop.time() + wait_s
        if wait_s:
            self._loop.call_later(wait_s, self._put_tick, tick)
        else:
            self._put_tick(tick)
        return False

    def _put_tick(self, tick: _TickUnderWay) -> None:
        if self._is_over:
            return
        if not self._journal.are_outside(tick.entries):
            tick.packed = codec.packed(tick.entries)
            self._feed_tick(tick.packed)
            return
        at = self._member.at
        put = partial(self._journal.put_outside, at.number + 1, at.nonce, tick.entries)
        self._repeat(put, lambda shown: self._feed_tick(codec.packed(shown)))

    def _feed_tick(self, payload: bytes) -> None:
        self._feed(Tick(payload, self._now_ms()))

    def _tick_every_s(self) -> float:
        """Longer while all standbys are far behind: a takeover would have to wait for them."""
        lag_s = self.lag_s()
        if lag_s <= _LAG_MAX_S:
            return self._journal.tick_every_s
        self.throttled += 1
        wait_s = min((lag_s - _LAG_MAX_S) * _LAG_WAIT, _LAG_WAIT_MAX_S)
        return max(self._journal.tick_every_s, wait_s)

    def lag_s(self) -> float:
        """How long ago the slot was written that the best standby takes in next; 0 without any."""
        now = self._loop.time()
        found = [slot for slot, at in self._standbys.values() if now - at < SILENCE_S]
        if not found or not self.is_active:
            return 0.0
        while self._written and self._written[0][0] <= max(found):
            self._written.popleft()
        return now - self._written[0][1] if self._written else 0.0

    # The protocol

    def _feed(self, event: Event) -> None:
        if self._is_over:
            return
        try:
            self._member, actions = protocol.step(self._member, event)
            for action in actions:
                self._act(action)
        except BaseException as error:  # noqa: BLE001  memory may be ahead of the disk
            self._stop(error)
            return
        self._go_on()
        self.ticks.go_on()

    def _act(self, action: Action) -> None:
        match action:
            case Apply():
                self._take_in(action)
            case EndSeen():
                self._end_seen_at = self._wake_at
                if not self._begun.done():
                    self._begun.set_result(None)
            case Serve():
                self._serve(action)
            case Durable():
                self._is_durable(action.position)
            case Fenced():
                self._begin_again(action.position)
            case Load():
                self._load(action.number)
            case Stop():
                raise CorruptRecord(f"{self._journal.location}: {action.reason}", HINT)
            case Fetch() if not codec.holds(AppendedElsewhere, action.payload):
                self._feed(Fetched(action.payload))
            case Read() if (found := self._journal.read_ahead(action.number)) is not None:
                # Not by the thread: to wake it takes as long as to take a slot in.
                self._loop.call_soon(self._called, Found(found))
            case _:
                self._repeat(partial(self._journal.carry_out, action), self._called)

    def _go_on(self) -> None:
        """A standby with nothing under way: claim, or look for news after a while."""
        if self._is_over or self.is_active or self._member.waits is not Waits.NOTHING:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._wish is not None:
            wish, self._wish = self._wish, None
            self._wake_at = self._loop.time()
            self._feed(wish)
            return
        is_idle = self._loop.time() - self._taken_at > _IDLE_AFTER_S
        delay_s = _LOOK_IDLE_S if is_idle and self._begun.done() else _LOOK_S
        self._timer = self._loop.call_later(delay_s, self._wake)

    def _wake(self) -> None:
        self._timer = None
        if self._is_over or self.is_active or self._member.waits is not Waits.NOTHING:
            return
        self._wake_at = self._loop.time()
        self._feed(Wake(self._wake_at - self._end_seen_at > _PROVE_END_S))

    def _repeat(self, call: Callable[[], T], then: Callable[[T], None]) -> None:
        """
        Make a call to the store, in the thread that has all of them, and go on with its answer. One
        that fails is made again, for as long as it takes, unless a person must act.
        """

        def done(answer: T) -> None:
            self._call_at = None
            if answer != Stored(None):
                self._failing_at = None
            if not self._is_over:
                then(answer)

        def failed(error: BaseException) -> None:
            self._call_at = None
            if self._is_over:
                return
            if isinstance(error, (TryAgain, OutcomeUnknown)) or (
                self._begun.done() and isinstance(error, Misconfigured)
            ):
                self._loop.call_later(self._failed(error), self._repeat, call, then)
            else:
                self._stop(error)

        self._call_at = self._loop.time()
        self._thread.call(call, done, failed)

    def _failed(self, error: BaseException | None) -> float:
        """Report a call without success; returns after what time to make it again."""
        self._failures += 1
        self._failing_at = self._failing_at or self._loop.time()
        self.ticks.log(f"the shared journal: {error or 'no answer'}", "journal")
        return min(_CALL_AGAIN_S * self._failures, _CALL_AGAIN_MAX_S)

    def _called(self, event: Event) -> None:
        if event == Stored(None):
            self._loop.call_later(self._failed(None), self._feed, event)
            return
        self._failures = 0
        self._feed(event)

    def _take_in(self, action: Apply) -> None:
        broker = self.ticks.broker
        broker.store.take_in(broker.state, action.payload, to_entry(action.position))
        if broker.store.wants_roll:
            broker.store.roll(broker.state.known())
        if not action.payload:
            self._show_leader(broker, action.position)
        self._taken_at = self._loop.time()
        self._snapshots.take_in(len(action.payload))

    def _serve(self, action: Serve) -> None:
        broker = self.ticks.broker
        broker.now_ms = self.since_ms = self._now_ms()
        broker.lead(is_clock_right=action.is_clock_right)
        self._wish = None
        self.takeovers += 1
        self.ticks.log(f"{self._name} is the active, generation {action.position.generation}")
        if not action.is_clock_right:
            self.ticks.log("the clock of this machine is wrong: nothing is expired or deleted")
        self.ticks.run_soon(_nothing)

    def _is_durable(self, position: Position) -> None:
        tick, self._tick = self._tick, None
        self._durable_at = self._loop.time()
        if tick is None:
            raise CorruptRecord("a tick became durable that nobody has decided")
        if tick.entries:
            batches = (one.batch for one in tick.entries if isinstance(one, Appended))
            self._snapshots.take_in(sum(map(len, batches)))
            self.ticks.broker.store.keep(tick.entries, tick.packed, to_entry(position))
            if not self._written or self._durable_at - self._written[-1][1] > _WRITTEN_EVERY_S:
                self._written.append((position.number, self._durable_at))
        # First: who waits for this is called before the next tick is decided.
        self._snapshots.tick_ended()
        tick.then()

    def _begin_again(self, position: Position) -> None:
        self.ticks.log(f"{self._name} is fenced after slot {position.number}: a standby from here")
        self._tick = None
        self._snapshots.tick_ended()
        self.fenced += 1
        self.ticks.cut()
        self.ticks.broker.store.close()
        # Requests wait until it has seen the end.
        self._end_seen_at = self._loop.time() - 2 * _END_SEEN_WITHIN_S
        self._written.clear()
        self.since_ms = self._now_ms()
        self.ticks = self._begin()
        if to_position(self.ticks.broker.store.position) != position:
            raise CorruptRecord(
                f"the folder of {self._name} does not end at slot {position.number}"
            )

    def _load(self, number: int) -> None:
        """Begin again from a snapshot: the folder is made anew."""
        self.ticks.log(f"{self._name} begins from the snapshot of slot {number}")
        self.ticks.cut()
        self.ticks.broker.store.close()
        cluster_id = self.ticks.broker.state.cluster_id
        restore = partial(self._journal.restore, number, self._disk, cluster_id)
        self._repeat(restore, partial(self._restored, number))

    def _restored(self, number: int, is_there: bool) -> None:
        try:
            self.ticks = self._begin()
        except BaseException as failure:  # noqa: BLE001  it has no broker any more
            self._stop(failure)
            return
        self._snapshots.loaded(number)
        position = to_position(self.ticks.broker.store.position)
        self._feed(Loaded(position if is_there else None))

    def _stop(self, error: BaseException) -> None:
        self._is_over = True
        self.ticks.cut()
        if self._begun.done():
            self._fail(error)
        else:
            self._begun.set_exception(error)

    def _show_leader(self, broker: Broker, position: Position) -> None:
        if position.holder:
            claim = Claim.decode(position.holder)
            broker.leader = Node(claim.node_id, claim.host, claim.port)

    # The others

    def _take_over(self) -> None:
        record = self._record
        is_wished = self._wish is not None or self._member.wish is not None
        if record is None or self.is_active or is_wished:
            return
        claim = Claim(release=__version__, **asdict(record))
        self._wish = TakeOver(
            nonce=secrets.token_bytes(16), payload=claim.encode(), time_ms=self._now_ms()
        )
        self._go_on()

    async def _watch(self) -> None:
        """Ask the active how it is, and take over where it is gone or silent."""
        peer = Peer("", 0, self._secret)
        asked_at = self._loop.time()
        hearing = Hearing(asked_at)
        while True:
            await self._sleep(peer)
            now = self._loop.time()
            if self.is_active or now - asked_at > _ROUND_MAX_S:
                hearing.at = now  # it is the active, or it slept itself
            asked_at = now
            if self.is_active:
                continue
            at = self._member.at
            if not at.holder:
                self._take_over()  # nobody has ever been the active
                continue
            claim = Claim.decode(at.holder)
            if hearing.nonce != at.nonce:
                hearing.begin(at.nonce, now)
            if peer.address != (claim.peer_host, claim.peer_port):
                peer.close()
                peer = Peer(claim.peer_host, claim.peer_port, self._secret)
            if await self._is_gone(peer, claim, hearing) and self._record is not None:
                if hearing.given_up() > 1:
                    self.ticks.log(
                        f"{claim.member} never answered at {claim.peer_host}:{claim.peer_port}: "
                        "members must reach each other there (--peer-port)"
                    )
                self._take_over()

    async def _is_gone(self, peer: Peer, claim: Claim, hearing: Hearing) -> bool:
        asked_at = self._loop.time()
        try:
            status = await asyncio.wait_for(_asked(peer, self._status()), _PONG_WITHIN_S)
        except ConnectionRefusedError:
            return not hearing.unheard or self._is_silent(hearing)
        except (OSError, TimeoutError, ValueError):
            is_awake = self._loop.time() - asked_at < _ROUND_MAX_S
            return is_awake and self._is_silent(hearing)
        hearing.hear(self._loop.time())
        if status["waits_s"] > _STUCK_S and self._is_at_end():
            return True
        # A standby by now: it has begun again.
        return bool(status["role"] == "standby" and status["member"] == claim.member)

    def _is_silent(self, hearing: Hearing) -> bool:
        """Neither heard nor seen: an active that fills slots is alive, also where none hears it."""
        return self._loop.time() - max(hearing.at, self._taken_at) > hearing.limit_s

    async def _sleep(self, peer: Peer) -> None:
        """Until it is time to ask again, or the connection has ended."""
        until = self._loop.time() + _PING_S
        while self._loop.time() < until and not peer.is_cut:
            await asyncio.sleep(_CUT_LOOK_S)

    async def _know_members(self, journal: SharedJournal, record: MemberRecord) -> None:
        """Keep this member listed, and know the others: clients learn of them by Metadata."""
        is_listed = False
        try:
            while True:
                try:
                    if not is_listed:
                        await asyncio.to_thread(journal.register, record)
                        is_listed = True
                    found = await asyncio.to_thread(journal.members)
                    self._members = [Node(one.node_id, one.host, one.port) for one in found]
                    self.ticks.broker.members = self._members
                except (TryAgain, OutcomeUnknown, Misconfigured) as error:
                    self.ticks.log(f"the shared journal: {error}", "members")
                await asyncio.sleep(_MEMBERS_S)
        finally:
            journal.close()


async def _asked(peer: Peer, asker: Status) -> Status:
    """A kept connection may have ended with the process behind it: try a new one once."""
    try:
        return await peer.ask(asker)
    except ConnectionRefusedError:
        raise
    except ConnectionError:
        return await peer.ask(asker)


def _nothing() -> None:
    """Schedules the first tick of an active."""
