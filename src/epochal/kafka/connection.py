"""`Connection`: one connection to one broker, with many requests under way at a time.

A broker answers the requests of a connection in their order, so the oldest one waiting owns the
next frame. Nothing here runs in the background: while a caller waits for an answer, or for room to
send, bytes move in both directions, so two full sockets can't wait for each other.

For use by one thread at a time.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from epochal.clock import Clock
from epochal.errors import EpochalError, Misconfigured, OutcomeUnknown, TryAgain
from epochal.kafka.messages.headers import RequestHeader, ResponseHeader
from epochal.kafka.primitives import Malformed, Message, Part, Request

Answer = TypeVar("Answer", bound=Message)

_API_VERSIONS = 18
_SIZE = struct.Struct(">i")
_READ_BYTES = 1 << 18
_PARTS_PER_CALL = 64
_TLS_ALERT = 0x15030000
_AUTHORITY = "ca_file= names the authority of its certificate, unless the machine trusts it"
_TLS_AT_ALL = "is this a listener with TLS, and up? leave tls= out where it is without"
_BUFFERED_BYTES_MAX = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    connect_timeout_s: float = 10.0
    request_timeout_s: float = 30.0
    frame_bytes_max: int = 1 << 28
    in_flight_max: int = 128
    """Requests under way on one connection; sending one more waits for an answer."""


DEFAULT_LIMITS = Limits()


class Pending(Generic[Answer]):
    """A request under way."""

    def __init__(
        self, connection: Connection, request: Request[Answer], version: int, deadline: float
    ) -> None:
        self.request = request
        self.version = version
        self.deadline = deadline
        self.correlation_id = -1
        self.ends_at = 0
        """How many bytes the connection has sent once this request is out as a whole."""
        self.frame: bytes | None = None
        self.error: EpochalError | None = None
        self._connection = connection

    @property
    def is_done(self) -> bool:
        return self.frame is not None or self.error is not None

    def wait(self) -> bytes:
        """The answer's frame, behind its size. Waits until the deadline at most."""
        while not self.is_done:
            self._connection.wait_until(lambda: self.is_done, self.deadline)
        if self.error is not None:
            raise self.error
        return self.frame or b""

    def result(self) -> Answer:
        """
        The answer. `TryAgain` if the request never left as a whole, `OutcomeUnknown` if it did
        and no answer came.
        """
        frame = self.wait()
        flexible = self.version >= self.request.FLEXIBLE_FROM
        # So that an old broker can be understood, this one API never got the newer header.
        header_version = 1 if flexible and self.request.API_KEY != _API_VERSIONS else 0
        _, at = ResponseHeader.decode_head(header_version, frame)
        return self.request.decode_response(self.version, frame, at)


