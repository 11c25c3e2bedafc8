"""`MEANINGS`: status codes of a service, by what the caller does next."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType

from epochal.errors import EpochalError, Misconfigured, RowRejected
from epochal.terms import Outcome


class Meaning(Enum):
    """What an answer means for the same request."""

    OK = "ok"
    RETRY = "retry"
    """Send it again, later."""
    REJECT = "reject"
    """The service will never take these rows."""
    STOP = "stop"
    """No rows are taken until a person changes something."""

    @property
    def outcome(self) -> Outcome:
        return _OUTCOMES[self]


_OUTCOMES = {
    Meaning.OK: Outcome.OK,
    Meaning.RETRY: Outcome.RETRYABLE,
    Meaning.REJECT: Outcome.FATAL,
    Meaning.STOP: Outcome.FATAL,
}

MEANINGS: Mapping[int, tuple[Meaning, str]] = MappingProxyType(
    {
        400: (Meaning.REJECT, "the service can't read the request"),
        401: (
            Meaning.STOP,
            "token=, headers= or a certificate: the service asks who calls",
        ),
        403: (
            Meaning.STOP,
            "the service refuses this client: ask for the right to write",
        ),
        404: (Meaning.STOP, "is base_url right?"),
        405: (Meaning.STOP, "is base_url right, and method=?"),
        407: (Meaning.STOP, "the proxy asks for credentials"),
        408: (Meaning.RETRY, ""),
        409: (Meaning.RETRY, ""),
        410: (Meaning.STOP, "is base_url right?"),
        413: (Meaning.REJECT, "fewer rows per request: part_bytes= or rows_per_call="),
        415: (Meaning.STOP, "another format=, or another body="),
        422: (Meaning.REJECT, "the service will never take these rows as they are"),
        423: (Meaning.RETRY, ""),
        425: (Meaning.RETRY, ""),
        429: (Meaning.RETRY, ""),
    }
)
"""Single codes; all others go by their hundreds: 2xx is done, 5xx is tried again."""

_BY_HUNDREDS: Mapping[int, tuple[Meaning, str]] = MappingProxyType(
    {
        2: (Meaning.OK, ""),
        3: (Meaning.STOP, "it redirects, and credentials don't follow: name the final URL"),
        4: (Meaning.REJECT, "the service will never take this request"),
        5: (Meaning.RETRY, ""),
    }
)


def meaning_of(
    status: int, overrides: Mapping[int, Meaning] = MappingProxyType({})
) -> tuple[Meaning, str]:
    """The meaning of a status, and a hint for a person."""
    known, hint = MEANINGS.get(status) or _BY_HUNDREDS.get(status // 100, (Meaning.STOP, ""))
    return overrides.get(status, known), hint


def refusal(meaning: Meaning, message: str, hint: str) -> EpochalError:
    """The error for an answer that a repetition will not change."""
    kind = RowRejected if meaning is Meaning.REJECT else Misconfigured
    return kind(message, hint or "see the service's own message")
