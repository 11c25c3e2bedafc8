"""`Access`: who may send requests, and how large they may be."""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    tokens: tuple[bytes, ...] = field(default=(), repr=False)
    """Bearer tokens, any of which is accepted; none where every request is."""
    body_bytes_max: int = 64 * 1024 * 1024

    def allows(self, authorization: str) -> bool:
        if not self.tokens:
            return True
        scheme, _, given = authorization.partition(" ")
        shown = given.strip().encode() if scheme.lower() == "bearer" else b""
        # All of them are compared, so that the time taken reveals nothing.
        matches = [hmac.compare_digest(shown, token) for token in self.tokens]
        return any(matches)
