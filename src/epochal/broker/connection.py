"""`Connection`: one client's connection: frames in, answers out, in the order of the requests.

Requests of one connection are handled one after the other; while one of them waits (for more
records, for the rest of a group), those behind it wait too, as the protocol demands.

Nothing is written to the socket before the tick in which it was decided is on disk: answers are
buffered here, and `flush` sends them.
"""

from __future__ import annotations

import asyncio
import struct
import sys
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from epochal.broker import handlers
from epochal.broker.broker import Address, Call
from epochal.broker.handlers import Handler, api_versions
from epochal.broker.sasl import Login
from epochal.broker.standby_answers import refusal
from epochal.broker.storage.slices import FileSlice
from epochal.errors import EpochalError
from epochal.kafka.primitives import ALLOWED, Malformed, Message, Part, skip_tagged

if TYPE_CHECKING:
    from epochal.broker.tick_loop import TickLoop

_SIZE = struct.Struct(">i")
_HEAD = struct.Struct(">hhih")
_ANSWER = struct.Struct(">ii")
_API_VERSIONS = 18
_BEFORE_LOGIN = frozenset((17, 18, 36))
_OF_STANDBYS = frozenset((3, 10, 17, 18, 35, 36, 60))
"""Metadata, FindCoordinator, SaslHandshake, ApiVersions, DescribeLogDirs (of its own folder),
SaslAuthenticate, DescribeCluster: what a member of a cluster that is not the active answers."""
_KNOWN_BYTES = 6
"""The size of a request and its API key: enough to know whether it may be that large."""
_UNCOUNTED_BYTES = 1 << 14
_CHUNK_BYTES = 1 << 18
_JOINED_BYTES_MAX = 1 << 17
"""Bytes of a file that are not in memory are more than these."""
_ANSWERED_BYTES_MAX = 1 << 20
_ANSWERED_PARTS_MAX = 10_000
_WAITING_BYTES_MAX = 8 << 20
"""With more unhandled bytes than this, a connection is not read from."""


