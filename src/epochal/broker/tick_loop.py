"""`TickLoop`: the event loop that owns all state: collect, decide, write, answer.

A tick takes every request that has arrived, lets the core decide them one after the other, writes
all changes with one write, and only then sends the answers. Requests that arrive while the write is
synced to disk wait for the next tick: the slower the disk, the larger the groups. An answer waits
for everything that was written before it, its own tick's or an earlier one's: a reader never sees
what a power cut could take back. A tick after which nothing is unsynced answers at once.

    requests   a b c │           d e │       f
    tick 1     decide a b c, write, sync ────► answer a b c
    tick 2                             decide d e f, write, sync ────► answer d e f
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from epochal.broker.broker import Address, Broker
from epochal.broker.connection import Connection
from epochal.broker.loop_thread import LoopThread

_TIME_EVERY_S = 0.1
_CLEAN_UP_EVERY_S = 30.0
_LIMITS_CHECK_S = 1.0
_TICK_S = 0.02
"""Requests that have not begun by then are handled in the next tick, in their turn: one client's
requests, however many and expensive, don't keep others waiting for longer than one of them."""
_LOG_EVERY_S = 1.0
_ASIDE_THREADS = 2


T = TypeVar("T")


class Durable(Protocol):
    """
    Makes a tick that was decided durable. Called by the loop for every tick, one at a time.

    True: its answers may leave now. False: `then` will be called, once, when they may.
    """

    def __call__(self, *, has_answers: bool, then: Callable[[], None]) -> bool: ...


