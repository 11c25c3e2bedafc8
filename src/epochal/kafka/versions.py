"""Which version of an API to speak with a broker."""

from __future__ import annotations

from collections.abc import Mapping

from epochal.errors import Misconfigured
from epochal.kafka.primitives import Message, Request

_CLIENT_MAX = {
    0: 12,  # from 13 on topics go by id instead of by name
    1: 12,  # the same
    8: 9,  # from 10 on, the same
    9: 9,  # the same
    24: 3,  # later ones are for brokers among themselves
}
_BEFORE_TRANSACTION_V2 = {0: 11, 26: 4, 28: 4}
"""
A broker advertises the versions of the newer transaction protocol even where the cluster has not
switched it on; sent there, they leave a transaction that nobody can end.
"""

TRANSACTION_FEATURE = "transaction.version"


class NotSpoken(Misconfigured):
    """A request that this broker, older than it, does not know at all. It was not sent."""


def choose(
    request: Request[Message],
    spoken: Mapping[int, tuple[int, int]],
    *,
    transaction_version: int,
    version_max: int | None = None,
) -> int:
    """The highest version that both sides speak and that is safe with this cluster's features."""
    key = request.API_KEY
    name = type(request).__name__
    if key not in spoken:
        raise NotSpoken(f"the broker does not speak {name} (API key {key})")
    low, high = spoken[key]
    limits = [request.VERSIONS[-1], high, _CLIENT_MAX.get(key, high)]
    if transaction_version < 2:
        limits.append(_BEFORE_TRANSACTION_V2.get(key, high))
    if version_max is not None:
        limits.append(version_max)
    best = min(limits)
    if best < max(low, request.VERSIONS[0]):
        ours = f"{request.VERSIONS[0]} to {min(limits)}"
        raise Misconfigured(f"the broker speaks {name} {low} to {high}, this client {ours}")
    return best
