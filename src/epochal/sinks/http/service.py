"""Where a service is and how it is spoken to, as it travels with a sink."""

from __future__ import annotations

from dataclasses import dataclass

from epochal.kit.secrets import Secret


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """Where a service is and how it is spoken to. Secrets only by where they are kept."""

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
