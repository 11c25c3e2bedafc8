"""
Access control: host names, the token, sessions, and CSRF tokens.

Without a token the console is read-only and listens on loopback only. With one, every request needs
it: programs send it as a bearer token; people enter it once, and get a session in a cookie that
scripts can't read and other sites can't send. Forms carry a CSRF token derived from the session, so
that no other site can post them.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import threading
import time
from dataclasses import dataclass, field
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from epochal.errors import Misconfigured

COOKIE = "epochal_session"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
SESSION_MAX_S = 12 * 3600
_PUBLIC_PATHS = ("/login", "/static/", "/health")
_WRONG_TOKENS_MAX = 20
_WRONG_WITHIN_S = 60.0
_SESSIONS_MAX = 1000
_ADDRESSES_MAX = 10_000
_NAME_CHARS_MAX = 80
# Not "//host/…" or "/\\host/…": browsers take these for other sites.
_OWN_PATH = re.compile(r"/(?![/\\])[\x21-\x7e]*")

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


def require_safe(host: str, token: str | None) -> None:
    if host not in LOOPBACK and not token:
        raise Misconfigured(
            f"without a token everybody who can reach {host} could read the console",
            "give it a token: --token-env NAME or --token-file PATH; or listen on 127.0.0.1",
        )
    if token is not None and len(token) < 16:
        raise Misconfigured("the token has fewer than 16 characters", "use a longer one")


class TooManyWrongTokens(Exception):
    """Of one address, within a minute: no token of it is looked at until some time has passed."""


@dataclass(frozen=True, slots=True)
class _Session:
    user: str
    until: float


@dataclass(slots=True)
class Sessions:
    """The sessions of signed-in users. In memory: after a restart users sign in again."""

    token: str | None
    _key: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    _open: dict[str, _Session] = field(default_factory=dict)
    _wrong_at: dict[str, list[float]] = field(default_factory=dict)
    """By address."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def open(self, token: str, *, user: str, address: str) -> str | None:
        """Return a new session if the token is right, None if it is not."""
        if not self.accepts(token, address=address):
            return None
        now = time.monotonic()
        with self._lock:
            self._open = {name: one for name, one in self._open.items() if one.until > now}
            while len(self._open) >= _SESSIONS_MAX:
                self._open.pop(next(iter(self._open)))
            session = secrets.token_urlsafe(32)
            self._open[session] = _Session(user[:_NAME_CHARS_MAX], now + SESSION_MAX_S)
            return session

    def accepts(self, token: str, *, address: str) -> bool:
        """Whether a token is right. Raises `TooManyWrongTokens`, so that nobody tries them all."""
        now = time.monotonic()
        with self._lock:
            wrong = [at for at in self._wrong_at.get(address, ()) if now - at < _WRONG_WITHIN_S]
            if len(wrong) >= _WRONG_TOKENS_MAX:
                raise TooManyWrongTokens
            is_right = self.token is not None and hmac.compare_digest(
                token.encode(), self.token.encode()
            )
            if is_right:
                self._wrong_at.pop(address, None)
            else:
                self._wrong_at[address] = [*wrong, now]
                while len(self._wrong_at) > _ADDRESSES_MAX:
                    self._wrong_at.pop(next(iter(self._wrong_at)))
            return is_right

    def holds(self, session: str | None) -> bool:
        found = None if session is None else self._open.get(session)
        return found is not None and found.until > time.monotonic()

    def user(self, session: str | None) -> str:
        """Who signed in, by the name that they gave."""
        found = None if session is None else self._open.get(session)
        return "" if found is None else found.user

    def close(self, session: str | None) -> None:
        if session is not None:
            self._open.pop(session, None)

    def csrf_token(self, session: str) -> str:
        return hmac.new(self._key, session.encode(), hashlib.sha256).hexdigest()

    def is_own_form(self, session: str | None, csrf_token: str) -> bool:
        return (
            session is not None
            and self.holds(session)
            and hmac.compare_digest(csrf_token, self.csrf_token(session))
        )


class AccessControl:
    """Middleware that checks host and session, and adds security headers to every response."""

    def __init__(self, app: ASGIApp, *, sessions: Sessions, hosts: frozenset[str]) -> None:
        self._app = app
        self._sessions = sessions
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(Request(scope))
        await (refusal or self._app)(scope, receive, _with_headers(send))

    def _refusal(self, request: Request) -> Response | None:
        # DNS rebinding: another site's name that resolves to this host could read the pages.
        if _host(request.headers) not in self._hosts and "*" not in self._hosts:
            return PlainTextResponse("this console does not serve that host name", 421)
        is_public = self._sessions.token is None or request.url.path.startswith(_PUBLIC_PATHS)
        if is_public or self._sessions.holds(request.cookies.get(COOKIE)):
            return None
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        try:
            if bearer and self._sessions.accepts(bearer, address=address_of(request)):
                return None
        except TooManyWrongTokens:
            return PlainTextResponse("too many wrong tokens: wait a minute", 429)
        if request.url.path.startswith(("/api/", "/metrics")):
            return PlainTextResponse("a token is required: Authorization: Bearer …", 401)
        asked = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        return RedirectResponse(f"/login?next={quote(asked, safe='')}", 303)


def address_of(request: Request) -> str:
    return "" if request.client is None else request.client.host


def own_path(asked: str) -> str:
    """The page of this console that a link asks for; the first page for anything else."""
    return asked if _OWN_PATH.fullmatch(asked) else "/"


def _host(headers: Headers) -> str:
    host = headers.get("host", "")
    return host.rpartition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            names = {name for name, _ in message["headers"]}
            message["headers"] += [
                (name.encode(), value.encode())
                for name, value in HEADERS.items()
                if name.encode() not in names
            ]
        await send(message)

    return sending