class Connection:
    """A connected socket, and the requests that wait for their answers."""

    def __init__(
        self,
        sock: socket.socket,
        *,
        peer: str,
        client_id: str,
        clock: Clock,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        sock.setblocking(False)
        self.peer = peer
        self.limits = limits
        self._socket = sock
        self._clock = clock
        self._client_id = client_id
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._next_id = 0
        self._waiting: deque[Pending[Message]] = deque()
        self._out: deque[memoryview] = deque()
        self._queued_bytes = 0
        self._sent_bytes = 0
        self._in = bytearray()
        self._broken: EpochalError | None = None
        # Also for a client that is dropped without being closed, and at the end of the process.
        self._close = weakref.finalize(self, sock.close)

    @property
    def is_open(self) -> bool:
        return self._broken is None

    @property
    def cause(self) -> EpochalError | None:
        """Why this connection ended, if it did."""
        return self._broken

    @property
    def in_flight(self) -> int:
        return len(self._waiting)

    def send(
        self, request: Request[Answer], version: int, *, timeout_s: float | None = None
    ) -> Pending[Answer]:
        """
        Send a request, or queue what does not fit the socket now. Waits only for room.

        A request that has no answer (Produce with acks=0) must not be sent: it never finishes.
        """
        left = self.limits.request_timeout_s if timeout_s is None else timeout_s
        pending = Pending(self, request, version, self._clock.monotonic() + left)
        if not self._waiting:
            self._guarded(self._notice_end)
        self.wait_until(self._has_room, pending.deadline)
        if self._broken is not None:
            raise self._failure(is_sent=False)
        pending.correlation_id = self._next_id
        self._next_id = (self._next_id + 1) & 0x7FFFFFFF
        self._queue(self._framed(request, version, pending.correlation_id))
        pending.ends_at = self._queued_bytes
        self._waiting.append(pending)  # type: ignore[arg-type]  # only waits here, type forgotten
        self._guarded(self._write)
        return pending

    def _notice_end(self) -> None:
        """Brokers close idle connections: seen before a request is sent, that leaves no doubt."""
        self._poll.modify(self._socket, select.POLLIN)
        if self._poll.poll(0):
            self._read()

    def _has_room(self) -> bool:
        unsent = self._queued_bytes - self._sent_bytes
        full = len(self._waiting) >= self.limits.in_flight_max or unsent > _BUFFERED_BYTES_MAX
        return self._broken is not None or not full

    def _framed(self, request: Request[Answer], version: int, correlation_id: int) -> list[Part]:
        header = RequestHeader(
            request_api_key=request.API_KEY,
            request_api_version=version,
            correlation_id=correlation_id,
            client_id=self._client_id,
        )
        parts = header.encode(2 if version >= request.FLEXIBLE_FROM else 1)
        parts += request.encode(version)
        parts.insert(0, _SIZE.pack(sum(len(part) for part in parts)))
        return parts

    def _queue(self, parts: list[Part]) -> None:
        """Small parts are joined; large ones are sent from where they are."""
        small: list[Part] = []
        for part in parts:
            self._queued_bytes += len(part)
            if len(part) < _READ_BYTES // 64:
                small.append(part)
                continue
            if small:
                self._out.append(memoryview(b"".join(small)))
                small = []
            self._out.append(memoryview(part))
        if small:
            self._out.append(memoryview(b"".join(small)))

    def wait_until(self, done: Callable[[], bool], deadline: float) -> None:
        """Move bytes until `done`; a deadline that passes first breaks the connection."""
        while not done() and self._broken is None:
            left = deadline - self._clock.monotonic()
            if left <= 0:
                self._break(f"no answer from {self.peer} in time")
                return
            self._poll.modify(self._socket, select.POLLIN | (select.POLLOUT if self._out else 0))
            if self._poll.poll(left * 1000):
                self._guarded(self._write)
                self._guarded(self._read)

    def drain(self) -> None:
        """Wait until every request under way is answered, or its connection broken."""
        if self._waiting:
            last = self._waiting[-1]
            self.wait_until(lambda: last.is_done, last.deadline)

    def _guarded(self, move: Callable[[], None]) -> None:
        if self._broken is not None:
            return
        try:
            move()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError):
            pass
        except ssl.SSLEOFError:
            self._break(f"{self.peer} closed the connection")
        except ssl.SSLError as error:
            self._break_with(tls_error(self.peer, error))
        except OSError as error:
            self._break(f"the connection to {self.peer} failed: {error}")
        except Malformed as error:
            self._break_with(error)

    def _write(self) -> None:
        while self._out:
            if isinstance(self._socket, ssl.SSLSocket):
                sent = self._socket.send(self._out[0])
            else:
                batch = [self._out[i] for i in range(min(len(self._out), _PARTS_PER_CALL))]
                sent = self._socket.sendmsg(batch)
            self._sent_bytes += sent
            while sent:
                first = self._out[0]
                if sent < len(first):
                    self._out[0] = first[sent:]
                    break
                sent -= len(first)
                self._out.popleft()

    def _read(self) -> None:
        while True:
            data = self._socket.recv(_READ_BYTES)
            if not data:
                self._break(f"{self.peer} closed the connection")
                return
            self._in += data
            self._take_frames()
            if len(data) < _READ_BYTES and not isinstance(self._socket, ssl.SSLSocket):
                return

    def _take_frames(self) -> None:
        at = 0
        while len(self._in) - at >= _SIZE.size:
            (size,) = _SIZE.unpack_from(self._in, at)
            if not _SIZE.size <= size <= self.limits.frame_bytes_max:
                raise self._frame_refused(size)
            end = at + _SIZE.size + size
            if end > len(self._in):
                break
            self._give(bytes(memoryview(self._in)[at + _SIZE.size : end]))
            at = end
        if at:
            del self._in[:at]

    def _frame_refused(self, size: int) -> Malformed:
        hint = ""
        if size & 0x7FFF0000 == _TLS_ALERT:
            hint = f"this listener uses TLS: tls=True; {_AUTHORITY}"
        return Malformed(
            f"{self.peer} announced a frame of {size} bytes, above {self.limits.frame_bytes_max}"
            if size > 0
            else f"{self.peer} announced a frame of {size} bytes",
            hint,
        )

    def _give(self, frame: bytes) -> None:
        (correlation_id,) = _SIZE.unpack_from(frame)
        if not self._waiting or self._waiting[0].correlation_id != correlation_id:
            raise Malformed(f"{self.peer} answered request {correlation_id}, which was not next")
        self._waiting.popleft().frame = frame

    def _failure(self, *, is_sent: bool) -> EpochalError:
        cause = self._broken or TryAgain(f"the connection to {self.peer} is closed")
        if isinstance(cause, Misconfigured) and not is_sent:
            return cause
        if is_sent:
            return OutcomeUnknown(cause.message, cause.hint)
        return TryAgain(cause.message, cause.hint)

    def _break(self, because: str) -> None:
        self._break_with(TryAgain(because))

    def _break_with(self, cause: EpochalError) -> None:
        """End this connection, and every request under way with an error."""
        if self._broken is not None:
            return
        self._broken = cause
        for pending in self._waiting:
            pending.error = self._failure(is_sent=pending.ends_at <= self._sent_bytes)
        self._waiting.clear()
        self._out.clear()
        self._close()

    def close(self) -> None:
        self._break(f"the connection to {self.peer} was closed")


