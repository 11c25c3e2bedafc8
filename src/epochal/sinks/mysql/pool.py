"""The driver's sessions, in SQLAlchemy's pool: nothing else of SQLAlchemy is used.

A module of its own, as tasks must not import SQLAlchemy.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from pymysql.err import InterfaceError, OperationalError
from sqlalchemy import event, exc
from sqlalchemy.pool import QueuePool

from epochal.errors import TryAgain
from epochal.kit.sql.client import Session, SharedConnections
from epochal.sinks.mysql import client
from epochal.sinks.mysql.client import Server
from epochal.sinks.mysql.dialect import DIALECT
from epochal.sinks.mysql.errors import INTERRUPTED
from epochal.terms import Identity

_RETURNED = "epochal returned at"


class MySQLSession(Session):
    """
    One connection of the pool.

    While a transaction is open it holds a named lock per sink that it acts for. The locks exclude
    nobody: a later driver finds this session by them, and ends it.
    """

    def __init__(
        self, pooled: Any, shared: MySQLConnections, server: Server, locks: Sequence[str]
    ) -> None:
        self._pooled = pooled
        self._shared = shared
        self._server = server
        self._locks = [DIALECT.literal(lock) for lock in locks]
        self._is_named = False
        self._has_own_timeout = False
        self._has_own_idle = False

    def execute(self, statement: str) -> int:
        with self._cursor() as cursor:
            return int(cursor.execute(statement))

    def query(self, statement: str) -> list[tuple[Any, ...]]:
        with self._cursor() as cursor:
            cursor.execute(statement)
            rows = list(cursor.fetchall())
            if cursor.warning_count:
                _require_whole(cursor)
            return rows

    def _cursor(self) -> Any:
        if not self._pooled.is_valid:
            raise InterfaceError(0, "the connection was lost")
        return self._pooled.cursor()

    def begin(self, *, lock_wait_s: float | None = None, idle_max_s: float | None = None) -> None:
        if idle_max_s is not None:
            self._has_own_idle = True
            self._limit_idle(idle_max_s)
        self.wait_for_locks(lock_wait_s)
        self.query("SELECT " + ", ".join(f"GET_LOCK({lock}, 0)" for lock in self._locks))
        self._is_named = True
        self.execute("START TRANSACTION")

    def wait_for_locks(self, seconds: float | None = None) -> None:
        declared = self._server.lock_timeout_s
        wait_s = declared if seconds is None else min(seconds, declared)
        self.execute(f"SET SESSION {self._server.lock_settings(wait_s)}")
        self._has_own_timeout = wait_s < declared

    def _limit_idle(self, idle_max_s: float | None) -> None:
        self.execute(client.idle_limits(idle_max_s, is_mariadb=self._pooled.is_mariadb))

    def commit(self) -> None:
        self.execute("COMMIT")

    def roll_back(self) -> None:
        try:
            self.execute("ROLLBACK")
        except DIALECT.errors:
            # The server releases the locks of a connection that is closed.
            self._is_named = self._has_own_timeout = self._has_own_idle = False
            if self._pooled.is_valid:
                self._pooled.invalidate()

    def give_back(self) -> None:
        # A connection that can't do this is found dead when it is taken again.
        with suppress(*DIALECT.errors, exc.SQLAlchemyError):
            if self._is_named:
                self.execute("DO " + ", ".join(f"RELEASE_LOCK({lock})" for lock in self._locks))
            if self._has_own_idle:
                self._limit_idle(None)
            if self._has_own_timeout:
                self.wait_for_locks()
        self._shared.give_back(self._pooled)


def _require_whole(cursor: Any) -> None:
    """Of information_schema, MariaDB answers an interrupted query by no rows and a warning."""
    cursor.execute("SHOW WARNINGS")
    for _, number, text in cursor.fetchall():
        if number in INTERRUPTED:
            raise OperationalError(number, text)


class MySQLPool:
    """One sink's door to the driver's connections."""

    def __init__(self, server: Server, identity: Identity) -> None:
        self._server = server
        self._identity = identity
        self._locks: Sequence[str] = ()
        self._shared: MySQLConnections | None = None

    def take(self) -> MySQLSession:
        if self._shared is None:
            self._shared = _shared.join(
                self._identity, self._server, lambda: MySQLConnections(self._server)
            )
        return self._shared.take(self._locks)

    def give_back(self, session: Session) -> None:
        if isinstance(session, MySQLSession):
            session.give_back()

    def act_for(self, identities: Sequence[Identity]) -> None:
        self._locks = [DIALECT.driver_lock(one, one.generation) for one in identities]

    def close(self) -> None:
        if self._shared is not None:
            self._shared = None
            _shared.leave(self._identity, self._server)


class MySQLConnections:
    """
    The driver's connections to one server. Opened on first use, checked each time one is taken; as
    many are kept as sinks ask at the same time.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._members = 1
        self._taken = 0
        self._room = threading.Condition()
        self._pool = QueuePool(
            self._connect,
            pool_size=0,
            use_lifo=True,
            recycle=round(server.lifetime_max_s),
            reset_on_return=None,
        )
        event.listen(self._pool, "checkin", _note_the_time)
        event.listen(self._pool, "checkout", self._require_alive)

    def _connect(self) -> Any:
        return client.connect(self._server)

    def resize(self, members: int) -> None:
        with self._room:
            self._members = members
            self._room.notify_all()

    @property
    def _size_max(self) -> int:
        return self._server.pool_max + self._members - 1

    def take(self, locks: Sequence[str]) -> MySQLSession:
        wait_s = self._server.connect_timeout_s
        with self._room:
            if not self._room.wait_for(lambda: self._taken < self._size_max, wait_s):
                raise TryAgain(
                    f"all {self._size_max} connections to {self._server.place} are in use, for "
                    f"{wait_s:.0f} s",
                    "a larger pool_max, or find what holds them: SHOW PROCESSLIST",
                )
            self._taken += 1
        try:
            return MySQLSession(self._pool.connect(), self, self._server, locks)
        except BaseException:
            self._leave_room()
            raise

    def give_back(self, pooled: Any) -> None:
        try:
            is_enough = self._pool.checkedin() >= max(self._server.pool_min, self._members)
            if is_enough and pooled.is_valid:
                pooled.invalidate()
            pooled.close()
        finally:
            self._leave_room()

    def _leave_room(self) -> None:
        with self._room:
            self._taken -= 1
            self._room.notify()

    def close(self) -> None:
        self._pool.dispose()

    def _require_alive(self, connection: Any, record: Any, _: object) -> None:
        since_s = record.info.pop(_RETURNED, None)
        if since_s is None:
            return
        if time.monotonic() - since_s > self._server.idle_max_s or not client.answers(connection):
            raise exc.DisconnectionError("stale")


_shared: SharedConnections[MySQLConnections] = SharedConnections()


def _note_the_time(connection: Any, record: Any) -> None:
    if connection is not None:
        record.info[_RETURNED] = time.monotonic()
