"""A broker without a socket: requests go to handlers, answers come back, ticks are made by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memory_disk import MemoryDisk

from epochal.broker import handlers
from epochal.broker.broker import Address, Broker, Call
from epochal.broker.core.settings import Settings
from epochal.broker.storage.store import Store
from epochal.kafka.primitives import Message

START_MS = 1_700_000_000_000


class Answering:
    def __init__(self) -> None:
        self.is_over = False
        self.message: Message | None = None
        self.then: Callable[[], None] | None = None

    def answer(self, message: Message) -> None:
        self.is_over = True
        self.message = message

    def drop(self) -> None:
        self.is_over = True

    def after(self, _: int, then: Callable[[], None], gone: Callable[[], None]) -> None:
        self.then = then


class Table:
    """One broker, and somebody who passes notes to it."""

    def __init__(
        self,
        disk: MemoryDisk | None = None,
        *,
        is_synced: bool = False,
        settings: Settings | None = None,
        now_ms: int = START_MS,
        **limits: int,
    ) -> None:
        self.disk = disk or MemoryDisk()
        self.settings = settings or Settings()
        self.now_ms = now_ms
        self.store = Store(self.disk, is_synced=is_synced, **limits)
        self.broker = Broker(self.settings, self.store, self.now_ms)

    def ask(self, request: Any, version: int | None = None, *, tick: bool = True) -> Any:
        """The answer, once it is durable; None where it is still to come."""
        answering = self.begin(request, version, tick=tick)
        return answering.message

    def begin(self, request: Any, version: int | None = None, *, tick: bool = True) -> Answering:
        """The same; an answer that is still to come is found in it later."""
        handler = handlers.table()[request.API_KEY]
        version = handler.versions[-1] if version is None else version
        answering = Answering()
        me = Address(host="127.0.0.1", port=9092)
        call = Call(self.broker, version, "client", "127.0.0.1", me, None, lambda: answering)
        answer = handler.handle(call, request)
        if answer is not None:
            answering.answer(answer)
        if tick:
            self.tick()
        if answering.message is not None:
            answering.message.encode(version)
        return answering

    def tick(self) -> None:
        state = self.broker.state
        self.broker.now_ms = self.now_ms
        state.finish(self.now_ms)
        self._answers()
        self.broker.fetch_waiters.wake_ready()
        self.store.commit()
        if self.store.is_synced:
            self.store.sync()
        if self.store.wants_roll:
            self.store.roll(state.known())

    def _answers(self) -> None:
        answers = self.broker.state.groups.answers
        while answers:
            given, answers[:] = answers[:], []
            for token, answer in given:
                token(answer)

    def pass_time(self, ms: int) -> None:
        self.now_ms += ms
        self.broker.now_ms = self.now_ms
        self.broker.state.pass_time(self.now_ms)
        self.tick()
