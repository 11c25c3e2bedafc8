"""Connections of tasks that live on in the reused Python worker, from one epoch to the next."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

_KEPT_MAX = 4


class Closable(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=Closable)


@dataclass(slots=True)
class _Idle(Generic[C]):
    key: tuple[int, object]
    connection: C
    since_s: float
    born_s: float


class Kept(Generic[C]):
    """A few idle connections of this process, each under what it was opened with."""

    def __init__(self, *, answers: Callable[[C], bool]) -> None:
        self._answers = answers
        self._idle: list[_Idle[C]] = []
        self._lock = threading.Lock()
        self._born_s: dict[int, float] = {}

    def take(
        self, key: object, connect: Callable[[], C], *, idle_max_s: float, lifetime_max_s: float
    ) -> C:
        """One that is kept and still answers, or a new one."""
        kept = self.take_kept(key, idle_max_s=idle_max_s, lifetime_max_s=lifetime_max_s)
        return self.born(connect()) if kept is None else kept

    def take_kept(self, key: object, *, idle_max_s: float, lifetime_max_s: float) -> C | None:
        while (kept := self._pop((os.getpid(), key))) is not None:
            now = time.monotonic()
            is_young = now - kept.born_s < lifetime_max_s and now - kept.since_s < idle_max_s
            if is_young and self._answers(kept.connection):
                self._born_s[id(kept.connection)] = kept.born_s
                return kept.connection
            _close(kept.connection)
        return None

    def born(self, connection: C) -> C:
        """Note since when a new connection lives, which may be kept later."""
        self._born_s[id(connection)] = time.monotonic()
        return connection

    def keep(self, key: object, connection: C) -> None:
        now = time.monotonic()
        born_s = self._born_s.pop(id(connection), now)
        with self._lock:
            self._idle.append(_Idle((os.getpid(), key), connection, now, born_s))
            surplus = [self._idle.pop(0) for _ in range(len(self._idle) - _KEPT_MAX)]
        for one in surplus:
            _close(one.connection)

    def close(self, connection: C) -> None:
        self._born_s.pop(id(connection), None)
        _close(connection)

    def close_all(self) -> None:
        """Close what this process keeps."""
        with self._lock:
            kept, self._idle = self._idle, []
        for one in kept:
            if one.key[0] == os.getpid():
                _close(one.connection)

    def _pop(self, key: tuple[int, object]) -> _Idle[C] | None:
        """The one that was used last, of this process only: a fork shares no socket."""
        with self._lock:
            for place in reversed(range(len(self._idle))):
                if self._idle[place].key == key:
                    return self._idle.pop(place)
        return None


def _close(connection: Closable) -> None:
    with suppress(Exception):
        connection.close()
