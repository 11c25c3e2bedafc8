"""`Http`: the declaration of an HTTP service, and `Service`: where it is and how to reach it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from os import PathLike, fspath
from types import MappingProxyType
from typing import ClassVar, Literal
from urllib.parse import unquote, urlsplit, urlunsplit

from epochal.contract import Committer, Task, Writer
from epochal.errors import Misconfigured, not_installed
from epochal.kit.secrets import HeldSecret, Secret
from epochal.kit.sink_base import Promises, SinkBase
from epochal.kit.spool.rows import RowSpool, spool_url
from epochal.sinks.http.errors import Meaning
from epochal.storage.urls import without_secrets
from epochal.terms import Identity, Json, Limits

Mode = Literal["two-phase", "idempotency-key"]
_CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "mode": ("two-phase", "idempotency-key"),
        "format": ("ndjson", "arrow"),
        "body": ("json", "ndjson"),
        "order": ("none", "partition", "epoch"),
        "on_reject": ("stop", "keep"),
        "method": ("POST", "PUT", "PATCH"),
    }
)
_ABOVE_ZERO = ("part_bytes", "rows_per_call", "concurrency", "connect_timeout_s", "timeout_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A service as the client of tasks and driver needs it. Secrets only by where they are kept."""

    url: str
    """Without user, password and query."""
    query: Secret | None = None
    token: Secret | None = None
    user: tuple[str, Secret] | None = None
    headers: tuple[tuple[str, Secret], ...] = ()
    certificate: str | None = None
    key: str | None = None
    key_password: Secret | None = None
    ca: str | None = None
    connect_timeout_s: float = 10.0
    timeout_s: float = 60.0
    retries_max: int = 3
    retry_after_max_s: float = 30.0
    connections_max: int = 16

    def secrets(self) -> list[str]:
        held = [self.query, self.token, self.key_password, *(value for _, value in self.headers)]
        held += [self.user[1]] if self.user else []
        return [revealed for secret in held if secret and (revealed := secret.reveal())]


TWO_PHASE = Promises(
    sink="`Http`, two-phase",
    at_one_instant="a task's rows; whole epochs by the receiver's `whole_epochs`",
    proof="the receiver's marks",
    limits=["needs a receiver that implements the two phases"],
    cannot={"refuse rows": "only a handler of the receiver's owner refuses rows"},
)
IDEMPOTENCY_KEY = Promises(
    sink="`Http`, idempotency keys",
    at_one_instant="a call",
    readers_must="be a service that remembers keys; else at least once",
    proof="the spool",
    limits=["the service can't refuse an epoch before the decision"],
    cannot={
        "refuse rows": "the service is called for decided epochs only: what it refuses stops the "
        "query, or is kept by `on_reject`",
        "be unreachable": "rows are prepared in the spool, without the service",
        "be misconfigured": "one endpoint has nothing that could be asked beforehand",
    },
)
PROMISES = (TWO_PHASE, IDEMPOTENCY_KEY)


