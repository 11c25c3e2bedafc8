"""`choose`: the version of a request to send to a broker."""

from __future__ import annotations

from collections.abc import Mapping

from epochal.errors import Misconfigured
from epochal.kafka.primitives import Message, Request

_CLIENT_MAX = {
    0: 12,  # from 13 on topics are named by id
    1: 12,  # the same
    8: 9,  # from 10 on, the same
    9: 9,  # the same
    24: 3,  # later ones are sent between brokers
}
_BEFORE_TRANSACTION_V2 = {0: 11, 26: 4, 28: 4}
"""
A broker advertises the versions of the newer transaction protocol even where the cluster has not
switched it on; used there, they leave a transaction that can't be ended.
"""

TRANSACTION_FEATURE = "transaction.version"


class UnsupportedRequest(Misconfigured):
    """A request that is newer than the broker. It was not sent."""


def choose(
    request: Request[Message],
    supported: Mapping[int, tuple[int, int]],
    *,
    transaction_version: int,
    version_max: int | None = None,
) -> int:
    """The highest version that both sides support and that is safe with the cluster's features."""
    key = request.API_KEY
    name = type(request).__name__
    if key not in supported:
        raise UnsupportedRequest(f"the broker does not support {name} (API key {key})")
    low, high = supported[key]
    limits = [request.VERSIONS[-1], high, _CLIENT_MAX.get(key, high)]
    if transaction_version < 2:
        limits.append(_BEFORE_TRANSACTION_V2.get(key, high))
    if version_max is not None:
        limits.append(version_max)
    best = min(limits)
    if best < max(low, request.VERSIONS[0]):
        ours = f"{request.VERSIONS[0]} to {min(limits)}"
        raise Misconfigured(
            f"the broker supports {name} {low} to {high}, this client {ours}",
            "brokers of 2.5 or newer; a newer release of epochal for newer ones",
        )
    return best
