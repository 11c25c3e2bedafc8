"""Files on their way as parts of bounded size, several at a time, while the next ones are encoded.

A part that is not the last must have a least size, so each open file holds up to one part in
memory. Of parts that are being sent there are never more than a few, whatever is written: a writer
that is faster than the network waits here.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Semaphore
from typing import Protocol

_AT_ONCE = 4
PART_BYTES = 8 * 1024 * 1024
_PARTS_MAX = 5_000
"""Half of what S3 allows: a row group may make a file larger than it was meant to be."""


class Receiver(Protocol):
    """What takes parts."""

    def begin_upload(self, key: str) -> str: ...

    def put_part(self, key: str, upload: str, number: int, content: bytes) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    upload: str
    parts: tuple[str, ...]
    bytes: int


class Sender:
    """Sends the parts of one attempt's files."""

    def __init__(self, receiver: Receiver, *, file_bytes_max: int) -> None:
        self._receiver = receiver
        self._pool = ThreadPoolExecutor(_AT_ONCE)
        self._room = Semaphore(_AT_ONCE)
        self.part_bytes = max(PART_BYTES, file_bytes_max // _PARTS_MAX)
        self.is_stopped = False

    def begin(self, key: str) -> Future[str]:
        return self._pool.submit(self._unless_stopped, lambda: self._receiver.begin_upload(key))

    def send(self, key: str, upload: Future[str], number: int, content: bytes) -> Future[str]:
        self._room.acquire()
        return self._pool.submit(self._send, key, upload, number, content)

    def stop(self) -> None:
        """Send nothing more, and return when nothing is on its way."""
        self.is_stopped = True
        self._pool.shutdown(wait=True)

    def _send(self, key: str, upload: Future[str], number: int, content: bytes) -> str:
        try:
            # It was submitted before this, and waits for nothing: it is running or done.
            begun = upload.result()
            return self._unless_stopped(
                lambda: self._receiver.put_part(key, begun, number, content)
            )
        finally:
            self._room.release()

    def _unless_stopped(self, call: Callable[[], str]) -> str:
        if self.is_stopped:
            raise OSError("the attempt was given up")
        return call()


class PartStream(io.RawIOBase):
    """One file: what is written is sent part by part."""

    def __init__(self, key: str, sender: Sender) -> None:
        super().__init__()
        self.key = key
        self._sender = sender
        self._waiting = bytearray()
        self._upload: Future[str] | None = None
        self._parts: list[Future[str]] = []
        self._size = 0

    @property
    def held_bytes(self) -> int:
        return len(self._waiting)

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def write(self, content: bytes) -> int:  # type: ignore[override] # Arrow gives bytes
        if self._sender.is_stopped:
            return len(content)
        self._waiting += content
        self._size += len(content)
        while len(self._waiting) >= self._sender.part_bytes:
            self._cut(self._sender.part_bytes)
        return len(content)

    def close(self) -> None:
        if not self.closed and not self._sender.is_stopped and (self._waiting or not self._parts):
            self._cut(len(self._waiting))
        super().close()

    def sent(self) -> Sent:
        """What became of it; waits for the parts that are on their way, and raises what failed."""
        parts = tuple(part.result() for part in self._parts)
        if self._upload is None or not self.closed:
            raise ValueError(f"{self.key} is still open")
        return Sent(upload=self._upload.result(), parts=parts, bytes=self._size)

    def begun(self) -> str | None:
        """Its upload, if it has one, once the sender has stopped."""
        if self._upload is None or self._upload.exception() is not None:
            return None
        return self._upload.result()

    def _cut(self, size: int) -> None:
        if self._upload is None:
            self._upload = self._sender.begin(self.key)
        part = bytes(memoryview(self._waiting)[:size])
        del self._waiting[:size]
        self._raise_what_failed()
        number = len(self._parts) + 1
        self._parts.append(self._sender.send(self.key, self._upload, number, part))

    def _raise_what_failed(self) -> None:
        for part in self._parts:
            if part.done():
                part.result()
