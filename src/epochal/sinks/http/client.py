"""`Client`: requests to a service, with credentials, timeouts and retries.

A request that may have arrived without an answer is distinguished from one that did not (I9).
Messages hold no secret: no header, no query, and an answer only with the secrets removed.
"""

from __future__ import annotations

import json
import random
import ssl
import time
import weakref
from base64 import b64encode
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import httpx

from epochal.errors import Misconfigured, OutcomeUnknown, TryAgain
from epochal.sinks.http.errors import Meaning, meaning_of, refusal

if TYPE_CHECKING:
    from epochal.sinks.http.sink import Service

_TEXT_CHARS_MAX = 300
_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
_KEPT_MAX = 8
_TLS_SIGNS = ("CERTIFICATE", "certificate", "SSL:")
_NO_TLS = "WRONG_VERSION_NUMBER"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    status: int
    body: Mapping[str, Any] = field(default_factory=dict)
    """The answer where it is a JSON object, otherwise empty."""
    text: str = ""
    """The answer for messages: shortened, and without secrets."""


class Client:
    """One service. Usable from several threads."""

    def __init__(
        self,
        service: Service,
        *,
        statuses: Mapping[int, Meaning] | None = None,
        backoff_ms: tuple[int, ...] = (100, 500, 2000),
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._service = service
        self._statuses = statuses or {}
        self._backoff_ms = backoff_ms
        self._sleep = sleep
        self._http = _open(service)
        # Also for a kept client that is dropped without being closed.
        self._close = weakref.finalize(self, self._http.close)

    def close(self) -> None:
        self._close()

    def ask(
        self,
        method: str,
        path: str = "",
        *,
        content: bytes | None = None,
        json_body: Any = None,
        headers: Mapping[str, str] | None = None,
        params: Mapping[str, str] | None = None,
        reads: Collection[int] = (),
        is_final: bool = False,
    ) -> Reply:
        """
        Send a request until there is an answer, within the service's limits.

        A status that means OK or is in `reads` is returned; others raise. After the last attempt:
        `OutcomeUnknown` where `is_final` and some attempt may have been carried out, else
        `TryAgain`.
        """
        if json_body is not None:
            content = json.dumps(json_body).encode()
            headers = {**(headers or {}), "Content-Type": "application/json"}
        what, is_sure, why = f"{method} {self._service.url}{path}", True, ""
        for wait_s in self._waits():
            try:
                request = self._request(method, path, content, headers, params)
                answer = self._http.send(request)
            except httpx.RequestError as error:
                is_sure = is_sure and isinstance(error, _NOT_SENT)
                why = self._unanswered(error)
                self._sleep(wait_s)
                continue
            reply = self._read(answer)
            meaning, hint = meaning_of(reply.status, self._statuses)
            if meaning is Meaning.OK or reply.status in reads:
                return reply
            if meaning is not Meaning.RETRY:
                raise refusal(meaning, f"{what} answered {reply.status}: {reply.text}", hint)
            is_sure = is_sure and reply.status in (429, 503)
            why = f"{reply.status} {reply.text}"
            self._sleep(self._wait_s(answer, wait_s))
        fact = f"{what} was not done in {self._service.retries_max + 1} attempts: {why}"
        hint = "check the URL of the sink, and that its service is up"
        raise (OutcomeUnknown if is_final and not is_sure else TryAgain)(fact, hint)

    def _waits(self) -> Iterator[float]:
        """The wait after each attempt; none after the last."""
        for at in range(self._service.retries_max):
            wait_s = self._backoff_ms[min(at, len(self._backoff_ms) - 1)] / 1000
            yield wait_s / 2 + wait_s / 2 * random.random()
        yield 0.0

    def _wait_s(self, answer: httpx.Response, wait_s: float) -> float:
        if not wait_s:
            return 0.0
        return min(max(wait_s, _retry_after_s(answer)), self._service.retry_after_max_s)

    def _request(
        self,
        method: str,
        path: str,
        content: bytes | None,
        headers: Mapping[str, str] | None,
        params: Mapping[str, str] | None,
    ) -> httpx.Request:
        """With secrets read again: they may have changed since the last request."""
        service = self._service
        query = service.query.reveal() if service.query else str(httpx.QueryParams(params or {}))
        sent = {name: value.reveal() for name, value in service.headers}
        if service.token is not None:
            sent["Authorization"] = f"Bearer {service.token.reveal()}"
        elif service.user is not None:
            name, password = service.user
            pair = b64encode(f"{name}:{password.reveal()}".encode()).decode()
            sent["Authorization"] = f"Basic {pair}"
        url = f"{service.url}{path}{'?' if query else ''}{query}"
        return self._http.build_request(
            method, url, content=content, headers={**sent, **(headers or {})}
        )

    def _read(self, answer: httpx.Response) -> Reply:
        try:
            body = answer.json()
        except ValueError:
            body = None
        is_object = isinstance(body, dict)
        text = str(body["error"]) if is_object and "error" in body else answer.text
        return Reply(
            status=answer.status_code,
            body=body if is_object else {},
            text=self._without_secrets(text)[:_TEXT_CHARS_MAX],
        )

    def _unanswered(self, error: httpx.RequestError) -> str:
        message = self._without_secrets(str(error)) or type(error).__name__
        if isinstance(error, httpx.ConnectError) and any(sign in message for sign in _TLS_SIGNS):
            raise Misconfigured(
                f"{self._service.url}: {message}",
                "the service does not use TLS: its URL begins with http://"
                if _NO_TLS in message
                else "ca= names who signed the service's certificate",
            ) from None
        return f"{type(error).__name__}: {message}"

    def _without_secrets(self, text: str) -> str:
        for secret in self._service.secrets():
            text = text.replace(secret, "…")
        return text


@lru_cache(maxsize=_KEPT_MAX)
def kept_client(service: Service, _process: int) -> Client:
    """Connections outlive a task; a forked worker must not use its parent's sockets."""
    return Client(service)


def _retry_after_s(answer: httpx.Response) -> float:
    """The `Retry-After` of an answer: seconds, or a date."""
    text = answer.headers.get("Retry-After", "").strip()
    if text.isdecimal():
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (TypeError, ValueError):
        return 0.0


def _open(service: Service) -> httpx.Client:
    limit = httpx.Limits(max_connections=service.connections_max)
    timeout = httpx.Timeout(service.timeout_s, connect=service.connect_timeout_s)
    return httpx.Client(verify=_tls(service), timeout=timeout, limits=limit, follow_redirects=False)


def _tls(service: Service) -> ssl.SSLContext | bool:
    if not service.url.startswith("https:"):
        return False
    try:
        context = ssl.create_default_context(cafile=service.ca)
        if service.certificate is not None:
            password = service.key_password.reveal() if service.key_password else None
            context.load_cert_chain(service.certificate, service.key, password)
    except (OSError, ssl.SSLError) as error:
        raise Misconfigured(
            f"certificate={service.certificate!r}, key={service.key!r}, ca={service.ca!r} can't be "
            f"loaded: {error.strerror or type(error).__name__}",
            "PEM files, at these paths on the driver and on every executor",
        ) from None
    return context
