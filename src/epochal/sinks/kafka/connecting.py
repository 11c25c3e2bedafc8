"""Clients of a cluster: the driver's own, and those that tasks leave to each other.

A client is for one thread at a time. What a task gives back lives on in the reused Python worker:
the next epoch's task finds its connections open and its leaders known.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from epochal.clock import SystemClock
from epochal.errors import Misconfigured
from epochal.kafka.client import Client, Patience
from epochal.kafka.cluster import Address
from epochal.kafka.connection import Limits
from epochal.kafka.security import Mechanism, OAuthBearer, Plain, Scram, Security, Tls
from epochal.sinks.kafka.settings import Settings

_IDLE_MAX = 16
"""Clients kept by one process: as many as it may have tasks at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Which cluster, and how to reach it. Opens nothing by itself."""

    bootstrap: str
    settings: Settings = field(default_factory=Settings)

    @property
    def place(self) -> str:
        return self.bootstrap

    def client(self, *, lanes: int = 1, patience_s: float = 60.0) -> Client:
        limits = Limits()
        if self.settings.request_timeout_s is not None:
            limits = Limits(request_timeout_s=self.settings.request_timeout_s)
        return Client(
            self.bootstrap,
            clock=SystemClock(),
            security=security_of(self.settings),
            client_id=self.settings.client_id,
            limits=limits,
            patience=Patience(total_s=patience_s),
            lanes=lanes,
        )


def require_addresses(bootstrap: str) -> str:
    listed = [str(Address.parse(text)) for text in bootstrap.split(",") if text.strip()]
    if not listed:
        raise Misconfigured("Kafka: no broker is named", "Kafka('host:9092,host:9092', …)")
    return ",".join(listed)


def security_of(settings: Settings) -> Security:
    tls = None
    if settings.protocol in ("SSL", "SASL_SSL"):
        secret = settings.key_password
        tls = Tls(
            ca_file=settings.ca_file,
            certificate_file=settings.certificate_file,
            key_file=settings.key_file,
            key_password=None if secret is None else secret.reveal,
            verify_hostname=settings.verify_hostname,
        )
    sasl = _mechanism(settings) if settings.protocol.startswith("SASL") else None
    return Security(tls=tls, sasl=sasl)


def _mechanism(settings: Settings) -> Mechanism:
    if settings.token is not None:
        return OAuthBearer(token=settings.token)
    if settings.username is None or settings.password is None:
        raise Misconfigured(
            f"Kafka: {settings.protocol} without a username and a password",
            "username=…, password=env(…); or token=<a function> for OAUTHBEARER",
        )
    if settings.mechanism in (None, "PLAIN"):
        return Plain(username=settings.username, password=settings.password.reveal)
    return Scram(
        username=settings.username,
        password=settings.password.reveal,
        mechanism=settings.mechanism or "",
    )


_idle: list[tuple[int, Server, Client]] = []
_idle_lock = threading.Lock()


@contextmanager
def lent(server: Server) -> Iterator[Client]:
    """A client of this process for the length of a block; kept for the next if all went well."""
    client = borrow(server)
    try:
        yield client
    except BaseException:
        client.close()
        raise
    give_back(server, client)


def borrow(server: Server) -> Client:
    with _idle_lock:
        for place in reversed(range(len(_idle))):
            process, known, client = _idle[place]
            if process == os.getpid() and known == server:
                del _idle[place]
                return client
    return server.client()


def give_back(server: Server, client: Client) -> None:
    with _idle_lock:
        if len(_idle) < _IDLE_MAX:
            _idle.append((os.getpid(), server, client))
            return
    client.close()
