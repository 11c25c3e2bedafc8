"""Who may come in, and with how much at a time."""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    tokens: tuple[bytes, ...] = field(default=(), repr=False)
    """Bearer tokens, any of which opens; none where everybody may ask."""
    body_bytes_max: int = 64 * 1024 * 1024

    def admits(self, authorization: str) -> bool:
        if not self.tokens:
            return True
        scheme, _, given = authorization.partition(" ")
        shown = given.strip().encode() if scheme.lower() == "bearer" else b""
        # All of them are compared, so that time tells nothing.
        matches = [hmac.compare_digest(shown, token) for token in self.tokens]
        return any(matches)
