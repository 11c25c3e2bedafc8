"""Connections to a database: the driver's `Session` and `Pool`, and what tasks keep between epochs.

Each database implements `Session` and `Pool` over its own library (psycopg, PyMySQL, oracledb) in
its `client.py`. Exceptions of that library pass through unchanged; the dialect classifies them.
"""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from epochal.errors import InvariantBroken, Misconfigured
from epochal.kit.secrets import CalledSecret, Secret
from epochal.kit.sql.errors import ErrorTable
from epochal.terms import Identity

_KEPT_MAX = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseServer(ABC):
    """Password and limits of all connections to one server. Holds no secret, except a held one."""

    password: Secret | None
    connect_timeout_s: float
    statement_timeout_s: float
    lock_timeout_s: float
    pool_min: int
    pool_max: int
    idle_max_s: float
    lifetime_max_s: float
    session_sql: tuple[str, ...]

    @property
    @abstractmethod
    def place(self) -> str:
        """For people: host, port and database."""

    def secret(self) -> str:
        return "" if self.password is None else self.password.reveal()

    def without_secret(self, text: str) -> str:
        """A library's message, which may quote the password that it was given."""
        password = self.password
        secret = password.last if isinstance(password, CalledSecret) else self.secret()
        return text.replace(secret, "…") if secret else text

    def run_session_sql(self, execute: Callable[[str], object], errors: ErrorTable) -> None:
        """Run what was declared for every connection, first of all on a new one."""
        for statement in self.session_sql:
            try:
                execute(statement)
            except Exception as error:
                if not errors.is_from_database(error) or errors.is_network(error):
                    raise
                raise Misconfigured(
                    f"session_sql on {self.place}: {statement}: {errors.text_of(error)}",
                    "correct it: it is run on every new connection of the driver and of the tasks",
                ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a server answered to one statement."""

    rows_changed: int
    rows: list[tuple[Any, ...]]


class Session(Protocol):
    """One of the driver's connections, taken from a `Pool`."""

    is_unasked: bool = False
    """
    Whether it was taken without a question whether it still answers, as it did just now, and has
    not answered since. One that breaks later may have been ended by a later driver.
    """

    def execute(self, statement: str) -> int:
        """Run a statement; the number of rows that it changed."""

    def query(self, statement: str) -> list[tuple[Any, ...]]: ...

    # Several statements in one round trip, where the protocol can

    def run_all(self, statements: Sequence[str]) -> list[Answer]:  # noqa: ARG002
        """
        Run statements up to the first that fails, with their answers. Only called where the
        protocol can: see `Dialect.require_rows`.
        """
        raise InvariantBroken(f"{type(self).__name__} sends one statement at a time")

    def execute_all(self, statements: Sequence[str]) -> list[int]:
        return [self.execute(statement) for statement in statements]

    def query_all(self, statements: Sequence[str]) -> list[list[tuple[Any, ...]]]:
        return [self.query(statement) for statement in statements]

    def defer(self, statement: str) -> None:
        """Run it before the next one, if not at once: an error of it may be raised there."""
        self.execute(statement)

    def flush(self) -> None:
        """Run what was deferred."""
        return

    # Transactions

    def begin(self, *, lock_wait_s: float | None = None, idle_max_s: float | None = None) -> None:
        """
        Begin a transaction, READ COMMITTED, that waits this long for locks.

        Where `idle_max_s` is given, the server ends it, and not before, once it hears nothing for
        so long, whatever limit it has of its own. A driver whose machine is gone frees its locks
        after that time at the latest.
        """

    def wait_for_locks(self, seconds: float | None = None) -> None:
        """Change the lock timeout, until the session is given back; None is the declared one."""

    def commit(self) -> None: ...

    def roll_back(self) -> None:
        """End the transaction, whatever its state; a connection that can't do it is closed."""


class Pool(Protocol):
    def take(self) -> Session: ...

    def give_back(self, session: Session) -> None: ...

    def act_for(self, identities: Sequence[Identity]) -> None:
        """
        Name the sinks whose transactions these sessions hold open: all that share one.

        `Dialect.end_older_sessions` finds the session of an earlier driver by any of them.
        """

    def close(self) -> None: ...


class Closable(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=Closable)


class Shared(Closable, Protocol):
    """The connections of a driver to one server."""

    def resize(self, members: int) -> None:
        """So many sinks share them now: each may keep one for long, while it needs others."""


S = TypeVar("S", bound=Shared)


class SharedConnections(Generic[S]):
    """The connections of this process's drivers: one pool per driver and server, for all sinks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._members: dict[tuple[object, ...], tuple[S, int]] = {}

    def join(self, identity: Identity, server: DatabaseServer, make: Callable[[], S]) -> S:
        """The pool that another sink of this driver made, or a new one."""
        with self._lock:
            key = self._key(identity, server)
            shared, members = self._members.get(key) or (make(), 0)
            self._members[key] = shared, members + 1
            shared.resize(members + 1)
            return shared

    def leave(self, identity: Identity, server: DatabaseServer) -> None:
        """The last one closes it."""
        with self._lock:
            key = self._key(identity, server)
            shared, members = self._members.pop(key)
            if members > 1:
                self._members[key] = shared, members - 1
                shared.resize(members - 1)
                return
        shared.close()

    def _key(self, identity: Identity, server: DatabaseServer) -> tuple[object, ...]:
        return os.getpid(), identity.uid, identity.generation, server


@dataclass(slots=True)
class _Idle(Generic[C]):
    key: tuple[int, object]
    connection: C
    since_s: float
    born_s: float


class IdleConnections(Generic[C]):
    """
    A few connections of tasks that stay open in a reused Python worker, from epoch to epoch.

    Each is kept under a key: everything that it was opened with.
    """

    def __init__(self, *, answers: Callable[[C], bool]) -> None:
        self._answers = answers
        self._idle: list[_Idle[C]] = []
        self._lock = threading.Lock()
        self._born_s: dict[int, float] = {}

    def take(
        self, key: object, connect: Callable[[], C], *, idle_max_s: float, lifetime_max_s: float
    ) -> C:
        """A kept connection that still answers, or a new one."""
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
        """Remember when a connection was opened that may be kept later."""
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
        """Close everything that this process keeps."""
        with self._lock:
            kept, self._idle = self._idle, []
        for one in kept:
            if one.key[0] == os.getpid():
                _close(one.connection)

    def _pop(self, key: tuple[int, object]) -> _Idle[C] | None:
        """The last one used, of this process only: a forked process must not share a socket."""
        with self._lock:
            for place in reversed(range(len(self._idle))):
                if self._idle[place].key == key:
                    return self._idle.pop(place)
        return None


def _close(connection: Closable) -> None:
    with suppress(Exception):
        connection.close()
