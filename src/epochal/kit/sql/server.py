"""How a server is spoken to, whichever database it is."""

from __future__ import annotations

from dataclasses import dataclass

from epochal.kit.secrets import Secret


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseServer:
    """With which password, and with how much patience. Holds no secret, except a held one."""

    password: Secret | None
    connect_timeout_s: float
    statement_timeout_s: float
    lock_timeout_s: float
    pool_min: int
    pool_max: int
    idle_max_s: float
    lifetime_max_s: float

    def secret(self) -> str:
        return "" if self.password is None else self.password.reveal()

    def without_secret(self, words: str) -> str:
        """The words of a library, which may quote what it was given."""
        secret = self.secret()
        return words.replace(secret, "…") if secret else words
