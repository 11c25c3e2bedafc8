"""A TCP proxy that can be cut: at once, after so many bytes, or when certain bytes come by."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

_READ_BYTES = 65536


class Proxy:
    """
    Passes bytes to a server until it is told not to. Each connection has two threads of its own.

    `cut_when` sees every piece that is about to be passed, with its direction; what it answers is
    done: None passes the piece, "before" cuts without passing it, "after" passes it and then cuts.
    """

    def __init__(self, port: int) -> None:
        self.to_port = port
        """Of the server; it may change for connections to come."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: set[socket.socket] = set()
        self._deaf: set[socket.socket] = set()
        """Ends that hear nothing any more."""
        self._lock = threading.Lock()
        self.cut_when: Callable[[bytes, bool], str | None] = lambda piece, to_server: None
        self.rewrite: Callable[[bytes, bool], bytes] = lambda piece, to_server: piece
        self.cuts = 0
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def connections(self) -> int:
        return len(self._open) // 2

    def cut(self) -> None:
        """End every connection, as when a cable is pulled and both sides notice."""
        with self._lock:
            gone, self._open = self._open, set()
        for one in gone:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def close(self) -> None:
        # Without it the thread that waits for a client would let one more in.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self.to_port), timeout=60)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            with self._lock:
                self._open |= {client, server}
            for source, sink, to_server in ((client, server, True), (server, client, False)):
                threading.Thread(
                    target=self._pass, args=(source, sink, to_server), daemon=True
                ).start()

    def _pass(self, source: socket.socket, sink: socket.socket, to_server: bool) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(_READ_BYTES):
                verdict = self.cut_when(piece, to_server)
                if verdict is not None:
                    # An answer may come back faster than this thread comes to the cut.
                    self._deaf.add(source)
                if verdict != "before" and sink not in self._deaf:
                    sink.sendall(self.rewrite(piece, to_server))
                if verdict is not None:
                    self.cuts += 1
                    self._cut_pair(source, sink)
                    return
        self._cut_pair(source, sink)

    def _cut_pair(self, *pair: socket.socket) -> None:
        with self._lock:
            self._open -= set(pair)
        for one in pair:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
