"""The broker's side of SASL: PLAIN and SCRAM.

Only SCRAM's salted keys are kept in memory, not passwords: they suffice to check a password and to
prove the broker's identity.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field

ITERATIONS = 4_096
SCRAM_TYPES = {"SCRAM-SHA-256": 1, "SCRAM-SHA-512": 2}
"""Their numbers in the protocol."""
_HASHES = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}
MECHANISMS = ("PLAIN", *_HASHES)
_MESSAGE_BYTES_MAX = 64 << 10


class LoginFailed(Exception):
    """Sent to the client, without details of what was wrong."""


@dataclass(frozen=True, slots=True)
class _Stored:
    salt: bytes = field(repr=False)
    stored_key: bytes = field(repr=False)
    server_key: bytes = field(repr=False)


def _store(password: str, hash_name: str, salt: bytes) -> _Stored:
    salted = hashlib.pbkdf2_hmac(hash_name, password.encode(), salt, ITERATIONS)
    client_key = hmac.digest(salted, b"Client Key", hash_name)
    stored_key = hashlib.new(hash_name, client_key).digest()
    return _Stored(salt, stored_key, hmac.digest(salted, b"Server Key", hash_name))


class Users:
    """The users that may connect."""

    def __init__(
        self, passwords: Mapping[str, str], mechanisms: Sequence[str] = MECHANISMS
    ) -> None:
        self.mechanisms = tuple(mechanisms)
        self._known = {
            (user, hash_name): _store(password, hash_name, secrets.token_bytes(16))
            for user, password in passwords.items()
            for hash_name in _HASHES.values()
        }
        # An unknown name takes as long as a wrong password, and is answered the same.
        self._nobody = {
            hash_name: _store(secrets.token_hex(), hash_name, secrets.token_bytes(16))
            for hash_name in _HASHES.values()
        }

    def names(self) -> list[str]:
        return sorted({user for user, _ in self._known})

    def stored(self, user: str, hash_name: str) -> _Stored:
        return self._known.get((user, hash_name), self._nobody[hash_name])

    def is_password(self, user: str, password: str) -> bool:
        stored = self.stored(user, "sha256")
        given = _store(password, "sha256", stored.salt)
        return hmac.compare_digest(given.stored_key, stored.stored_key)


class Login:
    """The authentication of one connection."""

    def __init__(self, users: Users) -> None:
        self.user: str | None = None
        self.has_failed = False
        self.mechanisms = users.mechanisms
        self._users = users
        self._exchange: Generator[bytes, bytes, tuple[str, bytes]] | None = None

    def user_names(self) -> list[str]:
        return self._users.names()

    @property
    def has_begun(self) -> bool:
        return self._exchange is not None

    def begin(self, mechanism: str) -> bool:
        if mechanism not in self.mechanisms:
            return False
        if mechanism == "PLAIN":
            self._exchange = _plain(self._users)
        else:
            self._exchange = _scram(self._users, _HASHES[mechanism])
        next(self._exchange)
        return True

    def answer(self, message: bytes) -> bytes:
        """The answer to a client's message. Raises `LoginFailed`."""
        if self._exchange is None or len(message) > _MESSAGE_BYTES_MAX:
            raise LoginFailed("Authentication failed")
        try:
            return self._exchange.send(message)
        except StopIteration as done:
            self.user, last = done.value
            self._exchange = None
            return bytes(last)
        except (LoginFailed, ValueError, KeyError, binascii.Error):
            self.has_failed = True
            self._exchange = None
            raise LoginFailed("Authentication failed: invalid credentials") from None


def _plain(users: Users) -> Generator[bytes, bytes, tuple[str, bytes]]:
    message = (yield b"").decode()
    authorization, user, password = message.split("\0")
    if authorization not in ("", user) or not users.is_password(user, password):
        raise LoginFailed
    return user, b""


def _scram(users: Users, hash_name: str) -> Generator[bytes, bytes, tuple[str, bytes]]:
    first = (yield b"").decode()
    header, _, bare = first.partition(",,")
    if header not in ("n", "y"):
        raise LoginFailed
    given = _attributes(bare)
    user = given["n"].replace("=2C", ",").replace("=3D", "=")
    stored = users.stored(user, hash_name)
    nonce = given["r"] + secrets.token_urlsafe(18)
    salt = base64.b64encode(stored.salt).decode()
    server_first = f"r={nonce},s={salt},i={ITERATIONS}"
    final = (yield server_first.encode()).decode()
    final_bare, _, proof = final.rpartition(",p=")
    if _attributes(final_bare).get("r") != nonce:
        raise LoginFailed
    signed = f"{bare},{server_first},{final_bare}".encode()
    signature = hmac.digest(stored.stored_key, signed, hash_name)
    proven = base64.b64decode(proof, validate=True)
    client_key = bytes(a ^ b for a, b in zip(proven, signature, strict=True))
    if not hmac.compare_digest(hashlib.new(hash_name, client_key).digest(), stored.stored_key):
        raise LoginFailed
    verifier = base64.b64encode(hmac.digest(stored.server_key, signed, hash_name)).decode()
    return user, f"v={verifier}".encode()


def _attributes(text: str) -> dict[str, str]:
    pairs = (part.partition("=") for part in text.split(","))
    return {key: value for key, _, value in pairs}