class Connection(asyncio.Protocol):
    def __init__(self, ticks: TickLoop, login: Login | None) -> None:
        self._ticks = ticks
        self._login = login
        self._handlers = handlers.table()
        self.on_lost: Callable[[], None] = _nothing
        self._transport: asyncio.Transport | None = None
        self._chunks: list[bytes] = []
        self._have = 0
        self._need = 4
        self._frames: deque[tuple[bytes, int]] = deque()
        """Requests, and where each begins in its bytes."""
        self._waiting_bytes = 0
        self._is_paused = False
        self._is_full = False
        """The client reads more slowly than it is answered."""
        self._is_ahead = False
        """Many answers are not sent yet: further requests wait for the next tick."""
        self._is_closing = False
        self._out: list[Part] = []
        self._out_bytes = 0
        self._sending: deque[Part | FileSlice] = deque()
        self.later: _LaterAnswer | None = None
        self._host = ""
        self._address = Address(host="", port=0)
        self._used_ms = self._since_ms = ticks.broker.now_ms
        self._frame_since_ms = -1
        """Since when a request has been arriving."""
        self.held_bytes = 0
        """Received and not handled yet."""

    # From the socket

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        peer = transport.get_extra_info("peername")
        self._host = peer[0] if peer else ""
        self._address = self._ticks.address_for(transport.get_extra_info("sockname"))
        # Bytes that the socket does not take at once are kept here, in pieces that are not copied.
        self._transport.set_write_buffer_limits(high=1, low=0)
        if not self._ticks.admit(self):
            self._transport.abort()

    @property
    def is_before_login(self) -> bool:
        return self._login is not None and self._login.user is None

    def connection_lost(self, _: Exception | None) -> None:
        self._transport = None
        self._drop_requests()
        self._sending.clear()
        self.on_lost()
        if self.later is not None:
            self.later.leave()
        self._ticks.dismiss(self)

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        self._send()

    def data_received(self, data: bytes) -> None:
        if self._is_closing:
            return
        self._used_ms = self._ticks.broker.now_ms
        if self._have:
            self._chunks.append(data)
            self._have += len(data)
            if self._have < self._need:
                self._hold()
                return
            data = b"".join(self._chunks)
            self._chunks.clear()
            self._have = 0
        at, end = 0, len(data)
        self._need = 4
        while end - at >= 4:
            (size,) = _SIZE.unpack_from(data, at)
            if not 0 < size <= self._ticks.always_allowed_bytes:
                limit = self._size_limit(size, data, at + 4)
                if limit:
                    self._ticks.refuse(self, limit)
                    return
            if end - at - 4 < size:
                is_known = end - at >= _KNOWN_BYTES
                self._need = size + 4 if is_known else min(_KNOWN_BYTES, size + 4)
                break
            at += 4
            # A large request comes alone, and is not copied again.
            is_alone = at == 4 and end - at == size
            self._frames.append((data, at) if is_alone else (data[at : at + size], 0))
            self._waiting_bytes += size
            at += size
        if at < end:
            if at or self._frame_since_ms < 0:
                self._frame_since_ms = self._used_ms
            self._chunks.append(data[at:] if at else data)
            self._have = end - at
        else:
            self._frame_since_ms = -1
        self._hold()
        if self._frames:
            self._ticks.wake(self)
            if self._waiting_bytes > _WAITING_BYTES_MAX and not self._is_paused:
                self._pause()

    def _size_limit(self, size: int, data: bytes, at: int) -> str:
        """The limit that a request is above, as soon as that is known."""
        settings = self._ticks.broker.settings
        if not 0 < size <= settings.frame_bytes_max:
            return "frame_bytes_max"
        if size > settings.frame_before_login_bytes_max and self.is_before_login:
            return "frame_before_login_bytes_max"
        is_produce = data[at : at + 2] in (b"", b"\0", b"\0\0")
        return "request_bytes_max" if size > settings.request_bytes_max and not is_produce else ""

    def _hold(self) -> None:
        """Have what is received and not handled counted, if it is worth counting."""
        held = self._have + self._waiting_bytes
        if held <= _UNCOUNTED_BYTES:
            held = 0
        if held != self.held_bytes:
            grown, self.held_bytes = held - self.held_bytes, held
            self._ticks.hold(grown)

    def _drop_requests(self) -> None:
        self._frames.clear()
        self._chunks.clear()
        self._have = self._waiting_bytes = 0
        self._frame_since_ms = -1
        self._hold()

    def _pause(self) -> None:
        if self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()

    # In a tick

    def work(self) -> None:
        """Handle all requests that have arrived, up to one that waits or the end of the tick."""
        frames = self._frames
        while frames and self.later is None and not (self._is_full or self._is_ahead):
            if self._ticks.is_late():
                self._ticks.wake(self)
                break
            frame, start = frames.popleft()
            self._waiting_bytes -= len(frame) - start
            self._ticks.requests += 1
            try:
                self._handle(frame, start)
            except (EpochalError, struct.error, IndexError, UnicodeDecodeError) as error:
                self._ticks.log(f"a request of {self._host} can't be read: {error}", "malformed")
                self.close()
                return
        self._hold()
        if self._is_paused and self._waiting_bytes < _WAITING_BYTES_MAX:
            self._is_paused = False
            if self._transport is not None:
                self._transport.resume_reading()

    def _handle(self, frame: bytes, start: int) -> None:
        api_key, version, correlation_id, size = _HEAD.unpack_from(frame, start)
        at = start + _HEAD.size
        client_id = ""
        if size > 0:
            client_id = frame[at : at + size].decode()
            at += size
        handler = self._handlers.get(api_key)
        if handler is None or version not in handler.versions:
            if api_key == _API_VERSIONS:
                is_newer = self._ticks.broker.is_newer_protocol
                self._put(api_versions.too_new(is_newer=is_newer), 0, correlation_id, False)
                return
            raise Malformed(f"API key {api_key} version {version} is not supported")
        if self._login is not None and self._login.user is None and api_key not in _BEFORE_LOGIN:
            raise Malformed(f"API key {api_key} before authentication")
        is_flexible = version >= handler.request.FLEXIBLE_FROM
        request = self._decoded(handler.request, version, frame, at)
        has_tags = is_flexible and api_key != _API_VERSIONS
        if api_key not in _OF_STANDBYS and not self._ticks.broker.is_leading:
            answer = refusal(request, version)
            if answer is None:
                self.close()  # the client asks for metadata then, and is shown the active
            else:
                self._put(answer, version, correlation_id, has_tags)
            return
        self._call(
            handler,
            request,
            version,
            correlation_id=correlation_id,
            client_id=client_id,
            has_tags=has_tags,
        )

    def _decoded(self, kind: type[Message], version: int, frame: bytes, at: int) -> Message:
        ALLOWED.elements = self._ticks.broker.settings.request_elements_max
        try:
            if version >= kind.FLEXIBLE_FROM:
                at = skip_tagged(frame, at)
            # Bytes behind it are ignored: some clients send more than a version has.
            return kind.decode_head(version, frame, at)[0]
        except Malformed:
            if ALLOWED.elements < len(frame):
                self._ticks.broker.limit_reached("request_elements_max")
            raise
        finally:
            ALLOWED.elements = sys.maxsize

    def _call(
        self,
        handler: Handler,
        request: Message,
        version: int,
        *,
        correlation_id: int,
        client_id: str,
        has_tags: bool,
    ) -> None:
        def later() -> _LaterAnswer:
            self.later = _LaterAnswer(self, version, correlation_id, has_tags, self._ticks)
            return self.later

        call = Call(
            self._ticks.broker,
            version,
            client_id,
            self._host,
            self._address,
            self._login,
            later,
        )
        answer = handler.handle(call, request)
        if answer is not None:
            self._put(answer, version, correlation_id, has_tags)

    def _put(self, answer: Message, version: int, correlation_id: int, has_tags: bool) -> None:
        parts: list[Part] = []
        try:
            answer.ENCODERS[version](parts.append, answer)
        except (EpochalError, struct.error) as error:
            # Of an answer that is given later, too, which no request of this client leads to.
            self._ticks.log(f"an answer for {self._host} can't be written: {error}", "answers")
            self.close()
            return
        if has_tags:
            parts.insert(0, b"\x00")
        size = sum(map(len, parts)) + 4
        out = self._out
        if not out:
            self._ticks.has_answers(self)
        out.append(_ANSWER.pack(size, correlation_id))
        out += parts
        self._out_bytes += size
        if self._out_bytes > _ANSWERED_BYTES_MAX or len(out) > _ANSWERED_PARTS_MAX:
            self._is_ahead = True

    def answer_later(self, later: _LaterAnswer, answer: Message | None) -> None:
        if self.later is later:
            self.later = None
            if answer is not None:
                self._put(answer, later.version, later.correlation_id, later.has_tags)
            if self._login is not None and self._login.has_failed:
                self.close()
            elif self._login is not None:
                self._ticks.logged_in(self)
            if self._frames:
                self._ticks.wake(self)

    def flush(self) -> None:
        """The tick is durable: send its answers."""
        out, self._out = self._out, []
        self._is_ahead = False
        if self._out_bytes <= _JOINED_BYTES_MAX:
            self._sending.append(b"".join(out))
        else:
            self._sending += _chunks(out)
        self._out_bytes = 0
        self._used_ms = self._ticks.broker.now_ms
        self._send()

    def _send(self) -> None:
        """Send as much as the socket takes; the rest follows when it is ready."""
        if self._transport is None:
            return
        while self._sending and not self._is_full:
            part = self._sending.popleft()
            if isinstance(part, FileSlice):
                self._send_file(part)
            else:
                self._transport.write(part)
        if self._sending or self._transport is None:
            return
        if self._is_closing:
            self._transport.close()
        elif self._frames and self.later is None and not self._is_full:
            self._ticks.wake(self)

    def _send_file(self, part: FileSlice) -> None:
        if self._transport is None:
            return
        try:
            # What the socket does not take waits for it, and so does the rest.
            while len(part) and not self._is_full:
                self._transport.write(part.take())
        except OSError as error:
            self._ticks.log(f"an answer for {self._host} can't be sent: {error}", "sending")
            self._sending.clear()
            self._transport.abort()
            return
        if len(part):
            self._sending.appendleft(part)

    def limit_passed(self, now_ms: int) -> str:
        """The limit in time that it is beyond."""
        settings = self._ticks.broker.settings
        if self._used_ms < now_ms - settings.connection_idle_max_ms and self.later is None:
            return "connection_idle_max_ms"
        if 0 <= self._frame_since_ms < now_ms - settings.frame_within_ms:
            return "frame_within_ms"
        if self.is_before_login and self._since_ms < now_ms - settings.login_within_ms:
            return "login_within_ms"
        return ""

    def close(self) -> None:
        """Close after sending the answers that are durable."""
        self._drop_requests()
        self._is_closing = True
        if self._transport is not None and not self._out and not self._sending:
            self._transport.abort()

    def abort(self) -> None:
        """Cut it at once: answers that are not sent yet never leave."""
        self._drop_requests()
        self._is_closing = True
        self._out.clear()
        self._sending.clear()
        if self._transport is not None:
            self._transport.abort()


