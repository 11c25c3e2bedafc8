"""Client settings by the names that Spark's own Kafka sink takes, and what becomes of each.

A setting that this sink has no use for, or that would break its promise, is refused: a name with a
slip of the pen must not pass for a setting.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from epochal.errors import Misconfigured
from epochal.kit.secrets import HeldSecret, Secret

PREFIX = "kafka."
_JAAS = re.compile(r"(username|password)\s*=\s*\"((?:[^\"\\]|\\.)*)\"")
_PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
_FIXED = {
    "acks": ("all", "-1"),
    "enable.idempotence": ("true",),
}
_REFUSED = {
    "transactional.id": "ids are this sink's own: transactional_id_prefix= puts a prefix before",
    "key.serializer": "key= takes text and bytes as they are",
    "value.serializer": 'value= takes text and bytes as they are; json("*") makes an object',
    "bootstrap.servers": "it is the first argument",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to connect and to send, from whichever names it was said by."""

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
    """`base` with what the mapping says; names with or without `kafka.` before them."""
    found = base
    for name, value in given.items():
        found = _taken(found, name.removeprefix(PREFIX), str(value))
    if found.protocol not in _PROTOCOLS:
        raise _refused("security.protocol", found.protocol, f"one of {', '.join(_PROTOCOLS)}")
    return found


def _taken(found: Settings, name: str, value: str) -> Settings:
    if name in _FIXED:
        if value not in _FIXED[name]:
            raise _refused(name, value, f"exactly-once needs {_FIXED[name][0]}: leave it out")
        return found
    if name in _REFUSED:
        raise _refused(name, value, _REFUSED[name])
    if name == "sasl.jaas.config":
        return _from_jaas(found, value)
    taker = _TAKERS.get(name)
    if taker is None:
        raise _refused(name, value, f"known here: {', '.join(sorted(_TAKERS))}")
    try:
        return replace(found, **taker(value))
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
    told = "…" if "password" in name or "jaas" in name else repr(value)
    return Misconfigured(f"Kafka: the setting {name}={told} can't be taken", hint)


def _pem(value: str) -> Mapping[str, Any]:
    if value != "PEM":
        raise _refused("ssl store type", value, "stores in PEM: convert a JKS with keytool")
    return {}


def _without_effect(_value: str) -> Mapping[str, Any]:
    """Batches are sent as soon as they are full, and waited for as long as the task lives."""
    return {}


_TAKERS: Mapping[str, Callable[[str], Mapping[str, Any]]] = {
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
