"""Clients of a cluster: how to connect, the driver's own client, and clients kept between tasks.

Settings have the names that Spark's own Kafka sink takes. A name that this sink has no use for, or
a value that would break its promise, is refused: a misspelt name must not pass for a setting.

A client is for one thread at a time. A client that a task returns stays in the reused Python
worker: the next epoch's task finds its connections open and its leaders known.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from epochal.clock import SystemClock
from epochal.errors import Misconfigured
from epochal.kafka.client import Client, Patience
from epochal.kafka.cluster import Address
from epochal.kafka.connection import Limits
from epochal.kafka.security import Mechanism, OAuthBearer, Plain, Scram, Security, Tls
from epochal.kit.secrets import HeldSecret, Secret

_PREFIX = "kafka."
_JAAS = re.compile(r"(username|password)\s*=\s*\"((?:[^\"\\]|\\.)*)\"")
_PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
_FIXED = {
    "acks": ("all", "-1"),
    "enable.idempotence": ("true",),
}
_REFUSED = {
    "transactional.id": "this sink makes its own ids: transactional_id_prefix= adds a prefix",
    "key.serializer": "key= takes text and bytes as they are",
    "value.serializer": 'value= takes text and bytes as they are; json("*") makes an object',
    "bootstrap.servers": "it is the first argument",
}
_IDLE_MAX = 16
"""Clients kept by one process: as many as it may have tasks at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to connect and to send, from the sink's own arguments and from Kafka's setting names."""

    protocol: str = "PLAINTEXT"
    mechanism: str | None = None
    username: str | None = None
    password: Secret | None = None
    token: Callable[[], str] | None = field(default=None, repr=False)
    ca_file: str | None = None
    certificate_file: str | None = None
    key_file: str | None = None
    key_password: Secret | None = None
    verify_hostname: bool = True
    client_id: str = "epochal"
    compression: str | None = None
    batch_bytes: int | None = None
    request_timeout_s: float | None = None
    transaction_timeout_s: float | None = None


def read_settings(base: Settings, given: Mapping[str, Any]) -> Settings:
    """`base` with the settings of a mapping applied; names with or without `kafka.` in front."""
    found = base
    for name, value in given.items():
        found = _applied(found, name.removeprefix(_PREFIX), str(value))
    if found.protocol not in _PROTOCOLS:
        raise _refused("security.protocol", found.protocol, f"one of {', '.join(_PROTOCOLS)}")
    return found


def _applied(found: Settings, name: str, value: str) -> Settings:
    if name in _FIXED:
        if value not in _FIXED[name]:
            raise _refused(name, value, f"exactly-once needs {_FIXED[name][0]}: leave it out")
        return found
    if name in _REFUSED:
        raise _refused(name, value, _REFUSED[name])
    if name == "sasl.jaas.config":
        return _from_jaas(found, value)
    read = _READERS.get(name)
    if read is None:
        raise _refused(name, value, f"known here: {', '.join(sorted(_READERS))}")
    try:
        return replace(found, **read(value))
    except ValueError:
        raise _refused(name, value, "a number") from None


def _from_jaas(found: Settings, value: str) -> Settings:
    named = {name: text.replace('\\"', '"') for name, text in _JAAS.findall(value)}
    if {"username", "password"} - named.keys():
        raise Misconfigured(
            "Kafka: sasl.jaas.config names no username and password",
            "username= and password=env(…); for OAUTHBEARER token=<a function>",
        )
    return replace(found, username=named["username"], password=HeldSecret(named["password"]))


def _refused(name: str, value: str, hint: str) -> Misconfigured:
    shown = "…" if "password" in name or "jaas" in name else repr(value)
    return Misconfigured(f"Kafka: the setting {name}={shown} can't be taken", hint)


def _pem(value: str) -> Mapping[str, Any]:
    if value != "PEM":
        raise _refused("ssl store type", value, "stores in PEM: convert a JKS with keytool")
    return {}


def _without_effect(_value: str) -> Mapping[str, Any]:
    """Batches are sent as soon as they are full, and awaited for as long as the task lives."""
    return {}


_READERS: Mapping[str, Callable[[str], Mapping[str, Any]]] = {
    "security.protocol": lambda value: {"protocol": value.upper()},
    "sasl.mechanism": lambda value: {"mechanism": value},
    "sasl.username": lambda value: {"username": value},
    "sasl.password": lambda value: {"password": HeldSecret(value)},
    "ssl.ca.location": lambda value: {"ca_file": value},
    "ssl.truststore.location": lambda value: {"ca_file": value},
    "ssl.truststore.type": _pem,
    "ssl.keystore.location": lambda value: {"certificate_file": value},
    "ssl.certificate.location": lambda value: {"certificate_file": value},
    "ssl.keystore.type": _pem,
    "ssl.key.location": lambda value: {"key_file": value},
    "ssl.key.password": lambda value: {"key_password": HeldSecret(value)},
    "ssl.endpoint.identification.algorithm": lambda value: {"verify_hostname": bool(value)},
    "client.id": lambda value: {"client_id": value},
    "compression.type": lambda value: {"compression": value},
    "batch.size": lambda value: {"batch_bytes": int(value)},
    "linger.ms": _without_effect,
    "request.timeout.ms": lambda value: {"request_timeout_s": int(value) / 1000},
    "delivery.timeout.ms": _without_effect,
    "transaction.timeout.ms": lambda value: {"transaction_timeout_s": int(value) / 1000},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Which cluster, and how to connect to it. Opens nothing by itself."""

    bootstrap: str
    settings: Settings = field(default_factory=Settings)

    def client(self, *, lanes: int = 1, patience_s: float = 60.0) -> Client:
        limits = Limits()
        if self.settings.request_timeout_s is not None:
            limits = Limits(request_timeout_s=self.settings.request_timeout_s)
        return Client(
            self.bootstrap,
            clock=SystemClock(),
            security=_security(self.settings),
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


def _security(settings: Settings) -> Security:
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
"""Clients kept for the next task, each with the process that opened it: a fork must not use it."""
_idle_lock = threading.Lock()


def borrow_client(server: Server) -> Client:
    """A client of this process that no task uses, or a new one."""
    with _idle_lock:
        for index in reversed(range(len(_idle))):
            process, known, client = _idle[index]
            if process == os.getpid() and known == server:
                del _idle[index]
                return client
    return server.client()


def return_client(server: Server, client: Client) -> None:
    """Keep a client for the next task. Not one whose task failed: requests may be under way."""
    with _idle_lock:
        if len(_idle) < _IDLE_MAX:
            _idle.append((os.getpid(), server, client))
            return
    client.close()