def tls_error(peer: str, error: ssl.SSLError) -> EpochalError:
    """A certificate that is refused stays refused; other trouble may pass."""
    reason = (error.reason or str(error)).replace("_", " ").lower()
    message = f"TLS with {peer} failed: {reason}"
    if isinstance(error, ssl.SSLCertVerificationError):
        return Misconfigured(
            f"the certificate of {peer} is refused: {error.verify_message}",
            hint=f"{_AUTHORITY}; and the host name that the certificate was made for",
        )
    if "alert" in reason or "wrong version" in reason or "record layer" in reason:
        return Misconfigured(
            message,
            hint="certificate_file= and key_file= where the listener asks for a client "
            "certificate; leave tls= out where it is not one of TLS",
        )
    return TryAgain(message, _TLS_AT_ALL)


def dial(host: str, port: int, context: ssl.SSLContext | None, timeout_s: float) -> socket.socket:
    """A connected socket, encrypted where there is a context. Each address of the host is tried."""
    peer = f"{host}:{port}"
    try:
        plain = socket.create_connection((host, port), timeout=timeout_s)
    except OSError as error:
        raise TryAgain(f"can't connect to {peer}: {error}") from error
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if context is None:
        return plain
    try:
        return context.wrap_socket(plain, server_hostname=host)
    except ssl.SSLError as error:
        plain.close()
        raise tls_error(peer, error) from error
    except OSError as error:
        plain.close()
        raise TryAgain(f"TLS with {peer} failed: {error}", _TLS_AT_ALL) from error
