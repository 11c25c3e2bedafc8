"""`Acceptor`: takes connections, as many as the limits allow, and sees TLS handshakes through.

A connection that is refused is closed at once: it costs the broker two system calls. Whatever a
client does before its handshake ends is counted and timed here; from then on it is a `Connection`.
"""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
import ssl
from collections import Counter
from collections.abc import Callable

from epochal.broker.connection import Connection
from epochal.broker.core.settings import Settings
from epochal.errors import Misconfigured

_BACKLOG = 512
_ACCEPTS_AT_ONCE = 64
_TRY_AGAIN_S = 0.1
_EXHAUSTED = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))


def raise_descriptor_limit() -> None:
    """This process may have as many files and connections open as it may ask for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _descriptors_above(used: int) -> int:
    """How many are left at least: a new descriptor is the lowest that is free."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft - 1 - used


class Acceptor:
    def __init__(
        self,
        connect: Callable[[], Connection],
        settings: Settings,
        context: ssl.SSLContext | None,
        limit_reached: Callable[[str], None],
    ) -> None:
        self._connect = connect
        self._settings = settings
        self.context = context
        self._limit_reached = limit_reached
        raise_descriptor_limit()
        self._loop = asyncio.get_running_loop()
        self._sockets: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._by_address: Counter[str] = Counter()
        self.connections = 0
        self.handshakes = 0

    async def bind(self, host: str, port: int) -> int:
        """The port. Connections are taken from `start` on."""
        try:
            found = await self._loop.getaddrinfo(
                host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            for family, kind, protocol, _, place in dict.fromkeys(found):
                # By the protocol asyncio knows that it is TCP, and has small parts sent at once.
                listening = socket.socket(family, kind, protocol)
                self._sockets.append(listening)
                listening.setblocking(False)
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                listening.bind((place[0], port or place[1], *place[2:]))
                port = listening.getsockname()[1]
                listening.listen(_BACKLOG)
        except OSError as error:
            self.close()
            raise Misconfigured(
                f"the broker can't listen on {host}:{port}: {error.strerror}",
                hint="another port, or 0 for any free one",
            ) from error
        return port

    def start(self) -> None:
        for listening in self._sockets:
            self._loop.add_reader(listening, self._accept, listening)

    def close(self) -> None:
        for listening in self._sockets:
            self._loop.remove_reader(listening)
            listening.close()
        self._sockets.clear()
        for task in list(self._tasks):
            task.cancel()

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                accepted, peer = listening.accept()
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    self._limit_reached("descriptors_reserved")
                    self._loop.remove_reader(listening)
                    self._loop.call_later(_TRY_AGAIN_S, self._listen_again, listening)
                return
            host = peer[0]
            limit = self._reached(accepted, host)
            if limit:
                self._limit_reached(limit)
                accepted.close()
                continue
            self.connections += 1
            self._by_address[host] += 1
            accepted.setblocking(False)
            task = self._loop.create_task(self._welcome(accepted, host))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _listen_again(self, listening: socket.socket) -> None:
        if listening in self._sockets:
            self._loop.add_reader(listening, self._accept, listening)

    def _reached(self, accepted: socket.socket, host: str) -> str:
        """The limit that is in the way of one more connection."""
        settings = self._settings
        if self.connections >= settings.connections_max:
            return "connections_max"
        if _descriptors_above(accepted.fileno()) < settings.descriptors_reserved:
            return "descriptors_reserved"
        if self._by_address[host] >= settings.connections_per_address_max:
            return "connections_per_address_max"
        if self.context is not None and self.handshakes >= settings.handshakes_max:
            return "handshakes_max"
        return ""

    async def _welcome(self, accepted: socket.socket, host: str) -> None:
        self.handshakes += 1
        limit_s = self._settings.handshake_within_ms / 1000
        has_tls = self.context is not None
        try:
            await self._loop.connect_accepted_socket(
                lambda: self._counted(host),
                accepted,
                ssl=self.context,
                ssl_handshake_timeout=limit_s if has_tls else None,
            )
        except (OSError, asyncio.CancelledError) as error:
            # TLS errors and its timeout are OSErrors.
            if isinstance(error, ConnectionAbortedError):
                self._limit_reached("handshake_within_ms")
            self._left(host)
            accepted.close()
        finally:
            self.handshakes -= 1

    def _counted(self, host: str) -> Connection:
        connection = self._connect()
        connection.on_lost = lambda: self._left(host)
        return connection

    def _left(self, host: str) -> None:
        self.connections -= 1
        self._by_address[host] -= 1
        if not self._by_address[host]:
            del self._by_address[host]
