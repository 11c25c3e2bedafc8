"""Members ask each other how they are: a line of JSON over TCP, authenticated by a shared secret.

An answer decides only who *tries* to take over, never who is the active: a member that lies or is
not heard costs a takeover, not a record. It comes from the event loop itself, past the ticks: an
active that waits for its store is alive.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
from collections.abc import Callable
from typing import Any

_LINE_BYTES_MAX = 1 << 14
_IDLE_S = 60.0
SILENCE_S = 2.0
_SILENCE_MAX_S = 60.0

Status = dict[str, Any]


def _mac(secret: bytes, nonce: str, status: Status) -> str:
    text = json.dumps([nonce, status], sort_keys=True, separators=(",", ":"))
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()


async def serve_status(
    host: str, port: int, secret: bytes, status: Callable[[Status], Status]
) -> asyncio.Server:
    """Answer every line with the status of this member; a line has that of a member that asks."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await asyncio.wait_for(reader.readline(), _IDLE_S):
                nonce, mac, text = line.decode("ascii").strip().split(" ", 2)
                asker: Status = json.loads(text)
                if not hmac.compare_digest(mac, _mac(secret, nonce, asker)):
                    return
                now = status(asker)
                reply = {"status": now, "mac": _mac(secret, nonce, now)}
                writer.write(json.dumps(reply).encode() + b"\n")
                await writer.drain()
        except (OSError, TimeoutError, ValueError, asyncio.CancelledError):
            return
        finally:
            writer.close()

    return await asyncio.start_server(answer, host, port, limit=_LINE_BYTES_MAX)


class Peer:
    """A connection to another member, kept open."""

    def __init__(self, host: str, port: int, secret: bytes) -> None:
        self.address = (host, port)
        self._secret = secret
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    @property
    def is_cut(self) -> bool:
        """Whether the other end has closed the connection, as the end of its process does."""
        if self._streams is None:
            return False
        reader, _ = self._streams
        return reader.at_eof() or reader.exception() is not None

    async def ask(self, asker: Status) -> Status:
        """
        Its status. A member that asks says its own; others, {}. Raises `ConnectionError` where
        nobody listens there, `ValueError` where it is no member of this cluster.
        """
        try:
            return await self._ask(asker)
        except BaseException:
            self.close()
            raise

    async def _ask(self, asker: Status) -> Status:
        if self._streams is None:
            self._streams = await asyncio.open_connection(*self.address, limit=_LINE_BYTES_MAX)
        reader, writer = self._streams
        nonce = secrets.token_hex(16)
        line = f"{nonce} {_mac(self._secret, nonce, asker)} {json.dumps(asker)}\n"
        writer.write(line.encode())
        await writer.drain()
        line_back = await reader.readline()
        if not line_back:
            raise ConnectionResetError("the connection was closed")
        reply = json.loads(line_back)
        status: Status | None = reply.get("status") if isinstance(reply, dict) else None
        if status is None or not hmac.compare_digest(
            str(reply.get("mac")), _mac(self._secret, nonce, status)
        ):
            raise ValueError("not a member of this cluster")
        return status

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


class Hearing:
    """
    What a standby has heard of the active. Members that can't reach each other, though both reach
    the store, would take over from each other without end: from an active that was never heard it
    is done later every time.
    """

    def __init__(self, now: float) -> None:
        self.at = now
        """When it was last heard, or could have been."""
        self.nonce = b""
        """Of its claim."""
        self.unheard = 0
        """How many actives in a row were given up without a word of them."""
        self._is_heard = self._is_given_up = False

    def begin(self, nonce: bytes, now: float) -> None:
        """There is another active, or the same one anew."""
        self.nonce, self.at = nonce, now
        self._is_heard = self._is_given_up = False

    def hear(self, now: float) -> None:
        self.at, self.unheard, self._is_heard = now, 0, True

    def given_up(self) -> int:
        """How many in a row were never heard, with this one; 0 where that was said before."""
        if self._is_heard or self._is_given_up:
            return 0
        self._is_given_up = True
        self.unheard += 1
        return self.unheard

    @property
    def limit_s(self) -> float:
        return min(SILENCE_S * (1 << self.unheard), _SILENCE_MAX_S)