@dataclass(frozen=True, kw_only=True)
class Http(SinkBase):
    """
    A service that takes rows over HTTP.

    `mode="idempotency-key"`: one endpoint, called from a spool after the decision, each call under
    a key that never changes. Exactly once where the service keeps keys, otherwise at least once.

    `mode="two-phase"`: a receiver with the endpoints of `epochal receiver`: `POST /prepare/{txn}`,
    `/commit/{txn}` and so on. Exactly once.
    """

    kind: ClassVar[str] = "http"

    base_url: str = field(kw_only=False, repr=False)
    """The endpoint, or the part before /prepare/…; a password or a query in it is hidden."""
    mode: Mode = "two-phase"
    """A receiver that prepares and commits; or one endpoint, called after the decision."""

    token: Secret | str | None = None
    """Sent as a bearer token: `env("…")` or `file(path)`."""
    headers: Mapping[str, Secret | str] = field(default_factory=dict)
    """Sent with every request; their values are never shown."""
    certificate: str | PathLike[str] | None = None
    """TLS: this client's certificate, PEM, on the driver and on executors."""
    key: str | PathLike[str] | None = None
    """TLS: the key of that certificate, PEM."""
    key_password: Secret | str | None = None
    """TLS: the password of that key."""
    ca: str | PathLike[str] | None = None
    """TLS: who signed the service's certificate; by default whom the machine trusts."""

    connect_timeout_s: float = 10.0
    timeout_s: float = 60.0
    """How long an answer may take."""
    retries_max: int = 3
    """How often a request is repeated; a decided epoch is retried by the pipeline beyond that."""
    retry_after_max_s: float = 30.0
    """The longest `Retry-After` that is waited for within one attempt."""
    concurrency: int = 8
    """Requests at a time, from the driver."""

    format: Literal["ndjson", "arrow"] = "ndjson"
    """Two-phase: how rows are encoded."""
    part_bytes: int = 4 * 1024 * 1024
    """Two-phase: a task with more than this sends several requests."""

    spool: str | PathLike[str] | None = field(default=None, repr=False)
    """Idempotency-key: where rows wait; a folder that driver and executors share, or a URL."""
    method: Literal["POST", "PUT", "PATCH"] = "POST"
    """Idempotency-key: of the calls."""
    body: Literal["json", "ndjson"] = "json"
    """Idempotency-key: `json` is an object, or an array where a call has several rows."""
    rows_per_call: int = 1
    """Idempotency-key: how many rows a call carries at most."""
    key_header: str = "Idempotency-Key"
    """Idempotency-key: the header that carries the key of a call."""
    order: Literal["none", "partition", "epoch"] = "none"
    """Idempotency-key: which calls wait for the one before them."""
    on_reject: Literal["stop", "keep"] = "stop"
    """Idempotency-key: a call that is refused for good stops the query, or is kept in the spool."""
    statuses: Mapping[int, Literal["ok", "retry", "reject", "stop"]] = field(default_factory=dict)
    """Idempotency-key: the meanings of statuses, where this service differs from the table."""

    service: Service = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if find_spec("httpx") is None:
            raise not_installed("the HTTP sink", "httpx", "http")
        self._check_options()
        self._set("service", self._make_service())
        self._set("token", _secret(self.token))
        self._set("key_password", _secret(self.key_password))
        self._set("headers", dict(self.service.headers))
        if self.mode == "idempotency-key":
            self._set("spool", spool_url('Http(mode="idempotency-key")', self.spool))
        super().__post_init__()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_options(self) -> None:
        for option, choices in _CHOICES.items():
            if getattr(self, option) not in choices:
                raise Misconfigured(
                    f"Http({option}={getattr(self, option)!r})", f"one of {', '.join(choices)}"
                )
        for option in _ABOVE_ZERO:
            if getattr(self, option) <= 0:
                raise Misconfigured(f"Http({option}={getattr(self, option)})", "above zero")
        meanings = {meaning.value for meaning in Meaning}
        for status, meaning in self.statuses.items():
            if meaning not in meanings or not 100 <= status <= 599:
                raise Misconfigured(
                    f"Http(statuses={{{status}: {meaning!r}}})", f"one of {sorted(meanings)}"
                )

    def _make_service(self) -> Service:
        try:
            parts = urlsplit(self.base_url)
            host, port = parts.hostname, parts.port
        except ValueError:
            parts, host, port = urlsplit(""), None, None
        if parts.scheme not in ("http", "https") or not host:
            # Not shown: a URL that can't be parsed may hold a password.
            raise Misconfigured("Http: base_url can't be read", "https://host/path")
        if parts.query and self.mode == "two-phase":
            raise Misconfigured(
                "Http: base_url has a query, and paths follow it", "leave it out, or headers={…}"
            )
        password = HeldSecret(unquote(parts.password)) if parts.password is not None else None
        bare = f"[{host}]" if ":" in host else host
        where = (parts.scheme, bare if port is None else f"{bare}:{port}", parts.path, "", "")
        return Service(
            url=urlunsplit(where).rstrip("/") if self.mode == "two-phase" else urlunsplit(where),
            query=HeldSecret(parts.query) if parts.query else None,
            token=_secret(self.token),
            user=None if password is None else (unquote(parts.username or ""), password),
            headers=tuple((name, _held(value)) for name, value in sorted(self.headers.items())),
            certificate=_path(self.certificate),
            key=_path(self.key),
            key_password=_secret(self.key_password),
            ca=_path(self.ca),
            connect_timeout_s=self.connect_timeout_s,
            timeout_s=self.timeout_s,
            retries_max=self.retries_max,
            retry_after_max_s=self.retry_after_max_s,
            connections_max=max(self.concurrency, 1),
        )

    @property
    def target(self) -> str:
        return self.service.url

    def describe(self) -> Mapping[str, Json]:
        described = {"kind": self.kind, "target": self.target, "mode": self.mode}
        if self.mode == "idempotency-key":
            described["spool"] = without_secrets(str(self.spool))
        return described

    def writer(self, task: Task) -> Writer:
        if self.mode == "idempotency-key":
            from epochal.sinks.http.writer import CallSpoolingWriter  # noqa: PLC0415  on executors

            spool = RowSpool.at(str(self.spool))
            return CallSpoolingWriter(task, spool, rows_per_call=self.rows_per_call)
        from epochal.sinks.http.client import kept_client  # noqa: PLC0415  loads httpx
        from epochal.sinks.http.writer import FORMATS, HttpWriter  # noqa: PLC0415  on executors

        client = kept_client(self.service, os.getpid())
        return HttpWriter(task, client, FORMATS[self.format], part_bytes=self.part_bytes)

    def committer(self, identity: Identity, limits: Limits) -> Committer:
        if self.mode == "idempotency-key":
            return self._spool_committer(identity, limits)
        from epochal.sinks.http.committer import HttpCommitter  # noqa: PLC0415  loads httpx
        from epochal.sinks.http.writer import FORMATS  # noqa: PLC0415  on the driver

        return HttpCommitter(
            identity,
            limits,
            self.service,
            FORMATS[self.format],
            part_bytes=self.part_bytes,
            threads=self.concurrency,
        )

    def _spool_committer(self, identity: Identity, limits: Limits) -> Committer:
        # Only the driver loads these.
        from epochal.kit.spool.committer import SpoolCommitter  # noqa: PLC0415
        from epochal.kit.spool.ledger import SpoolLedger  # noqa: PLC0415
        from epochal.sinks.http.client import Client  # noqa: PLC0415
        from epochal.sinks.http.idempotency_key import CallOptions, KeyedDelivery  # noqa: PLC0415

        spool = RowSpool.at(str(self.spool))
        ledger = SpoolLedger(spool.store, identity)
        client = Client(
            self.service,
            statuses={status: Meaning(name) for status, name in self.statuses.items()},
            backoff_ms=limits.retry_backoff_ms,
        )
        options = CallOptions(
            method=self.method,
            body=self.body,
            key_header=self.key_header,
            concurrency=self.concurrency,
            order=self.order,
            on_reject=self.on_reject,
        )
        delivery = KeyedDelivery(identity, spool, ledger, client, options)
        return SpoolCommitter(identity, spool, ledger, delivery)


def _held(value: Secret | str) -> Secret:
    return HeldSecret(value) if isinstance(value, str) else value


def _secret(value: Secret | str | None) -> Secret | None:
    return None if value is None else _held(value)


def _path(value: str | PathLike[str] | None) -> str | None:
    return None if value is None else fspath(value)
