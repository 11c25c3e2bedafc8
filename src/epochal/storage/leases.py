"""Leases: which of several processes is to try first. Nothing is safe because of a lease.

What keeps two drivers apart is the epoch log: a claim fences every earlier driver (I7). A lease
only spares the others the try. One that lies, that two hold or nobody, costs takeovers and never a
row; so a process that can't ask for its lease goes on, and stops where it learns that another has
it.

    back end            how                                            a dead holder is noticed
    folder, SQLite      a lock of the operating system on a file       at once; one machine only
    PostgreSQL          an advisory lock of a session                  at once; a dead host in 10 s
    etcd                a key under a lease of etcd                    after 5 s
    others              numbered slots, one filled every 3 s           after 10 s

Slots work like those of the epoch log. The holder fills the next one with every beat; a waiter that
has seen no new slot for `ttl_s`, by its own clock that never goes back, fills the next one itself:

    holder A                 waiter B                            filled slots
    beat: fills 7                                                7
    stopped                  sees 7                              7
                             10 s later still 7: fills 8         7, 8
    goes on: 8 is taken, and not by A: it has lost the lease     7, 8
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, runtime_checkable

from epochal.errors import EpochalError
from epochal.storage.store import Store

logger = logging.getLogger("epochal")

LEASE_TTL_S = 10.0
_BEATS_PER_TTL = 3
_SLOTS_KEPT = 2


class Lease(Protocol):
    """
    Held by one process at a time, as far as its store can know. Used by one thread at a time.

    Every verb may raise `TryAgain`, `OutcomeUnknown` or `OSError` where the store is away; whether
    the lease is held is then as it was.
    """

    look_every_s: float
    """How often a waiter calls `acquire`."""
    renew_every_s: float
    """How often the holder calls `renew`."""

    @property
    def location(self) -> str:
        """Where it is, for messages. Never a secret."""

    def acquire(self, holder: str) -> bool:
        """
        Take the lease if nobody holds it. A waiter calls it again and again; that it has waited
        long enough for a holder that is silent may be known from earlier calls only.
        """

    def renew(self) -> bool:
        """Prolong it. False: it is lost, and another may hold it."""

    def release(self) -> None:
        """Let go, so that a waiter need not wait for the end of its time. May be repeated."""

    def close(self) -> None:
        """Release, and close connections."""


@runtime_checkable
class LeasingStore(Protocol):
    """A store whose back end has something better than slots."""

    def lease(self) -> Lease:
        """With connections of its own. Opening it takes nothing."""


def lease_at(store: Store) -> Lease:
    """A lease at the location of a store."""
    return store.lease() if isinstance(store, LeasingStore) else SlotLease(store.beside("lease"))


class FileLease:
    """A lock on a local file. It ends with the process, however that ends."""

    look_every_s = 0.25
    renew_every_s = 2.0

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    @property
    def location(self) -> str:
        return str(self._path)

    def acquire(self, holder: str) -> bool:
        del holder
        self.release()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o660)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return False
        self._descriptor = descriptor
        # It may have been removed between the two calls: the lock is then on nobody's file.
        return self.renew()

    def renew(self) -> bool:
        if self._descriptor is None:
            return False
        try:
            is_same = os.path.samestat(os.fstat(self._descriptor), self._path.stat())
        except FileNotFoundError:
            is_same = False
        if not is_same:
            self.release()
        return is_same

    def release(self) -> None:
        # The file stays: a waiter may have opened it already.
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def close(self) -> None:
        self.release()


class SlotLease:
    """Numbered slots in any store, each filled once. Clocks of different machines don't matter."""

    def __init__(
        self,
        store: Store,
        *,
        ttl_s: float = LEASE_TTL_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._ttl_s = ttl_s
        self.renew_every_s = self.look_every_s = ttl_s / _BEATS_PER_TTL
        self._monotonic = monotonic
        self._nonce = secrets.token_hex(8)
        self._number: int | None = None
        """The newest slot, where it is this process's."""
        self._holder = ""
        self._seen: tuple[int, float] | None = None
        """The newest slot that another filled, and when it was seen first."""

    @property
    def location(self) -> str:
        return self._store.location

    def acquire(self, holder: str) -> bool:
        self._number, self._holder = None, holder
        newest = self._newest()
        if newest is not None and not self._is_free(newest):
            return False
        return self._fill((newest or 0) + 1)

    def renew(self) -> bool:
        return self._number is not None and self._fill(self._number + 1)

    def release(self) -> None:
        number, self._number = self._number, None
        if number is not None:
            self._store.put_if_absent(_name(number + 1), self._content(is_free=True))

    def close(self) -> None:
        self.release()
        self._store.close()

    def _is_free(self, newest: int) -> bool:
        content = self._store.read(_name(newest))
        if content is None:
            return False  # deleted since: a newer one is there
        if json.loads(content)["is_free"]:
            return True
        now = self._monotonic()
        if self._seen is None or self._seen[0] != newest:
            self._seen = (newest, now)
        return now - self._seen[1] >= self._ttl_s

    def _fill(self, number: int) -> bool:
        """Fill a slot, and look that none is above it: an old slot may have been deleted."""
        is_mine = self._store.put_if_absent(_name(number), self._content()) or (
            self._is_own(self._store.read(_name(number)))
        )
        if not is_mine or self._newest() != number:
            self._number, self._seen = None, None
            return False
        self._number = number
        old = [name for name in self._store.names() if name < _name(number - _SLOTS_KEPT)]
        if old:
            self._store.delete(old)
        return True

    def _newest(self) -> int | None:
        names = self._store.names()
        return int(names[-1].removesuffix(".json")) if names else None

    def _content(self, *, is_free: bool = False) -> bytes:
        fields = {"holder": self._holder, "nonce": self._nonce, "is_free": is_free}
        return json.dumps(fields).encode()

    def _is_own(self, content: bytes | None) -> bool:
        """A fill whose answer was lost is repeated, and finds itself."""
        return content is not None and bool(json.loads(content)["nonce"] == self._nonce)


def _name(number: int) -> str:
    return f"{number:020d}.json"


class KeptLease:
    """A lease that a thread renews as long as it is held."""

    def __init__(self, lease: Lease, holder: str) -> None:
        self._lease = lease
        self._holder = holder
        self._is_over = threading.Event()
        self.is_lost = threading.Event()
        """Another process has the lease."""
        self._thread = threading.Thread(target=self._run, name="epochal-lease", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Stop renewing, and let go."""
        self._is_over.set()
        self._thread.join()
        try:
            self._lease.release()
        except (EpochalError, OSError) as error:
            logger.warning("%s: the lease ends by itself: %s", self._lease.location, error)

    def _run(self) -> None:
        is_silent = False
        while not self._is_over.wait(self._lease.renew_every_s):
            try:
                # One that ended while its store was away may be free yet.
                is_held = self._lease.renew() or self._lease.acquire(self._holder)
                is_silent = False
            except (EpochalError, OSError) as error:
                # No answer is no loss: the log fences this driver if another takes over (I7).
                if not is_silent:
                    logger.warning("%s: the lease is not renewed: %s", self._lease.location, error)
                is_silent = True
                continue
            if not is_held:
                self.is_lost.set()
                return
