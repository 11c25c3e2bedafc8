"""`StoreReference`: reaches the store of a `Memory` sink from the process where the sink is used.

The store lives in the driver's process. A task in another process on the same machine reaches it
over the loopback interface, with a random key that only a pickled sink carries.
"""

from __future__ import annotations

import os
import secrets
import threading
import uuid
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import AuthenticationError
from multiprocessing.managers import BaseManager
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakValueDictionary

from epochal.errors import Misconfigured
from epochal.sinks.memory.store import VERBS, Store

if TYPE_CHECKING:
    from multiprocessing.managers import Server


class StoreReference:
    """
    The store that was made with a sink.

    Pickled, it is an id and an address. In the process that made the store the id finds it; any
    other process, also a forked one, uses the address.
    """

    def __init__(self) -> None:
        self._id = uuid.uuid4().hex
        self._process = os.getpid()
        self._store: Store | None = Store()
        self._address: Address | None = None
        self._lock = threading.Lock()
        _made_here[self._id] = self

    def store(self) -> Store:
        if self._store is not None and self._process == os.getpid():
            return self._store
        if self._address is None:
            raise _unreachable(f"process {os.getpid()} was forked before the store was served")
        return _connected(self._address, os.getpid())

    def address(self) -> Address:
        """Where other processes reach the store, which is served from the first call on."""
        with self._lock:
            if self._address is None:
                self._address = _serve(self.store())
            return self._address

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (self._id, self._process, self.address())


_made_here: WeakValueDictionary[str, StoreReference] = WeakValueDictionary()


def _unpickled(identifier: str, process: int, address: Address) -> StoreReference:
    here = _made_here.get(identifier)
    if here is not None and process == os.getpid():
        return here
    remote = StoreReference.__new__(StoreReference)
    remote._id, remote._process = identifier, process
    remote._store, remote._address, remote._lock = None, address, threading.Lock()
    return remote


@dataclass(frozen=True, slots=True)
class Address:
    """Where a store is served, and the key to it."""

    host: str
    port: int
    key: bytes = field(repr=False)


class _Client(BaseManager):
    """Calls the verbs of a store in another process, by name."""


_Client.register("store", exposed=VERBS)


def _serve(store: Store) -> Address:
    """Serve a store for as long as this process lives."""

    class StoreServer(BaseManager):
        pass

    StoreServer.register("store", callable=lambda: store, exposed=VERBS)
    key = secrets.token_bytes(32)
    server: Server = StoreServer(address=("127.0.0.1", 0), authkey=key).get_server()
    threading.Thread(target=server.serve_forever, name="epochal-memory", daemon=True).start()
    host, port = cast("tuple[str, int]", server.address)
    return Address(host, port, key)


@cache
def _connected(address: Address, _process: int) -> Store:
    """A proxy of the store. One per process: a forked child must not use its parent's socket."""
    client = _Client(address=(address.host, address.port), authkey=address.key)
    try:
        client.connect()
        return cast("Store", client.store())  # type: ignore[attr-defined] # made by register()
    except (OSError, EOFError, AuthenticationError) as error:
        raise _unreachable(
            f"nothing answers for it at {address.host}:{address.port} ({error})"
        ) from error


def _unreachable(because: str) -> Misconfigured:
    return Misconfigured(
        f"the rows of a Memory sink live in the driver's process, and {because}",
        "Memory is for tests and laptops (local[*]), while the driver runs; on a cluster use Files "
        "or a database",
    )
