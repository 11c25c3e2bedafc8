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
import secrets
import threading
import time
from dataclasses import dataclass, field

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

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


def require_safe(host: str, token: str | None) -> None:
    if host not in LOOPBACK and not token:
        raise Misconfigured(
            f"without a token everybody who can reach {host} could read the console",
            "give it a token: --token-env NAME or --token-file PATH; or listen on 127.0.0.1",
        )
    if token is not None and len(token) < 16:
        raise Misconfigured("the token has fewer than 16 characters", "use a longer one")


@dataclass(slots=True)
class Sessions:
    """The sessions of signed-in users. In memory: after a restart users sign in again."""

    token: str | None
    _key: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    _until: dict[str, float] = field(default_factory=dict)
    _wrong_at: list[float] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def open(self, token: str) -> str | None:
        """Return a new session if the token is right; None if not, or after too many wrong ones."""
        now = time.monotonic()
        with self._lock:
            self._wrong_at = [at for at in self._wrong_at if now - at < _WRONG_WITHIN_S]
            if len(self._wrong_at) >= _WRONG_TOKENS_MAX:
                return None
            if not self.knows(token):
                self._wrong_at.append(now)
                return None
            self._until = {name: until for name, until in self._until.items() if until > now}
            while len(self._until) >= _SESSIONS_MAX:
                self._until.pop(next(iter(self._until)))
            session = secrets.token_urlsafe(32)
            self._until[session] = now + SESSION_MAX_S
            return session

    def knows(self, token: str) -> bool:
        return self.token is not None and hmac.compare_digest(token.encode(), self.token.encode())

    def holds(self, session: str | None) -> bool:
        return session is not None and self._until.get(session, 0.0) > time.monotonic()

    def close(self, session: str | None) -> None:
        if session is not None:
            self._until.pop(session, None)

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
        if self._sessions.token is None or request.url.path.startswith(_PUBLIC_PATHS):
            return None
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._sessions.holds(request.cookies.get(COOKIE)) or self._sessions.knows(bearer):
            return None
        if request.url.path.startswith(("/api/", "/metrics")):
            return PlainTextResponse("a token is required: Authorization: Bearer …", 401)
        return RedirectResponse("/login", 303)


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
