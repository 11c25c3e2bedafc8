"""
Behaviour of a driver, learnt by running it.

A driver is deterministic: given the answers it got so far, its next call is settled. So the
shipped code needs to be run only once for each history of answers; from then on its next call is
looked up. An explorer of interleavings meets few histories and many interleavings of them, which
is what makes walking all of them affordable without a copy of the code under test.

A node is a history. A live greenlet is kept at the nodes visited last, and goes on from there;
elsewhere the driver is run again from its start, with the answers of that history.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from greenlet import greenlet

from epochal.coordinator import Environment
from epochal.errors import EpochalError
from epochal.terms import Claim, Uid
from epochal.testing.driver import Crash, Driver, one_after_the_other
from proof.calls import Call, Send

ROOT = 0
_LIVE_MAX = 2000


@dataclass(frozen=True, slots=True)
class Answer:
    """What a call gives back."""

    value: Hashable = None


@dataclass(frozen=True, slots=True)
class Failure:
    """What a call raises."""

    kind: type[EpochalError]
    args: tuple[Any, ...] = ("simulated",)

    @classmethod
    def of(cls, error: EpochalError) -> Failure:
        return cls(type(error), error.args)


Reply = Answer | Failure


class OwnClock:
    """A driver's own time: it moves when this driver sleeps."""

    def __init__(self) -> None:
        self._time_s = 0.0

    def now(self) -> float:
        return 0.0

    def monotonic(self) -> float:
        return self._time_s

    def sleep(self, seconds: float) -> None:
        self._time_s += seconds


def settled_environment(name: str) -> Environment:
    """Time, chance and names that depend on nothing but the driver's own history."""
    spent = [0]

    def nonce() -> str:
        spent[0] += 1
        return f"{name}{spent[0]}"

    return Environment(
        clock=OwnClock(),
        random=lambda: 0.0,
        nonce=nonce,
        new_uid=lambda: Uid(name.lower() * 12),
        new_claim=lambda: Claim(name.lower() * 8),
        parallel=one_after_the_other,
    )


class _Running:
    """One driver in a greenlet, which hands each call over and waits."""

    def __init__(self, build: Callable[[Send], Driver]) -> None:
        self._outside = greenlet.getcurrent()
        self._is_dead = False
        self._thread = greenlet(self._live)
        self.error: BaseException | None = None
        self.call: Call | None = self._thread.switch(build(self._send))

    def answer(self, reply: Reply) -> None:
        if isinstance(reply, Failure):
            self.call = self._thread.throw(reply.kind(*reply.args))
        else:
            self.call = self._thread.switch(reply.value)

    def kill(self) -> None:
        self._is_dead = True
        if not self._thread.dead:
            self._thread.throw(Crash())

    def _send(self, call: Call) -> Any:
        if self._is_dead:
            raise Crash
        return self._outside.switch(call)

    def _live(self, driver: Driver) -> None:
        try:
            driver.run()
        except Crash:
            return
        except BaseException as error:  # noqa: BLE001  the explorer looks at it
            self.error = error


class Behaviour:
    """All histories of one driver that were asked for so far."""

    def __init__(self, build: Callable[[Send], Driver]) -> None:
        self._build = build
        self._calls: list[Call | None] = []
        self._ends: list[BaseException | None] = []
        self._origin: list[tuple[int, Reply] | None] = []
        self._next: dict[tuple[int, Reply], int] = {}
        self._live: OrderedDict[int, _Running] = OrderedDict()
        self.runs = 0
        self._keep(None, self._fresh())

    def call(self, node: int) -> Call | None:
        """The driver's next call, or None where it has ended."""
        return self._calls[node]

    def end(self, node: int) -> BaseException | None:
        return self._ends[node]

    def after(self, node: int, reply: Reply) -> int:
        known = self._next.get((node, reply))
        if known is not None:
            return known
        running = self._live.pop(node, None) or self._again(node)
        running.answer(reply)
        found = self._next[node, reply] = self._keep((node, reply), running)
        return found

    def __len__(self) -> int:
        return len(self._calls)

    def _keep(self, origin: tuple[int, Reply] | None, running: _Running) -> int:
        node = len(self._calls)
        self._calls.append(running.call)
        self._ends.append(running.error)
        self._origin.append(origin)
        if running.call is not None:
            self._live[node] = running
        if len(self._live) > _LIVE_MAX:
            self._live.popitem(last=False)[1].kill()
        return node

    def _fresh(self) -> _Running:
        self.runs += 1
        return _Running(self._build)

    def _again(self, node: int) -> _Running:
        history: list[Reply] = []
        at = node
        while (origin := self._origin[at]) is not None:
            at, reply = origin
            history.append(reply)
        running = self._fresh()
        for reply in reversed(history):
            running.answer(reply)
        if running.call != self._calls[node]:
            raise RuntimeError(
                f"a driver is not deterministic: {running.call}, {self._calls[node]}"
            )
        return running
