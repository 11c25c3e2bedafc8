"""`Security`: TLS, client certificates and SASL of a client.

Secrets are given as text or as a function that returns it; neither ever shows in a repr, a log or
an error.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
import ssl
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from epochal.errors import EpochalError, Misconfigured, TryAgain

Secret: TypeAlias = str | Callable[[], str]
Exchange: TypeAlias = Generator[bytes, bytes, None]
"""Yields messages to the broker and is sent its answers; ends when both sides are satisfied."""

_ITERATIONS_MIN = 4096
_ITERATIONS_MAX = 1_000_000
"""A broker that asks for more would keep this process busy, not safe."""
_SCRAM_HASHES = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}
_EXTENSION = re.compile(r"[A-Za-z]+")


def reveal(secret: Secret) -> str:
    """The secret itself. If a function fails to return it, only the kind of its error is shown."""
    if isinstance(secret, str):
        return secret
    try:
        return secret()
    except (EpochalError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise TryAgain(f"a secret or token can't be had: {type(error).__name__}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Encryption. The broker's certificate is verified; its host name too, unless switched off."""

    ca_file: str | None = None
    """PEM; the system's own authorities where none is given."""
    certificate_file: str | None = None
    """PEM, with the chain: shown to brokers that ask who we are (mTLS)."""
    key_file: str | None = None
    key_password: Secret | None = field(default=None, repr=False)
    verify_hostname: bool = True

    def context(self) -> ssl.SSLContext:
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
            context.check_hostname = self.verify_hostname
            if self.certificate_file is not None:
                password = None if self.key_password is None else reveal(self.key_password)
                # An empty password, as otherwise OpenSSL would ask on the terminal.
                context.load_cert_chain(self.certificate_file, self.key_file, password or "")
        except (OSError, ssl.SSLError) as error:
            files = ", ".join(filter(None, (self.ca_file, self.certificate_file, self.key_file)))
            raise Misconfigured(
                f"TLS files can't be used ({files}): {error}",
                "PEM files that this process can read, on the driver and on every executor",
            ) from None
        return context


class Mechanism(Protocol):
    """A way to authenticate under SASL."""

    @property
    def name(self) -> str: ...

    def exchange(self) -> Exchange: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """User and password in clear text: only over TLS."""

    username: str
    password: Secret = field(repr=False)

    @property
    def name(self) -> str:
        return "PLAIN"

    def exchange(self) -> Exchange:
        yield f"\0{self.username}\0{reveal(self.password)}".encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scram:
    """User and password, proven by both sides without sending the password."""

    username: str
    password: Secret = field(repr=False)
    mechanism: str = "SCRAM-SHA-512"
    nonce: Callable[[], str] = field(default=lambda: secrets.token_urlsafe(24), repr=False)

    def __post_init__(self) -> None:
        if self.mechanism not in _SCRAM_HASHES:
            raise Misconfigured(
                f"{self.mechanism} is no mechanism of SCRAM",
                f"one of {', '.join(_SCRAM_HASHES)}; PLAIN; or token=<a function> for OAUTHBEARER",
            )

    @property
    def name(self) -> str:
        return self.mechanism

    def exchange(self) -> Exchange:
        hash_name = _SCRAM_HASHES[self.mechanism]
        nonce = self.nonce()
        user = self.username.replace("=", "=3D").replace(",", "=2C")
        first_bare = f"n={user},r={nonce}"
        server_first = (yield f"n,,{first_bare}".encode()).decode()
        given = _attributes(server_first)
        if not given.get("r", "").startswith(nonce) or given["r"] == nonce:
            raise _scram_failed("the broker's nonce does not continue ours")
        try:
            salt, rounds = base64.b64decode(given["s"], validate=True), int(given["i"])
        except (KeyError, ValueError):
            raise _scram_failed("the broker's challenge can't be read") from None
        if not _ITERATIONS_MIN <= rounds <= _ITERATIONS_MAX:
            raise _scram_failed(f"the broker asks for {rounds} iterations")
        final_bare = f"c={base64.b64encode(b'n,,').decode()},r={given['r']}"
        signed = f"{first_bare},{server_first},{final_bare}".encode()
        salted = hashlib.pbkdf2_hmac(hash_name, reveal(self.password).encode(), salt, rounds)
        client_key = hmac.digest(salted, b"Client Key", hash_name)
        stored_key = hashlib.new(hash_name, client_key).digest()
        signature = hmac.digest(stored_key, signed, hash_name)
        proof = bytes(a ^ b for a, b in zip(client_key, signature, strict=True))
        answer = yield f"{final_bare},p={base64.b64encode(proof).decode()}".encode()
        server_key = hmac.digest(salted, b"Server Key", hash_name)
        expected = base64.b64encode(hmac.digest(server_key, signed, hash_name)).decode()
        if not hmac.compare_digest(_attributes(answer.decode()).get("v", ""), expected):
            raise _scram_failed("the broker does not know the password either")


def _attributes(text: str) -> dict[str, str]:
    pairs = (part.partition("=") for part in text.split(","))
    return {key: value for key, _, value in pairs}


def _scram_failed(because: str) -> Misconfigured:
    return Misconfigured(f"SCRAM authentication failed: {because}", "check username and password")


@dataclass(frozen=True, slots=True, kw_only=True)
class OAuthBearer:
    """
    A token from elsewhere, asked for at every connection. Only over TLS.

    MSK with IAM is this with a token made by AWS's signer:
    `OAuthBearer(token=lambda: MSKAuthTokenProvider.generate_auth_token(region)[0])`.
    """

    token: Callable[[], str] = field(repr=False)
    extensions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key, value in self.extensions.items():
            if not _EXTENSION.fullmatch(key) or key == "auth" or "\x01" in value:
                raise Misconfigured(
                    f"{key!r} is no name of a SASL extension, or its value can't be sent",
                    "letters only, and not auth",
                )

    @property
    def name(self) -> str:
        return "OAUTHBEARER"

    def exchange(self) -> Exchange:
        extras = "".join(f"{key}={value}\x01" for key, value in self.extensions.items())
        refusal = yield f"n,,\x01auth=Bearer {reveal(self.token)}\x01{extras}\x01".encode()
        if refusal:
            # The mechanism wants a refusal acknowledged before the broker sends its own message.
            yield b"\x01"


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """How to connect; by default without encryption and authentication."""

    tls: Tls | None = None
    sasl: Mechanism | None = None


PLAINTEXT = Security()
