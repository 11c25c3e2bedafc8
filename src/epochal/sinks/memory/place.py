"""Which store a sink means, wherever the sink was carried."""

from __future__ import annotations

import os
import threading
import uuid
from typing import Any
from weakref import WeakValueDictionary

from epochal.sinks.memory.server import Address, connect, serve, unreachable
from epochal.sinks.memory.store import Store


class Place:
    """
    The store that was made with the sink.

    Pickled, it is an id and an address. In the process that made the store the id finds it; any
    other process, also a forked one, goes by the address.
    """

    def __init__(self) -> None:
        self._id = uuid.uuid4().hex
        self._process = os.getpid()
        self._store: Store | None = Store()
        self._address: Address | None = None
        self._serving = threading.Lock()
        _made_here[self._id] = self

    def store(self) -> Store:
        if self._store is not None and self._process == os.getpid():
            return self._store
        if self._address is None:
            raise unreachable(f"process {os.getpid()} was forked before it was served")
        return connect(self._address)

    def address(self) -> Address:
        """Where other processes find the store, which is served from the first time on."""
        with self._serving:
            if self._address is None:
                self._address = serve(self.store())
            return self._address

    def __reduce__(self) -> tuple[Any, ...]:
        return _placed, (self._id, self._process, self.address())


_made_here: WeakValueDictionary[str, Place] = WeakValueDictionary()


def _placed(identifier: str, process: int, address: Address) -> Place:
    """The same place again, in this process or in another one."""
    here = _made_here.get(identifier)
    if here is not None and process == os.getpid():
        return here
    away = Place.__new__(Place)
    away._id, away._process = identifier, process
    away._store, away._address, away._serving = None, address, threading.Lock()
    return away