def _chunks(parts: list[Part]) -> list[Part | FileSlice]:
    """The same bytes: small parts joined, large ones sliced without a copy."""
    found: list[Part | FileSlice] = []
    small: list[Part] = []
    for part in parts:
        if isinstance(part, FileSlice):
            found += (b"".join(small), part)
            small = []
            continue
        if len(part) < _CHUNK_BYTES // 4:
            small.append(part)
            continue
        found.append(b"".join(small))
        small = []
        view = memoryview(part)
        found += [view[at : at + _CHUNK_BYTES] for at in range(0, len(part), _CHUNK_BYTES)]
    found.append(b"".join(small))
    return found


def _nothing() -> None:
    """Nobody counts it."""


class _LaterAnswer:
    """An answer that is given later, in its place in the order of requests."""

    __slots__ = (
        "_connection",
        "_gone",
        "_ticks",
        "_timer",
        "correlation_id",
        "has_tags",
        "is_over",
        "version",
    )

    def __init__(
        self,
        connection: Connection,
        version: int,
        correlation_id: int,
        has_tags: bool,
        ticks: TickLoop,
    ) -> None:
        self.version = version
        self.correlation_id = correlation_id
        self.has_tags = has_tags
        self.is_over = False
        self._connection = connection
        self._ticks = ticks
        self._timer: asyncio.TimerHandle | None = None
        self._gone: Callable[[], None] | None = None

    def answer(self, message: Message) -> None:
        if self.is_over:
            return
        self._end()
        self._connection.answer_later(self, message)

    def drop(self) -> None:
        if not self.is_over:
            self._end()
            self._connection.answer_later(self, None)

    def after(self, delay_ms: int, then: Callable[[], None], gone: Callable[[], None]) -> None:
        self._gone = gone
        self._timer = self._ticks.call_later(delay_ms / 1000, then)

    def leave(self) -> None:
        """The client has disconnected."""
        if not self.is_over:
            self._end()
            if self._gone is not None:
                self._gone()

    def _end(self) -> None:
        self.is_over = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