class TickLoop:
    def __init__(
        self,
        broker: Broker,
        *,
        advertised: Address,
        has_fixed_host: bool,
        fail: Callable[[BaseException], None],
        clean_up_every_s: float = _CLEAN_UP_EVERY_S,
    ) -> None:
        self.broker = broker
        broker.report = self.log
        settings = broker.settings
        self.always_allowed_bytes = min(
            settings.frame_bytes_max,
            settings.frame_before_login_bytes_max,
            settings.request_bytes_max,
        )
        """A request up to this size is below every limit on sizes."""
        broker.aside = self._aside
        broker.limit_reached = self.limit_reached  # type: ignore[method-assign]
        self._advertised = advertised
        self._has_fixed_host = has_fixed_host
        self._fail = fail
        self._loop = asyncio.get_running_loop()
        self._connections: set[Connection] = set()
        self._before_login: dict[Connection, None] = {}
        """The oldest first."""
        self.held_bytes = 0
        """Of requests of all connections that are not handled yet."""
        self.requests = 0
        self._late_at = 0.0
        self._logged: dict[str, tuple[float, int]] = {}
        """Kinds of lines → when the last one was written, and how many were not since."""
        self._threads = ThreadPoolExecutor(_ASIDE_THREADS, "epochal-broker-aside")
        self._sync_thread = LoopThread("epochal-broker-sync")
        self._woken: dict[Connection, None] = {}
        self._answering: list[Connection] = []
        self._due: list[Callable[[], None]] = []
        self._is_scheduled = False
        self.is_syncing = False
        """A tick waits to be durable: no other is decided meanwhile."""
        self.durable: Durable = self._durable_on_disk
        self.is_held: Callable[[], bool] = _never
        """Requests wait while this is so; `go_on` is called when it may have ended."""
        self.is_over = False
        self._clean_up_every_s = clean_up_every_s
        self._clean_up_at = self._loop.time() + clean_up_every_s
        self._limits_check_at = 0.0
        self._timer = self._loop.call_later(_TIME_EVERY_S, self._pass_time)

    # For connections

    def admit(self, connection: Connection) -> bool:
        if self.is_over:
            return False
        self._connections.add(connection)
        if connection.is_before_login:
            self._before_login[connection] = None
            if len(self._before_login) > self.broker.settings.connections_before_login_max:
                # Not the new one: those who know their password are through in no time.
                self.refuse(next(iter(self._before_login)), "connections_before_login_max")
        return True

    def logged_in(self, connection: Connection) -> None:
        if not connection.is_before_login:
            self._before_login.pop(connection, None)

    @property
    def before_login(self) -> int:
        return len(self._before_login)

    def dismiss(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._before_login.pop(connection, None)

    def refuse(self, connection: Connection, limit: str) -> None:
        self.broker.limit_reached(limit)
        self._before_login.pop(connection, None)
        connection.close()

    def hold(self, grown: int) -> None:
        """Bytes of requests have arrived, or were handled."""
        self.held_bytes += grown
        if grown > 0 and self.held_bytes > self.broker.settings.frames_bytes_max:
            largest = max(self._connections, key=lambda one: one.held_bytes)
            self.refuse(largest, "frames_bytes_max")

    def is_late(self) -> bool:
        return self._loop.time() > self._late_at

    def limit_reached(self, limit: str) -> None:
        self.broker.limits_reached[limit] += 1
        self.log(f"limit {limit} is reached ({getattr(self.broker.settings, limit)})", limit)

    def address_for(self, sockname: Any) -> Address:
        """The address to advertise to a client that is connected to `sockname`."""
        if self._has_fixed_host or not sockname:
            return self._advertised
        return Address(host=sockname[0], port=self._advertised.port)

    def advertise(self, address: Address) -> None:
        """Known only once the socket is bound."""
        self._advertised = address

    def wake(self, connection: Connection) -> None:
        self._woken[connection] = None
        self._schedule()

    def has_answers(self, connection: Connection) -> None:
        self._answering.append(connection)

    def call_later(self, delay_s: float, then: Callable[[], None]) -> asyncio.TimerHandle:
        """Call within a tick, some time from now."""

        def due() -> None:
            self._due.append(then)
            self._schedule()

        return self._loop.call_later(delay_s, due)

    def log(self, line: str, kind: str = "") -> None:
        """Write a line to stderr; of those of one kind, one a second."""
        if kind:
            last_s, missed = self._logged.get(kind, (-_LOG_EVERY_S, 0))
            if self._loop.time() - last_s < _LOG_EVERY_S:
                self._logged[kind] = (last_s, missed + 1)
                return
            self._logged[kind] = (self._loop.time(), 0)
            line += f" (and {missed} more)" if missed else ""
        sys.stderr.write(f"epochal broker: {line}\n")

    def _aside(self, work: Callable[[], T], then: Callable[[T], None]) -> None:
        def done(future: asyncio.Future[T]) -> None:
            if future.cancelled() or self.is_over:
                return
            error = future.exception()
            if error is not None:
                self._stop(error)
                return
            self._due.append(lambda: then(future.result()))
            self._schedule()

        self._loop.run_in_executor(self._threads, work).add_done_callback(done)

    # The tick

    def run_soon(self, then: Callable[[], None]) -> None:
        """Call within the next tick."""
        self._due.append(then)
        self._schedule()

    def _schedule(self) -> None:
        if not self._is_scheduled and not self.is_syncing and not self.is_over:
            self._is_scheduled = True
            self._loop.call_soon(self._tick)

    def _tick(self) -> None:
        self._is_scheduled = False
        # A decision can wake a connection before its own sync begins: without this, a second tick
        # would run during that sync, and the first one's end would send the answers of both.
        if self.is_over or self.is_syncing:
            return
        try:
            self._decide()
            self.is_syncing = True
            is_durable = self.durable(has_answers=bool(self._answering), then=self._is_durable)
        except BaseException as error:  # noqa: BLE001  memory may be ahead of the disk
            self.is_syncing = False
            self._stop(error)
            return
        if is_durable:
            self._is_durable()

    def _decide(self) -> None:
        broker = self.broker
        broker.now_ms = time.time_ns() // 1_000_000
        self._late_at = self._loop.time() + _TICK_S
        state = broker.state
        due, self._due = self._due, []
        for then in due:
            then()
        while True:
            if not self.is_held():
                woken, self._woken = self._woken, {}
                for connection in woken:
                    connection.work()
            if broker.is_leading and state.finish(broker.now_ms):
                self._due.append(_nothing)
            self._give_group_answers()
            broker.fetch_waiters.wake_ready()
            if not self._woken or self.is_held() or self.is_late():
                return

    def _give_group_answers(self) -> None:
        answers = self.broker.state.groups.answers
        while answers:
            given, answers[:] = answers[:], []
            for token, answer in given:
                token(answer)

    def _durable_on_disk(self, *, has_answers: bool, then: Callable[[], None]) -> bool:
        """Of a broker by itself: in its journal, and synced where that is asked for."""
        store = self.broker.store
        store.commit()
        if not has_answers or not store.needs_sync:
            return True
        self._sync_thread.call(store.sync, lambda _: then(), self._sync_failed)
        return False

    def _sync_failed(self, error: BaseException) -> None:
        self.is_syncing = False
        self._stop(error)

    def refuse_answers(self) -> None:
        """None of the answers of this tick may leave: cut their connections."""
        answering, self._answering = self._answering, []
        for connection in answering:
            connection.abort()

    def _is_durable(self) -> None:
        self.is_syncing = False
        answering, self._answering = self._answering, []
        for connection in answering:
            connection.flush()
        store, state = self.broker.store, self.broker.state
        if self.is_over or not store.wants_roll or store.has_pending:
            self.go_on()
            return
        # With many partitions it takes its time: beside the loop, and no tick is decided meanwhile.
        self.is_syncing = True
        self._sync_thread.call(
            lambda: store.roll(state.known()), lambda _: self._rolled(), self._sync_failed
        )

    def _rolled(self) -> None:
        self.is_syncing = False
        self.go_on()

    def go_on(self) -> None:
        """Handle what waits, if it may be handled."""
        if self._due or (self._woken and not self.is_held()):
            self._schedule()

    def _pass_time(self) -> None:
        self._timer = self._loop.call_later(_TIME_EVERY_S, self._pass_time)
        self._due.append(self._time)
        self._schedule()

    def _time(self) -> None:
        broker = self.broker
        if broker.is_leading:
            broker.state.pass_time(broker.now_ms)
        if self._loop.time() >= self._clean_up_at:
            self._clean_up_at = self._loop.time() + self._clean_up_every_s
            if broker.is_leading and broker.may_clean_up:
                broker.clean_up()
        if self._loop.time() >= self._limits_check_at:
            self._limits_check_at = self._loop.time() + _LIMITS_CHECK_S
            for connection in list(self._connections):
                limit = connection.limit_passed(broker.now_ms)
                if limit:
                    self.refuse(connection, limit)

    def _stop(self, error: BaseException) -> None:
        self.close()
        self._fail(error)

    def close(self) -> None:
        """Stop, and cut all connections: requests without an answer may have been carried out."""
        self.is_over = True
        self._timer.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._sync_thread.close()
        for connection in list(self._connections):
            connection.close()

    def cut(self) -> None:
        """Stop, and let no answer leave any more, whatever is decided."""
        self.close()
        for connection in list(self._connections):
            connection.abort()


def _nothing() -> None:
    """Schedules another tick, in which the rest is completed."""


def _never() -> bool:
    return False
