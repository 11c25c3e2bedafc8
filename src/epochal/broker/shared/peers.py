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
            reply, nonce = await self._ask(asker)
        except BaseException:
            self.close()
            raise
        status: Status = reply["status"]
        if not hmac.compare_digest(str(reply["mac"]), _mac(self._secret, nonce, status)):
            self.close()
            raise ValueError("not a member of this cluster")
        return status

    async def _ask(self, asker: Status) -> tuple[dict[str, Any], str]:
        if self._streams is None:
            self._streams = await asyncio.open_connection(*self.address, limit=_LINE_BYTES_MAX)
        reader, writer = self._streams
        nonce = secrets.token_hex(16)
        line = f"{nonce} {_mac(self._secret, nonce, asker)} {json.dumps(asker)}\n"
        writer.write(line.encode())
        await writer.drain()
        reply = await reader.readline()
        if not reply:
            raise ConnectionResetError("the connection was closed")
        return json.loads(reply), nonce

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None
