"""A broker of a few lines that says what a test tells it to, over a real socket."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from typing import Self

from epochal.kafka.messages import APIS, request_type, response_type
from epochal.kafka.messages.api_versions import ApiVersion, ApiVersionsResponse
from epochal.kafka.messages.headers import RequestHeader, ResponseHeader
from epochal.kafka.primitives import Message

HANG_UP = object()
"""What a handler returns to close the connection instead of answering."""
SILENCE = object()
"""What a handler returns to leave a request unanswered."""
Handler = Callable[[Message], object]


class FakeBroker:
    """Answers by API key; bytes are sent as they are, behind no header."""

    def __init__(self, handlers: dict[int, Handler], node_id: int = 1) -> None:
        self.handlers = {18: api_versions, **handlers}
        self.node_id = node_id
        self.seen: list[tuple[int, int, Message]] = []
        self.connections = 0
        self.frame_bytes_max = 1 << 30
        """A longer request is hung up on as soon as its size is known."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Without the shutdown, a thread that waits in `accept` would take one more client.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.hang_up()

    def hang_up(self) -> None:
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        self._sockets.clear()

    def asked(self, api_key: int) -> list[Message]:
        return [request for key, _, request in self.seen if key == api_key]

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._sockets.append(sock)
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            while True:
                (size,) = struct.unpack(">i", read_exactly(sock, 4))
                if size > self.frame_bytes_max or not self._answer(sock, read_exactly(sock, size)):
                    sock.close()
                    return
        except OSError:
            return

    def _answer(self, sock: socket.socket, frame: bytes) -> bool:
        key, version = struct.unpack_from(">hh", frame)
        kind = request_type(key)
        assert kind is not None
        flexible = version >= kind.FLEXIBLE_FROM
        header, at = RequestHeader.decode_head(2 if flexible else 1, frame)
        request = kind.decode(version, frame, at)
        self.seen.append((key, version, request))
        answer = self.handlers[key](request)
        if answer is HANG_UP:
            return False
        if isinstance(answer, bytes):
            sock.sendall(answer)
        elif isinstance(answer, Message):
            head = ResponseHeader(correlation_id=header.correlation_id)
            parts = head.encode(1 if flexible and key != 18 else 0) + answer.encode(version)
            body = b"".join(parts)
            sock.sendall(struct.pack(">i", len(body)) + body)
        return True


def read_exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = sock.recv(min(size - len(data), 1 << 16))
        if not piece:
            raise OSError("the peer has gone")
        data += piece
    return bytes(data)


def api_versions(_: Message) -> ApiVersionsResponse:
    """All requests that this package supports, in all versions."""
    kinds = {key: response_type(key) for key in APIS}
    return ApiVersionsResponse(
        api_keys=[
            ApiVersion(api_key=key, min_version=kind.VERSIONS[0], max_version=kind.VERSIONS[-1])
            for key, kind in kinds.items()
            if kind is not None
        ]
    )
