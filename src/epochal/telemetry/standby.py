"""Standbys of a pipeline: who holds its lease, and who waits for it.

Nothing is decided by what is here. A driver that takes over claims in the epoch log like any other
start, and is safe because of that alone (see `storage.leases`).

Each driver that runs as a standby keeps a small file beside the log, for people: its name, whether
it warms up, waits or works, and since when. One whose driver was killed is out of date, and is
removed by another.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from enum import Enum

from epochal.coordinator.environment import this_driver
from epochal.coordinator.journal import EpochLog
from epochal.errors import EpochalError
from epochal.logs import StoredLog
from epochal.storage import Store
from epochal.storage.leases import Lease

logger = logging.getLogger("epochal")

BESIDE = "standby"
"""The name of the store beside the log."""
_WRITTEN_EVERY_S = 10.0
_OVERDUE_FACTOR = 4


class Role(Enum):
    """What a standby is doing."""

    WARMING = "warming up"
    WAITING = "waiting"
    WORKING = "working"
    """It holds the lease: it claims, recovers and runs the query."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One driver that runs as a standby, as it last described itself."""

    driver: str
    role: str
    since: float
    """When it took on this role, by its own clock."""
    lease: str
    """Where the lease is."""
    at: float
    every_s: float

    def is_overdue(self, now: float) -> bool:
        return now - self.at > _OVERDUE_FACTOR * self.every_s


class Members:
    """The standbys of one pipeline, in a store beside its log."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def put(self, name: str, member: Member) -> None:
        self._store.put(name, json.dumps(asdict(member)).encode())

    def remove(self, name: str) -> None:
        self._store.delete([name])

    def all(self) -> dict[str, Member]:
        found = {}
        for name in self._store.names():
            with suppress(TypeError, ValueError):  # written by another release
                found[name] = Member(**json.loads(self._store.read(name) or b"null"))
        return found

    def present(self, *, now: float | None = None) -> list[Member]:
        """Those who have described themselves lately, workers first."""
        now = time.time() if now is None else now
        alive = [one for one in self.all().values() if not one.is_overdue(now)]
        return sorted(alive, key=lambda one: (one.role != Role.WORKING.value, one.since))

    def remove_overdue(self) -> None:
        now = time.time()
        for name, member in self.all().items():
            if member.is_overdue(now):
                self.remove(name)

    def clear(self) -> None:
        self._store.delete(self._store.names())


def members_of(log: EpochLog) -> Members | None:
    """None where the log ends with its process."""
    return Members(log.store.beside(BESIDE)) if isinstance(log, StoredLog) else None


def present_at(log: EpochLog) -> list[Member]:
    """The standbys of a pipeline that are there; none where they can't be asked for."""
    members = members_of(log)
    try:
        return [] if members is None else members.present()
    except (EpochalError, OSError):
        return []


class Presence:
    """Keeps the file of one standby up to date, in a thread that never delays it."""

    def __init__(self, members: Members | None, lease: Lease) -> None:
        self._members = members
        self._name = f"{secrets.token_hex(8)}.json"
        self._member = Member(
            driver=this_driver(),
            role=Role.WARMING.value,
            since=time.time(),
            lease=lease.location,
            at=time.time(),
            every_s=_WRITTEN_EVERY_S,
        )
        self._changed = threading.Event()
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="epochal-standby", daemon=True)
        self._thread.start()

    @property
    def role(self) -> Role:
        return Role(self._member.role)

    @role.setter
    def role(self, role: Role) -> None:
        if role is not self.role:
            self._member = replace(self._member, role=role.value, since=time.time())
            self._changed.set()

    def close(self) -> None:
        self._is_over = True
        self._changed.set()
        self._thread.join(_WRITTEN_EVERY_S)

    def _run(self) -> None:
        while not self._is_over:
            self._write()
            self._changed.wait(_WRITTEN_EVERY_S)
            self._changed.clear()
        self._write()

    def _write(self) -> None:
        if self._members is None:
            return
        try:
            if self._is_over:
                self._members.remove(self._name)
                return
            self._members.put(self._name, replace(self._member, at=time.time()))
            self._members.remove_overdue()
        except (EpochalError, OSError) as error:
            logger.debug("a standby could not describe itself", exc_info=error)
