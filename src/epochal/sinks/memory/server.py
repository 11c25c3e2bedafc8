"""How a task in another process reaches a store that lives in the driver's process.

Only on one machine: the server listens on the loopback interface, and a random key, known to
whoever holds the pickled sink, lets callers in.
"""

from __future__ import annotations

import os
import secrets
import threading
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import AuthenticationError
from multiprocessing.managers import BaseManager
from typing import TYPE_CHECKING, cast

from epochal.errors import Misconfigured
from epochal.sinks.memory.store import VERBS, Store

if TYPE_CHECKING:
    from multiprocessing.managers import Server


@dataclass(frozen=True, slots=True)
class Address:
    """Where a store is served, and the key that opens it."""

    host: str
    port: int
    key: bytes = field(repr=False)


class _Client(BaseManager):
    """Knows the store's verbs by name only; the object stays in its own process."""


_Client.register("store", exposed=VERBS)


def serve(store: Store) -> Address:
    """Serve a store for as long as this process lives."""

    class Door(BaseManager):
        pass

    Door.register("store", callable=lambda: store, exposed=VERBS)
    key = secrets.token_bytes(32)
    server: Server = Door(address=("127.0.0.1", 0), authkey=key).get_server()
    threading.Thread(target=server.serve_forever, name="epochal-memory", daemon=True).start()
    host, port = cast("tuple[str, int]", server.address)
    return Address(host, port, key)


def connect(address: Address) -> Store:
    """The store at an address: a stand-in with the same verbs."""
    return _connected(address, os.getpid())


@cache
def _connected(address: Address, _process: int) -> Store:
    """One connection a process: a forked child must not speak on its parent's socket."""
    client = _Client(address=(address.host, address.port), authkey=address.key)
    try:
        client.connect()
        return cast("Store", client.store())  # type: ignore[attr-defined] # made by register()
    except (OSError, EOFError, AuthenticationError) as error:
        raise unreachable(
            f"nothing answers for it at {address.host}:{address.port} ({error})"
        ) from error


def unreachable(because: str) -> Misconfigured:
    return Misconfigured(
        f"the rows of a Memory sink live in the driver's process, and {because}",
        "Memory is for tests and laptops (local[*]), while the driver runs; on a cluster use Files "
        "or a database",
    )
